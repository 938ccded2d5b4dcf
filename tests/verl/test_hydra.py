"""Our node beside verl's configuration: with command lines of verl's Megatron engine, and what is refused."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rl_safe_workers.adapters.verl.entry import check_run, prepare_job
from rl_safe_workers.adapters.verl.main_ppo import beside_verls
from rl_safe_workers.adapters.verl.settings import TAKEN, VerlSettings, read_settings
from rl_safe_workers.adapters.verl.verl_contract import NAMES
from rl_safe_workers.errors import ConfigError, first_line
from rl_safe_workers.topology.layout import ParallelLayout
from tests.integration.runs import REPOSITORY
from tests.nemo_rl.source import write_source
from tests.verl.examples import arguments_of, command_lines

MODEL = ("model_engine=megatron", "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=/models/moe")
SIZES = "actor_rollout_ref.actor.megatron"
COMMAND_LINES = {
    "dense": [*MODEL, f"{SIZES}.tensor_model_parallel_size=2", f"{SIZES}.pipeline_model_parallel_size=2"],
    "experts": [
        *MODEL,
        f"{SIZES}.tensor_model_parallel_size=4",
        f"{SIZES}.expert_model_parallel_size=8",
        f"{SIZES}.expert_tensor_parallel_size=1",
        f"{SIZES}.param_offload=True",
        f"{SIZES}.optimizer_offload=True",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=alltoall",
    ],
    "critic": [
        *MODEL,
        "algorithm.adv_estimator=gae",
        "critic.megatron.tensor_model_parallel_size=2",
        "critic.megatron.pipeline_model_parallel_size=2",
        "critic.model.path=/models/moe",
    ],
}
VERL_SRC = "VERL_SRC"
"""Environment variable: a checkout of verl's repository, whose examples are composed then, too."""
GROUP = ["hydra.searchpath=[pkg://rl_safe_workers.adapters.verl.conf]", "+rl_safe=enabled"]


def composed(*arguments: str) -> DictConfig:
    """verl's configuration with these overrides, and the options that say which it is."""
    options = dict(argument.split("=", 1) for argument in beside_verls(arguments) if argument.startswith("--config-"))
    overrides = [argument for argument in arguments if not argument.startswith("--config-")]
    where = options.get("--config-path")
    with (
        initialize_config_module("verl.trainer.config", version_base=None)
        if where is None
        else initialize_config_dir(where, version_base=None)
    ):
        return compose(options.get("--config-name", "ppo_trainer"), overrides=overrides)


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VERL_ENGINE_VENDOR", "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS", "RL_SAFE_VERL"):
        monkeypatch.delenv(name, raising=False)


def assert_composes(overrides: list[str]) -> None:
    config = composed(*overrides, *GROUP)
    timeout = config.actor_rollout_ref.nccl_timeout
    settings = read_settings(config).model_copy(update={"dispatchers": []})
    assert settings == VerlSettings(enabled=True, nccl_timeout=timeout)
    assert config.actor_rollout_ref.actor.strategy == "megatron"
    del config.actor_rollout_ref.rl_safe
    assert config == composed(*overrides)


@pytest.mark.parametrize("kind", COMMAND_LINES)
def test_a_command_line_composes_with_ours_and_is_otherwise_unchanged(kind) -> None:
    assert_composes(COMMAND_LINES[kind])


@pytest.mark.skipif(VERL_SRC not in os.environ, reason=f"{VERL_SRC} names no checkout of verl")
@pytest.mark.timeout(900)
def test_so_does_every_megatron_example_that_verl_composes_itself(tmp_path) -> None:
    composed_by_verl, refused_by_verl = [], []
    for name, overrides in command_lines(Path(os.environ[VERL_SRC]), tmp_path):
        try:
            composed(*overrides)
        except HydraException as error:
            refused_by_verl.append(f"{name}: {first_line(error)}")
            continue
        assert_composes(overrides)
        composed_by_verl.append(name)

    assert len(composed_by_verl) > 20, refused_by_verl


TRAINER = f"{importlib.util.find_spec('verl').submodule_search_locations[0]}/trainer"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--config-path=config"], [f"--config-path={TRAINER}/config"]),
        (["-cp", "./config/", "a=config"], ["-cp", f"{TRAINER}/config", "a=config"]),
        (
            ["--config-path", "../x", "--config-path", "y"],
            ["--config-path", f"{TRAINER[:-8]}/x", "--config-path", f"{TRAINER}/y"],
        ),
        (["--config-path=/mine", "-cp", "/mine"], ["--config-path=/mine", "-cp", "/mine"]),
        (["--config-path=pkg://mine.conf", "-cp=file:///mine"], ["--config-path=pkg://mine.conf", "-cp=file:///mine"]),
        (
            ["--config-name=config", "a.b=-cp", "+rl_safe=enabled"],
            ["--config-name=config", "a.b=-cp", "+rl_safe=enabled"],
        ),
    ],
)
def test_a_config_path_means_what_it_does_to_verls_entry(given, meant) -> None:
    assert beside_verls(given) == meant


def test_our_entry_finds_the_configuration_that_verls_examples_name() -> None:
    options = ["--config-path=config", "--config-name=ppo_megatron_trainer.yaml", "--cfg=job"]
    command = [sys.executable, "-m", "rl_safe_workers.adapters.verl.main_ppo", *options, *GROUP[1:]]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 0, shown.stderr
    config = OmegaConf.create(shown.stdout)
    assert config.actor_rollout_ref.actor.strategy == "megatron"
    assert config.actor_rollout_ref.rl_safe.enabled


RECIPE = REPOSITORY / "recipes" / "verl" / "qwen3_30b_a3b_megatron.sh"
COMMANDS = re.findall(r"#   ((?:\w+=\d+ )*)recipes/verl/", RECIPE.read_text())
EXPERTS = 48 * 128 * 3 * 2048 * 768
"""Parameters of Qwen3-30B-A3B's experts: layers, experts, matrices, sizes."""


@pytest.mark.parametrize("variables", COMMANDS, ids=lambda text: text.strip() or "plain")
def test_a_command_of_the_recipe_composes_and_its_experts_fit(variables, tmp_path) -> None:
    given = dict(pair.split("=") for pair in variables.split())
    arguments = arguments_of(RECIPE, tmp_path, **given)
    overrides = arguments[arguments.index("rl_safe_workers.adapters.verl.main_ppo") + 1 :]
    config = composed(*overrides, GROUP[0])
    assert check_run(config) is not None
    sizes, nodes = config.actor_rollout_ref.actor.megatron, config.trainer.nnodes
    ParallelLayout(
        world_size=8 * nodes,
        tensor=sizes.tensor_model_parallel_size,
        pipeline=sizes.pipeline_model_parallel_size,
        expert=sizes.expert_model_parallel_size,
        expert_tensor=sizes.expert_tensor_parallel_size,
        context=sizes.context_parallel_size,
    )
    shared_by = sizes.pipeline_model_parallel_size * sizes.expert_model_parallel_size
    weights_and_gradients, moments = 6 * EXPERTS / shared_by, 12 * EXPERTS / (8 * nodes)
    assert weights_and_gradients + moments < 0.9 * 80e9


def test_the_recipe_has_both_of_its_commands() -> None:
    assert [dict(pair.split("=") for pair in text.split()).get("NNODES") for text in COMMANDS] == [None, "2"]


def test_the_group_has_every_key_with_its_default() -> None:
    config = composed("model_engine=megatron", GROUP[0], "+rl_safe=default")
    node = OmegaConf.to_container(config.actor_rollout_ref.rl_safe)
    assert VerlSettings.read(node, source="x") == VerlSettings()
    every = VerlSettings().model_dump(mode="json")
    for key in TAKEN:
        del every[key]
    del every["bootstrap"]["max_ctas"]["world"]
    assert node == every


def test_without_the_node_verl_runs_as_it_is() -> None:
    assert check_run(composed("model_engine=megatron")) is None


CTAS = "+actor_rollout_ref.rl_safe.bootstrap.max_ctas"
CRITIC = ["algorithm.adv_estimator=gae", "critic.model.path=/models/moe"]
REFERENCE = ["actor_rollout_ref.actor.use_kl_loss=true"]
ON = ["model_engine=megatron", "+actor_rollout_ref.rl_safe.enabled=true"]
ROLLOUT = "actor_rollout_ref.rollout"
PROVED = [
    *(*ON, "+actor_rollout_ref.rl_safe.prove_sync_freq=1"),
    *(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=1"),
]
PACKED = [*ON, "+actor_rollout_ref.rl_safe.packed_sync=true", f"{ROLLOUT}.name=vllm"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+actor_rollout_ref.rl_safe.enabled=true"], "strategy=fsdp: it must be megatron"),
        (["+actor_rollout_ref.rl_safe.packed_sync=true"], "has settings, but no actor_rollout_ref.rl_safe.enabled"),
        ([*ON, "+actor_rollout_ref.rl_safe.timeouts.sav=3"], "unknown key .*timeouts.sav; the nearest .*timeouts.save"),
        ([*ON, "+actor_rollout_ref.rl_safe.timeouts.save=soon"], "rl_safe.timeouts.save cannot be 'soon'"),
        ([*ON, "+actor_rollout_ref.rl_safe.timeouts.save=0"], "timeouts.save cannot be 0; it should be greater than 0"),
        ([*ON, "+actor_rollout_ref.rl_safe.bootstrap.on_late=cry"], "on_late cannot be 'cry'; it should be 'warn'"),
        ([*ON, "+actor_rollout_ref.rl_safe.nccl_timeout=3"], "set actor_rollout_ref.nccl_timeout"),
        ([*ON, "+actor_rollout_ref.rl_safe.delta_weights=true"], "rollout.checkpoint_engine.backend"),
        ([*ON, "+actor_rollout_ref.rl_safe.dispatchers=[x]"], "moe_token_dispatcher_type in each engine's"),
        ([*ON, f"{CTAS}.epp=8"], "unknown key .*max_ctas.epp; the nearest known key is .*max_ctas"),
        ([*ON, f"{CTAS}.ep=0"], "max_ctas.ep cannot be 0; it should be greater than or equal to 1"),
        ([*ON, f"{CTAS}.world=8"], "max_ctas.world cannot have a limit: the host makes"),
        ([*ON, *CRITIC, "critic.strategy=fsdp"], "critic.strategy=fsdp: it must be megatron"),
        ([*ON, *REFERENCE, "actor_rollout_ref.ref.strategy=fsdp2"], "ref.strategy=fsdp2: it must be megatron"),
        ([*ON, "trainer.use_v1=false"], "deprecated trainer is not supported"),
        ([*ON, "trainer.v1.trainer_mode=mine"], "trainer_mode=mine: use sync or colocate_async or separate_async"),
        (["model_engine=megatron", "+actor_rollout_ref.rl_safe=7"], "must hold keys"),
        ([*ON, "+actor_rollout_ref.rl_safe.prove_sync_freq=-2"], "prove_sync_freq cannot be -2; it should be"),
        ([*PROVED, "actor_rollout_ref.rollout.name=sglang"], "=1 with .*rollout.name=sglang: only syncs to vLLM"),
        ([*PROVED, "trainer.v1.trainer_mode=separate_async"], "trainer_mode=separate_async: only syncs to engines on"),
        (
            [*PROVED, f"{ROLLOUT}.checkpoint_engine.backend=nccl"],
            "backend=nccl: only syncs to engines on the trainers'",
        ),
        ([*PROVED, f"{ROLLOUT}.data_parallel_size=2"], "data_parallel_size=2: an engine's ranks must be tensor-para"),
        ([*PROVED, f"{ROLLOUT}.pipeline_model_parallel_size=2"], "pipeline_model_parallel_size=2: an engine's ranks"),
        ([*PROVED, f"{ROLLOUT}.quantization=fp8"], "quantization=fp8: only syncs to engines that are not"),
        ([*PROVED, "actor_rollout_ref.model.lora_rank=8"], "with LoRA adapters: it needs syncs of whole weights"),
        ([*PROVED, "actor_rollout_ref.model.lora.rank=8"], "with LoRA adapters: it needs syncs of whole weights; set"),
        (
            [*PACKED, f"{ROLLOUT}.name=sglang"],
            "packed_sync=true with .*name=sglang: only syncs to vLLM's engines are pack",
        ),
        ([*PACKED, f"{ROLLOUT}.checkpoint_engine.backend=nccl"], "backend=nccl: .*; set .*rl_safe.packed_sync=false"),
        (
            [*PACKED, f"{ROLLOUT}.disaggregation.enabled=true"],
            "disaggregation.enabled=True: only syncs to whole engines",
        ),
        ([*PACKED, "actor_rollout_ref.model.lora_rank=8"], "packed_sync=true with LoRA adapters: it needs syncs of"),
        ([*ON, "+actor_rollout_ref.rl_safe.bucket_megabytes=3"], "update_weights_bucket_megabytes"),
    ],
)
def test_bad_input_is_refused_on_the_driver(overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(composed(*overrides))


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.merge=true"],
        [f"{ROLLOUT}.tensor_model_parallel_size=4", f"{ROLLOUT}.expert_parallel_size=4"],
    ],
)
def test_syncs_of_whole_weights_to_tensor_parallel_engines_are_proved(more) -> None:
    settings = check_run(composed(*PROVED, *more))
    assert settings is not None
    assert settings.prove_sync_freq == 1


def test_packed_syncs_go_to_engines_of_every_layout() -> None:
    settings = check_run(composed(*PACKED, f"{ROLLOUT}.data_parallel_size=2"))
    assert settings is not None
    assert settings.packed_sync
    assert settings.bucket_megabytes == 2048


def test_the_strategy_of_an_engine_that_a_run_does_not_have_is_not_asked_for() -> None:
    assert check_run(composed(*ON, "algorithm.adv_estimator=grpo", "critic.strategy=fsdp")) is not None


def _override(node: str, dispatcher: str) -> str:
    return f"+{node}.megatron.override_transformer_config.moe_token_dispatcher_type={dispatcher}"


def test_the_settings_say_what_engines_and_weight_sync_need() -> None:
    plain = read_settings(composed(*ON, "algorithm.adv_estimator=grpo"))
    assert (plain.dispatchers, plain.delta_weights) == (["alltoall"], False)
    config = composed(
        *ON,
        *CRITIC,
        _override("actor_rollout_ref.actor", "flex"),
        _override("critic", "allgather"),
        "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded",
        f"{CTAS}.ep=8",
    )
    settings = read_settings(config)
    assert (settings.dispatchers, settings.delta_weights) == (["allgather", "flex"], True)
    assert settings.rl_safe().bootstrap.max_ctas.limits() == {"ep": 8}
    assert VerlSettings.from_json(settings.to_json(), source="x") == settings


@pytest.mark.parametrize(
    ("variables", "overrides", "message"),
    [
        ({"VERL_ENGINE_VENDOR": "rl_safe"}, ["model_engine=megatron"], "rl_safe.enabled is not true"),
        (
            {"VERL_ENGINE_VENDOR": "rl_safe", "VERL_USE_EXTERNAL_PLUGINS": "none"},
            ON,
            "nothing loads the plugin: set VERL_USE_EXTERNAL_MODULES=",
        ),
    ],
    ids=["not_enabled", "not_loaded"],
)
def test_the_vendor_alone_is_refused(variables, overrides, message, monkeypatch) -> None:
    config = composed(*overrides)  # Hydra's plugin refuses the second by itself, see test_plugin.py
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        check_run(config)


def test_a_verl_without_a_name_that_we_need_is_refused_by_the_name(monkeypatch, tmp_path) -> None:
    source = write_source(tmp_path, names=NAMES, without="BaseEngine.infer_batch")
    (source / "verl/version").mkdir(parents=True)
    (source / "verl/version/version").write_text("0.8.0\n")
    monkeypatch.setattr("rl_safe_workers.adapters.verl.compatibility._installed", lambda: source)
    lacking = r"verl 0\.8\.0 in .* lacks BaseEngine\.infer_batch \(verl/workers/engine/base\.py\)"
    with pytest.raises(ConfigError, match=lacking + r", which .* use 0\.9\.0 or 0\.9\.1"):
        check_run(composed(*ON))


def _job_variables(*overrides: str) -> Any:
    config = composed(*ON, *overrides)
    prepare_job(config, read_settings(config), "feedbeef")
    return OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars)


def test_workers_are_told_by_the_jobs_environment() -> None:
    variables = _job_variables("actor_rollout_ref.nccl_timeout=900", "+ray_kwargs.ray_init.runtime_env.env_vars.MINE=1")
    assert variables["VERL_ENGINE_VENDOR"] == "rl_safe"
    assert variables["VERL_USE_EXTERNAL_MODULES"] == "rl_safe_workers.adapters.verl.plugin"
    told = VerlSettings.from_json(variables["RL_SAFE_VERL"], source="RL_SAFE_VERL")
    assert told.model_copy(update={"dispatchers": []}) == VerlSettings(enabled=True, nccl_timeout=900.0)
    assert variables["MINE"] == 1


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("VERL_ENGINE_VENDOR=metax", "VERL_ENGINE_VENDOR=metax with .*enabled=true"),
        ("VERL_USE_EXTERNAL_MODULES=mine", "VERL_USE_EXTERNAL_MODULES=mine lacks"),
        ('RL_SAFE_VERL={"timeouts": {"save": 7}}', "RL_SAFE_VERL differs from"),
    ],
)
def test_a_job_that_was_submitted_with_something_else_is_refused(variable, message, monkeypatch) -> None:
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        _job_variables()
