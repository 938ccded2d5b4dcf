"""The preflight: each kind of bad input gets its own error, and good input passes untouched."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.config import Logger, ResumeMode, RunConfig, SeededModelConfig
from rl_safe_workers.driver.inputs.preflight import layout_of, preflight, read_model_shape
from rl_safe_workers.errors import (
    ConfigError,
    DataError,
    LayoutError,
    ModelError,
    ResourceError,
    RewardFunctionError,
    UsageError,
)
from rl_safe_workers.models.seeded import MAX_POSITIONS, VOCAB_SIZE
from rl_safe_workers.recipe import load_recipe
from tests.weights import shapes_of, write_weights

RECIPES = Path(__file__).parents[2] / "recipes"
HF_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "vocab_size": 128,
    "hidden_size": 128,
    "max_position_embeddings": 96,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The files of a model directory that the preflight reads."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(HF_CONFIG))
    (path / "tokenizer.json").write_text("{}")
    write_weights(path / "model.safetensors", shapes_of(HF_CONFIG))
    return path


@pytest.fixture
def config(tmp_path: Path, model_dir: Path) -> RunConfig:
    """A run that passes: four trainers with EP2 and one rollout, needing 1.5 CPUs."""
    (tmp_path / "train.parquet").write_bytes(b"")
    config = RunConfig()
    config.model.path = str(model_dir)
    config.data.train_files = [str(tmp_path / "train.parquet")]
    config.megatron.expert_model_parallel_size = 2
    return config


def complaint(config: RunConfig, kind: type[UsageError], cpus: float = math.inf) -> str:
    with pytest.raises(kind) as caught:
        preflight(config, cpus=cpus)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_good_run_passes_and_leaves_nothing_behind(config: RunConfig, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    preflight(config, cpus=1.5)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("quickstart*.yaml")), ids=lambda recipe: recipe.stem)
def test_every_quickstart_passes_on_two_cpus_from_anywhere(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    preflight(load_recipe(recipe), cpus=2)
    assert list(tmp_path.iterdir()) == []


def test_a_seeded_model_passes_without_being_made(config: RunConfig, tmp_path: Path) -> None:
    config.model.path = str(tmp_path / "seeded")
    config.model.create = SeededModelConfig(num_experts=0)
    config.megatron.expert_model_parallel_size = 1
    preflight(config, cpus=2)
    assert not (tmp_path / "seeded").exists()
    assert read_model_shape(config.model).model_type == "qwen3"


def test_the_shape_of_a_seeded_model_is_that_of_the_model_made(tmp_path: Path) -> None:
    seeded = pytest.importorskip("rl_safe_workers.models.seeded")
    config = RunConfig().model
    config.path, config.create = str(tmp_path / "seeded"), SeededModelConfig(num_hidden_layers=1, hidden_size=32)
    promised = read_model_shape(config)
    seeded.create_seeded_model(Path(config.path), config.create)
    assert read_model_shape(config) == promised


def test_contradictions_are_found_in_a_config_built_in_code(config: RunConfig) -> None:
    config.rollout.n = 1
    assert "rollout.n=1" in complaint(config, ConfigError)


def test_ranks_of_an_engine_share_the_attention_heads_evenly(config: RunConfig) -> None:
    config.cluster.num_rollouts = config.rollout.tensor_model_parallel_size = 3
    assert "has 4 attention heads, which so many ranks cannot share evenly" in complaint(config, ConfigError)


def test_the_layout_takes_every_size(config: RunConfig) -> None:
    megatron = config.megatron
    megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size = 2, 3
    megatron.expert_tensor_parallel_size, megatron.context_parallel_size = 5, 7
    config.cluster.num_trainers = 11
    layout = layout_of(config)
    assert (layout.tensor, layout.pipeline, layout.expert) == (2, 3, 2)
    assert (layout.expert_tensor, layout.context, layout.world_size) == (5, 7, 11)


def test_sizes_that_do_not_factor_are_refused(config: RunConfig) -> None:
    config.cluster.num_trainers = 5
    assert "set cluster.num_trainers to 4 or 6" in complaint(config, LayoutError)


def test_experts_that_do_not_divide_are_refused(config: RunConfig, model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps({**HF_CONFIG, "num_experts": 3}))
    assert "3 experts do not divide by megatron.expert_model_parallel_size=2" in complaint(config, LayoutError)


def test_routing_replay_is_refused_where_there_is_nothing_to_replay(config: RunConfig, model_dir: Path) -> None:
    config.rollout.enable_rollout_routing_replay = True
    assert "needs cluster.device=cuda" in complaint(config, ConfigError)
    config.cluster.device = "cuda"
    config.megatron.expert_model_parallel_size = 1
    (model_dir / "config.json").write_text(json.dumps({**HF_CONFIG, "model_type": "qwen3", "num_experts": 0}))
    assert "has no experts to route to" in complaint(config, ConfigError)


def test_a_bootstrap_that_may_take_less_than_the_store_needs_is_refused(config: RunConfig) -> None:
    config.rl_safe.timeouts.bootstrap = 0.2
    assert "rl_safe.timeouts.bootstrap cannot be 0.2; it should be greater than or equal to 1" in complaint(
        config, ConfigError
    )


def test_optimizer_instances_that_do_not_divide_are_refused(config: RunConfig) -> None:
    config.megatron.num_distributed_optimizer_instances = 3
    assert "num_distributed_optimizer_instances=3 does not divide the data-parallel size" in complaint(
        config, LayoutError
    )


def test_virtual_stages_need_a_pipeline(config: RunConfig) -> None:
    config.megatron.virtual_pipeline_model_parallel_size = 2
    assert "both must be at least 2; for" in complaint(config, ConfigError)


def test_virtual_stages_that_do_not_divide_the_layers_are_refused(config: RunConfig) -> None:
    config.megatron.pipeline_model_parallel_size = config.megatron.virtual_pipeline_model_parallel_size = 2
    assert "cuts 2 stages into 4 pieces, which do not divide 2 layers" in complaint(config, LayoutError)


def test_virtual_stages_need_as_many_micro_batches_as_stages(config: RunConfig, model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps({**HF_CONFIG, "num_hidden_layers": 4}))
    write_weights(model_dir / "model.safetensors", shapes_of({**HF_CONFIG, "num_hidden_layers": 4}))
    config.megatron.pipeline_model_parallel_size = config.megatron.virtual_pipeline_model_parallel_size = 2
    sequences = config.data.train_batch_size * config.rollout.n // 2
    config.actor.ppo_micro_batch_size_per_gpu = sequences // 2
    preflight(config, cpus=8)
    config.actor.ppo_micro_batch_size_per_gpu = sequences
    assert "the 1 micro batches of each data-parallel rank" in complaint(config, ConfigError)


def test_saves_with_several_optimizer_instances_are_refused(config: RunConfig) -> None:
    config.megatron.num_distributed_optimizer_instances, config.trainer.save_freq = 2, 1
    assert "saves support only one instance" in complaint(config, ConfigError)


def test_a_channel_limit_of_no_group_of_the_layout_is_refused(config: RunConfig) -> None:
    config.rl_safe.bootstrap.max_ctas.inter_ep_dp = 4
    assert "rl_safe.bootstrap.max_ctas.inter_ep_dp: Megatron creates none in this layout" in complaint(
        config, ConfigError
    )


def test_context_parallelism_is_refused(config: RunConfig) -> None:
    config.megatron.context_parallel_size = 2
    assert "megatron.context_parallel_size=2 must be 1" in complaint(config, ConfigError)


def test_a_missing_model_is_refused_with_how_to_make_one(config: RunConfig, tmp_path: Path) -> None:
    config.model.path = str(tmp_path / "gone")
    assert complaint(config, ModelError) == (
        f"model.path={tmp_path / 'gone'} does not exist; give a local directory of a supported model "
        "(docs/checkpoints.md), or model.create={} to make a small seeded one there"
    )


def test_a_file_is_no_model(config: RunConfig, model_dir: Path) -> None:
    config.model.path = str(model_dir / "config.json")
    assert "is not a directory" in complaint(config, ModelError)


@pytest.mark.parametrize("absent", ["config.json", "tokenizer.json"])
def test_an_incomplete_model_names_what_it_lacks(config: RunConfig, model_dir: Path, absent: str) -> None:
    (model_dir / absent).unlink()
    assert absent in complaint(config, ModelError)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read: not JSON: Expecting property name"),
        ("[]", "holds a list, not a JSON object"),
        ('{"model_type": "gpt2"}', "model type 'gpt2' is not supported: use llama, qwen2, qwen3,"),
    ],
)
def test_a_config_json_that_is_no_supported_model_is_refused(
    config: RunConfig, model_dir: Path, content: str, message: str
) -> None:
    (model_dir / "config.json").write_text(content)
    assert message in complaint(config, ModelError)


def test_pickled_weights_are_not_read(config: RunConfig, model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    assert "only pickled weights (pytorch_model.bin), which are not read" in complaint(config, ModelError)


def test_a_model_without_weights_is_refused(config: RunConfig, model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    assert "has no weights; save the model as safetensors" in complaint(config, ModelError)


def test_a_shard_that_the_index_names_must_be_there(config: RunConfig, model_dir: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-2.safetensors" in complaint(config, ModelError)


def test_prompt_and_response_must_fit_the_model(config: RunConfig) -> None:
    config.data.max_prompt_length, config.data.max_response_length = 64, 33
    assert "make 97 tokens" in complaint(config, ConfigError)


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused(config: RunConfig) -> None:
    config.data.train_batch_size, config.rollout.n = 3, 2
    assert complaint(config, ConfigError).startswith(
        "data.train_batch_size=3 x rollout.n=2 = 6 sequences do not divide over 4 data-parallel ranks"
    )


def test_the_mini_batch_must_divide_over_the_ranks_too(config: RunConfig) -> None:
    config.actor.ppo_mini_batch_size, config.rollout.n = 1, 2
    assert "actor.ppo_mini_batch_size=1 x rollout.n=2 = 2 sequences" in complaint(config, ConfigError)


def test_micro_batches_must_be_whole(config: RunConfig) -> None:
    config.actor.ppo_micro_batch_size_per_gpu = 3
    message = complaint(config, ConfigError)
    assert "ppo_micro_batch_size_per_gpu=3 does not divide the 16 sequences of each of 4" in message
    assert message.endswith("use one of 1, 2, 4, 8, 16")


@pytest.mark.parametrize(("name", "message"), [("gone.parquet", "does not exist"), ("a.json", "not end in .parquet")])
def test_a_prompt_file_must_exist_as_parquet(config: RunConfig, name: str, message: str) -> None:
    config.data.train_files.append(name)
    assert message in complaint(config, DataError)


def test_a_checkpoint_to_resume_from_must_exist(config: RunConfig, tmp_path: Path) -> None:
    config.trainer.resume_mode = config.trainer.resume_mode.resume_path
    config.trainer.resume_from_path = str(tmp_path / "global_step_3")
    assert "global_step_3 is not a directory" in complaint(config, ConfigError)


def test_a_reward_function_that_cannot_be_imported_is_refused(config: RunConfig) -> None:
    config.reward.function = "no_such_module:reward"
    assert "no_such_module" in complaint(config, RewardFunctionError)


def test_too_few_cpus_are_refused_with_the_numbers(config: RunConfig) -> None:
    config.cluster.cpus_per_trainer = 0.5
    assert complaint(config, ResourceError, cpus=2).startswith(
        "4 trainers x 0.5 CPUs + 1 rollouts x 0.5 CPUs = 2.5 CPUs, but there are 2; lower cluster.cpus_per_trainer"
    )


def test_fractions_of_cpus_may_add_up_to_all_of_them(config: RunConfig) -> None:
    config.cluster.cpus_per_trainer, config.cluster.cpus_per_rollout = 0.1, 0.2
    preflight(config, cpus=0.6)


def test_the_preflight_loads_no_heavy_library() -> None:
    heavy = ("torch", "ray", "transformers", "pyarrow", "megatron", "vllm")
    code = f"import sys, rl_safe_workers.driver.inputs.preflight; print([n for n in {heavy} if n in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_a_seeded_model_of_other_sizes_is_not_taken_for_the_one_asked_for(config: RunConfig, model_dir: Path) -> None:
    config.model.create = SeededModelConfig(num_experts=int(HF_CONFIG["num_experts"]) * 2)
    seeded = {**HF_CONFIG, "vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITIONS}
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"):
        seeded[name] = getattr(config.model.create, name)
    (model_dir / "config.json").write_text(json.dumps(seeded))
    write_weights(model_dir / "model.safetensors", shapes_of(seeded))
    message = complaint(config, ModelError)
    assert f"num_experts {HF_CONFIG['num_experts']}, model.create asks for {config.model.create.num_experts}" in message
    config.model.create.num_experts = int(HF_CONFIG["num_experts"])
    preflight(config, cpus=2)


def test_tensorboard_must_be_installed(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config.trainer.logger = [Logger.tensorboard]
    preflight(config, cpus=2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "tensorboard, which is not installed" in complaint(config, ConfigError)


@pytest.mark.parametrize("flag", ["fully_parallel_save", "validate_access_integrity"])
def test_a_save_of_megatrons_own_cannot_go_on_in_the_background(config: RunConfig, flag: str) -> None:
    setattr(config.rl_safe.checkpoint, flag, True)
    config.rl_safe.checkpoint.async_save = True
    assert f"rl_safe.checkpoint: async_save=true with {flag}=true" in complaint(config, ConfigError)


@pytest.mark.parametrize("key", ["output_dir", "default_local_dir"])
def test_a_place_below_a_file_is_refused(config: RunConfig, tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    config.trainer.save_freq = 1
    setattr(config.trainer, key, str(tmp_path / "file" / "x" / "y"))
    assert f"{tmp_path / 'file'} exists and is not a folder" in complaint(config, ConfigError)


def test_a_run_folder_that_is_a_file_is_refused(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"")
    config.trainer.output_dir, config.trainer.run_name = str(tmp_path), "mine"
    assert f"trainer.output_dir={tmp_path / 'mine'}: " in complaint(config, ConfigError)


def test_an_output_folder_that_may_not_be_written_is_refused(config: RunConfig) -> None:
    config.trainer.output_dir = "/proc/self"  # no user can make a folder there, but root may write it by its mode
    if os.access("/proc/self", os.W_OK):
        pytest.skip("this user may write anywhere")
    assert "you have no permission to write to /proc/self" in complaint(config, ConfigError)


@pytest.mark.parametrize("key", ["model.path", "trainer.output_dir", "trainer.resume_from_path", "data.train_files"])
def test_links_in_a_circle_are_refused_for_each_path(config: RunConfig, tmp_path: Path, key: str) -> None:
    link = tmp_path / "link.parquet"
    link.symlink_to(link)
    config.trainer.resume_mode = ResumeMode.resume_path
    config.trainer.resume_from_path = str(tmp_path)
    section, name = key.split(".")
    setattr(getattr(config, section), name, [str(link)] if name == "train_files" else str(link))
    assert "Too many levels of symbolic links" in complaint(config, ConfigError)
