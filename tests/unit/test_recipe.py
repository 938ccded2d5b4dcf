"""Recipes and overrides: what merges, and the one line that each mistake gets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_safe_workers.config import (
    MIN_BOOTSTRAP_TIMEOUT_S,
    AdvEstimator,
    ClusterConfig,
    ResumeMode,
    RunConfig,
    SeededModelConfig,
)
from rl_safe_workers.control import supervision
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.recipe import load_recipe, ray_address, to_yaml
from rl_safe_workers.section import nearest_key

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"

Write = Callable[..., Path]
BASE = "model: {path: m}\ndata: {train_files: [d.parquet]}\n"
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a recipe under a temporary folder; its text defaults to the mandatory keys."""

    def _write(text: str = BASE, name: str = "recipes/base.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return _write


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_fills_in_defaults(write: Write) -> None:
    config = load_recipe(write())
    assert isinstance(config, RunConfig)
    assert (config.model.path, config.data.train_files, config.rollout.n) == ("m", ["d.parquet"], 8)


def test_overrides_win_over_the_recipe_and_parse_as_yaml(write: Write) -> None:
    path = write(BASE + "trainer: {seed: 1}\n")
    overrides = ["trainer.seed=2", "trainer.logger=[console,tensorboard]", "actor.optim.lr=1e-4", "trainer.seed=3"]
    config = load_recipe(path, overrides)
    assert (config.trainer.seed, config.actor.optim.lr) == (3, 1e-4)
    assert config.trainer.logger == ["console", "tensorboard"]


def test_enums_are_read_by_name(write: Write) -> None:
    config = load_recipe(write(), ["trainer.resume_mode=auto", "algorithm.adv_estimator=rloo"])
    assert config.trainer.resume_mode is ResumeMode.auto
    assert config.algorithm.adv_estimator is AdvEstimator.rloo


def test_one_key_of_an_absent_section_brings_in_the_section(write: Write) -> None:
    assert load_recipe(write()).model.create is None
    assert load_recipe(write(), ["model.create.seed=5"]).model.create == SeededModelConfig(seed=5)
    assert load_recipe(write(), ["model.create={}"]).model.create == SeededModelConfig()


def test_a_section_can_be_taken_away(write: Write) -> None:
    assert load_recipe(write(), ["model.create.seed=5", "model.create=null"]).model.create is None


def test_a_child_wins_over_its_parents_and_later_parents_over_earlier(write: Write) -> None:
    write(BASE + "trainer: {seed: 1, save_freq: 1, total_training_steps: 1}\n", "recipes/a.yaml")
    write("trainer: {save_freq: 2, total_training_steps: 2}\n", "recipes/more/b.yaml")
    child = write("defaults: [a.yaml, more/b.yaml]\ntrainer: {total_training_steps: 3}\n")
    trainer = load_recipe(child).trainer
    assert (trainer.seed, trainer.save_freq, trainer.total_training_steps) == (1, 2, 3)


def test_a_parent_reached_twice_does_not_overrule_its_child(write: Write) -> None:
    write(BASE + "trainer: {seed: 1}\n", "root.yaml")
    write("defaults: root.yaml\ntrainer: {seed: 2}\n", "a.yaml")
    write("defaults: ../x/../root.yaml\n", "x/b.yaml")
    assert load_recipe(write("defaults: [a.yaml, x/b.yaml]\n", "child.yaml")).trainer.seed == 2


def test_a_cycle_of_recipes_is_shown(write: Write) -> None:
    write("defaults: b.yaml\n", "a.yaml")
    write("defaults: c.yaml\n", "b.yaml")
    path = write("defaults: b.yaml\n", "c.yaml")
    b = path.with_name("b.yaml")
    assert complaint(path) == (f"files start from each other: {path} -> {b} -> {path}; remove one of the defaults")


def test_the_run_is_named_after_the_recipe_and_the_time(write: Write) -> None:
    trainer = load_recipe(write(name="tiny.yaml")).trainer
    assert re.fullmatch(r"tiny-\d{8}-\d{6}-[0-9a-f]{4}", trainer.run_name or "")
    assert trainer.default_local_dir == "checkpoints/tiny"


def test_a_given_run_name_stays(write: Write) -> None:
    assert load_recipe(write(), ["trainer.run_name=mine"]).trainer.run_name == "mine"


def test_train_files_are_found_beside_the_recipes_folder(write: Write, tmp_path: Path) -> None:
    write("", "elsewhere/recipes/d.parquet")
    write(BASE.replace("d.parquet", "recipes/d.parquet"), "elsewhere/recipes/base.yaml")
    child = write("defaults: ../elsewhere/recipes/base.yaml\n", "recipes/child.yaml")
    assert load_recipe(child).data.train_files == [str(tmp_path / "elsewhere/recipes/d.parquet")]


def test_train_files_beside_the_child_come_before_those_beside_its_parent(write: Write, tmp_path: Path) -> None:
    write("", "far/d.parquet")
    write("", "near/d.parquet")
    write(name="far/recipes/base.yaml")
    child = write("defaults: ../../far/recipes/base.yaml\n", "near/recipes/child.yaml")
    assert load_recipe(child).data.train_files == [str(tmp_path / "near/d.parquet")]


def test_train_files_of_the_current_directory_come_first(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("", "d.parquet")
    write("", "here/d.parquet")
    monkeypatch.chdir(tmp_path / "here")
    assert load_recipe(write()).data.train_files == ["d.parquet"]


def test_the_resolved_yaml_reads_back_equal(write: Write) -> None:
    config = load_recipe(write(), ["model.create.seed=5", "trainer.resume_mode=auto", "actor.ppo_mini_batch_size=4"])
    text = to_yaml(config)
    assert "${" not in text
    assert load_recipe(write(text, "again.yaml")) == config


def test_a_config_built_in_code_becomes_yaml() -> None:
    config = RunConfig()
    config.trainer.run_name = "mine"
    assert "run_name: mine\n" in to_yaml(config)


def test_a_single_train_file_need_not_be_a_list(write: Write) -> None:
    assert load_recipe(write(), ["data.train_files=a.parquet"]).data.train_files == ["a.parquet"]


def test_an_unknown_key_of_the_file_is_named_with_the_nearest(write: Write) -> None:
    path = write(BASE + "trainer: {totl_training_steps: 3}\n")
    assert complaint(path) == (
        f"{path}: unknown key trainer.totl_training_steps; the nearest known key is trainer.total_training_steps"
    )


def test_an_unknown_key_of_the_command_line_is_named_with_the_nearest(write: Write) -> None:
    assert complaint(write(), "trainr.seed=1") == (
        "command line: unknown key trainr.seed; the nearest known key is trainer.seed"
    )


def test_an_unknown_key_of_a_parent_is_told_of_the_parent(write: Write) -> None:
    parent = write("nope: 1\n", "parent.yaml")
    assert complaint(write("defaults: parent.yaml\n", "child.yaml")).startswith(f"{parent}: unknown key nope")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("model.seed", "model.create.seed"),
        ("rollout.save_freq", "trainer.save_freq"),
        ("megatron.tensor_parallel_size", "megatron.tensor_model_parallel_size"),
        ("seed", "trainer.seed"),
        ("trainr", "trainer"),
        ("timeouts.save", "rl_safe.timeouts.save"),
    ],
)
def test_the_nearest_key_prefers_the_same_name_in_another_section(key: str, nearest: str) -> None:
    assert nearest_key(RunConfig, key) == nearest


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.seed=abc", "trainer.seed cannot be 'abc'; it should be a valid integer"),
        ("trainer.seed=1.5", "trainer.seed cannot be 1.5; it should be a valid integer"),
        ("trainer.seed=true", "trainer.seed cannot be True; it should not be true or false"),
        ("trainer.seed=null", "trainer.seed cannot be null; it should be a valid integer"),
        ("trainer.seed=", "trainer.seed cannot be null; it should be a valid integer"),
        ("trainer.seed=[1]", "trainer.seed cannot be [1]; it should be a valid integer"),
        ("data.shuffle=perhaps", "data.shuffle cannot be 'perhaps'; it should be a valid boolean"),
        ("actor.optim.lr=fast", "actor.optim.lr cannot be 'fast'; it should be a valid number"),
        ("actor.ppo_mini_batch_size=x", "actor.ppo_mini_batch_size cannot be 'x'; it should be a valid integer"),
        ("model.path=[a]", "model.path cannot be ['a']; it should be a valid string"),
        ("trainer=3", "trainer cannot be 3; it should be a section of keys"),
        ("trainer=null", "trainer cannot be null; it should be a section of keys"),
        ("model.create=3", "model.create cannot be 3; it should be a section of keys"),
        ("trainer.logger=console", "trainer.logger cannot be 'console'; it should be a valid list"),
        ("trainer.logger=[[1]]", "trainer.logger[0] cannot be [1]; it should be 'console' or 'tensorboard'"),
        ("trainer.logger=[null]", "trainer.logger[0] cannot be null; it should be 'console' or 'tensorboard'"),
        ("data.train_files=null", "data.train_files cannot be null; it should be a valid list"),
        ("trainer.resume_mode=yes", "trainer.resume_mode cannot be True; it should not be true or false"),
        ("trainer.seed.x=1", "trainer.seed cannot be {'x': 1}; it should be a valid integer"),
        ("trainer.seed", "'trainer.seed' is not an override; write key=value, e.g. trainer.seed=1"),
        ("=1", "'=1' is not an override; write key=value, e.g. trainer.seed=1"),
        ("a..b=1", "'a..b=1' is not an override; write key=value, e.g. trainer.seed=1"),
        ("data.train_files[0]=x", "'data.train_files[0]=x' is not an override; write key=value, e.g. trainer.seed=1"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_does(write: Write, override: str, message: str) -> None:
    assert complaint(write(), override).startswith(f"command line: {message}")


@pytest.mark.parametrize("override", ["trainer.logger=[console", 'model.path="x', "model.path=@x"])
def test_a_value_that_is_not_yaml_is_refused(write: Write, override: str) -> None:
    assert complaint(write(), override).startswith(f"command line: {override!r} cannot be read: ")


def test_a_wrong_value_of_the_file_names_the_file(write: Write) -> None:
    path = write(BASE + "trainer: {seed: abc}\n")
    assert complaint(path) == (
        f"{path}: trainer.seed cannot be 'abc'; it should be a valid integer, unable to parse string as an integer"
    )


def test_missing_mandatory_values_are_all_named(write: Write) -> None:
    assert complaint(write("{}")) == (
        "data.train_files, model.path has no value; set it in the recipe or as data.train_files=VALUE"
    )


@pytest.mark.parametrize("override", ["model.path=${nope}", "model.path=${model.path}"])
def test_an_interpolation_that_leads_nowhere_is_refused(write: Write, override: str) -> None:
    assert "cannot be resolved" in complaint(write(), override)


@pytest.mark.parametrize(
    "override",
    [
        "model.create=${oc.env:PWD}",
        "actor.optim=${oc.env:PWD}",
        "data=${oc.env:PWD}",
        "data.train_files=${oc.env:PWD}",
        "model.create=${trainer}",
        "data.train_files=${model.path}",
        "trainer.logger=${oc.decode:'[1, [2]]'}",
        "model=${model}",
        "trainer.run_name=${trainer}",
        "model.create=${oc.create:{a: 1}}",
    ],
)
def test_an_interpolation_to_something_of_another_form_is_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.setenv("PWD", "/x")
    complaint(write(), override)


def test_an_interpolation_may_lead_to_a_list(write: Write) -> None:
    config = load_recipe(write(), ["data.train_files=${oc.decode:'[a.parquet]'}", "trainer.run_name=${model.path}"])
    assert (config.data.train_files, config.trainer.run_name) == (["a.parquet"], "m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "did not find expected node content at line 2, column 1"),
        ("trainer: {seed: 1}\ntrainer: {}", "found duplicate key trainer at line 2, column 1"),
        ("- 1", "not a mapping of keys at line 1"),
        ("3", "not a mapping of keys at line 1"),
        ("model: {path: '${x'}", "model.path cannot be '${x': an interpolation is"),
        ("1: 2", "unknown key 1; a key is a name"),
        ("trainer.seed: 1", "unknown key 'trainer.seed'; a key is a name, and sections nest"),
        ("defaults: 3", "defaults cannot be 3"),
        ("defaults: [[a]]", "defaults cannot be [['a']]"),
        ("defaults: gone.yaml", "No such file or directory"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(write: Write, text: str, message: str) -> None:
    assert message in complaint(write(text))


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gone.yaml"
    assert complaint(path) == f"{path} cannot be read: No such file or directory; check the path"


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.yaml"
    path.write_bytes(b"\x80\x02")
    assert "not UTF-8 text at byte 0" in complaint(path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.temperature=0"], "rollout.temperature cannot be 0; it should be greater than 0"),
        (["data.train_batch_size=-1"], "data.train_batch_size cannot be -1; it should be greater than or equal to 1"),
        (["rl_safe.timeouts.save=.inf"], "rl_safe.timeouts.save cannot be inf; it should be a finite number"),
        (["rl_safe.timeouts.save=1e300"], "rl_safe.timeouts.save cannot be 1e+300; it should be less than or equal to"),
        (["cluster.num_rollouts=0"], "cluster.num_rollouts=0: training needs a rollout rank"),
        (["data=true"], "data cannot be True; it should be a section of keys"),
        (["rollout.n=1e30"], "rollout.n cannot be 1e+30; "),
        (["rollout.n=1000000000"], "rollout.n cannot be 1000000000; it should be less than or equal to 65536"),
        (["actor.optim.lr=.nan"], "actor.optim.lr cannot be nan; it should be a finite number"),
        (["actor.optim.beta2=1"], "actor.optim.beta2 cannot be 1; it should be less than 1"),
        (["rollout.max_logprob_gap=-1"], "rollout.max_logprob_gap cannot be -1; it should be greater than"),
        (["rollout.n=1"], "rollout.n=1: training compares the samples of a prompt"),
        (["rollout.n=1", "algorithm.adv_estimator=rloo"], "rollout.n=1: training compares"),
        (["trainer.resume_mode=resume_path"], "trainer: resume_mode=resume_path needs resume_from_path=DIR"),
        (["trainer.resume_from_path=x"], "trainer: resume_from_path=x is not read with resume_mode=disable"),
        (["trainer.logger=[wandb]"], "trainer.logger[0] cannot be 'wandb'; it should be 'console' or 'tensorboard'"),
        (["model.dtype=float16"], "model.dtype cannot be 'float16'; it should be 'float32' or 'bfloat16'"),
        (["megatron.moe_token_dispatcher_type=flex"], "it should be 'alltoall' or 'allgather'"),
        (["rollout.name=sglang"], "rollout.name cannot be 'sglang'; it should be 'vllm'"),
        (["trainer.save_freq=0"], "trainer.save_freq cannot be 0; it should be -1 (never) or at least 1"),
        (["actor.ppo_mini_batch_size=3"], "actor.ppo_mini_batch_size=3 does not divide data.train_batch_size=8"),
        (["rl_safe.bootstrap.on_missing=ignore"], "it should be 'raise' or 'bootstrap'"),
        (["rollout.tensor_model_parallel_size=2"], "must be a multiple of rollout.tensor_model_parallel_size=2"),
        (["rollout.block_size=16"], "must be a multiple of 32"),
        (["megatron.context_parallel_size=2"], "must be 1: the built-in trainer does not split sequences"),
        (["megatron.fp8=hybrid"], "megatron.fp8=hybrid needs cluster.device=cuda"),
        (["megatron.transformer_impl=transformer_engine"], "needs cluster.device=cuda: Transformer Engine's layers"),
        (["megatron.transformer_impl=local", "megatron.fp8=e4m3"], "fp8=e4m3 needs Transformer Engine's layers"),
        (["megatron.transformer_impl=local", "megatron.moe_grouped_gemm=true"], "moe_grouped_gemm=true needs"),
        (["cluster.device=tpu"], "cluster.device cannot be 'tpu'; it should be 'cpu' or 'cuda'"),
        (["model.dtype=bfloat16"], "model.dtype=bfloat16 must be float32 with cluster.device=cpu"),
        (["cluster.colocated=true"], "cluster.colocated=true needs cluster.device=cuda"),
        (
            ["cluster.colocated=true", "cluster.device=cuda", "cluster.num_trainers=2", "cluster.num_rollouts=3"],
            "cluster.num_trainers=2 and cluster.num_rollouts=3: each trainer shares its GPU with one rollout rank",
        ),
        (
            ["cluster.num_rollouts=3", "rollout.tensor_model_parallel_size=2"],
            "cluster.num_rollouts=3 must be a multiple",
        ),
        (
            [
                "rollout.replace_lost_engines=1",
                "cluster.colocated=true",
                "cluster.device=cuda",
                "cluster.num_rollouts=4",
            ],
            "rollout.replace_lost_engines=1 with cluster.colocated=true: only an engine with",
        ),
        (["cluster.device=cuda", "megatron.context_parallel_size=2"], "must be 1: the built-in trainer"),
        (["data.train_files=[]"], "data.train_files has no value; set it in the recipe"),
        (["model.create.num_key_value_heads=3"], "model.create: num_key_value_heads=3 does not divide"),
        (["model.create.num_key_value_heads=0"], "model.create.num_key_value_heads cannot be 0; it should be"),
        (["model.create.head_dim=31"], "model.create.head_dim cannot be 31; it should be a multiple of 2"),
        (["model.create.num_experts=1"], "model.create: num_experts_per_tok=2 must be at most num_experts=1"),
    ],
)
def test_contradictions_are_refused(write: Write, overrides: list[str], message: str) -> None:
    assert message in complaint(write(), *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.dtype=bfloat16"],
        ["model.dtype=float32"],
        ["rollout.block_size=16"],
        ["cluster.num_trainers=2", "cluster.num_rollouts=3"],
        ["cluster.colocated=true", "cluster.num_trainers=2", "cluster.num_rollouts=2"],
    ],
)
def test_gpus_take_what_a_cpu_does_not(write: Write, overrides: list[str]) -> None:
    assert load_recipe(write(), ["cluster.device=cuda", *overrides]).cluster.device == "cuda"


def test_every_shipped_recipe_loads_and_has_its_own_seeded_model() -> None:
    paths = [load_recipe(recipe).model.path for recipe in sorted(RECIPES.glob("*.yaml"))]
    assert len(paths) >= 4
    assert len(set(paths)) == len(paths)


def test_naming_a_model_turns_the_making_of_one_off(write: Write) -> None:
    recipe = write("model: {path: made, create: {}}\ndata: {train_files: [a.parquet]}\n")
    assert load_recipe(recipe).model.create is not None
    assert load_recipe(recipe, ["model.path=mine"]).model.create is None
    assert load_recipe(recipe, ["model.path=mine", "model.create={}"]).model.create is not None


@pytest.fixture
def copied_by_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in a folder that Ray has unpacked a job's working directory in."""
    folder = tmp_path / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([], "trainer.output_dir=outputs"),
        (["trainer.output_dir=/x"], "trainer.default_local_dir=checkpoints/quickstart"),
    ],
)
def test_what_a_job_writes_must_not_go_with_its_copy_of_the_folder(
    copied_by_ray: Path, overrides: list[str], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{key} is relative, and the working directory is Ray's copy"):
        load_recipe(QUICKSTART, overrides)


def test_absolute_paths_and_no_saves_are_as_good_there(copied_by_ray: Path) -> None:
    load_recipe(QUICKSTART, ["trainer.output_dir=/x", "trainer.save_freq=-1"])
    load_recipe(QUICKSTART, ["trainer.output_dir=/x", "trainer.default_local_dir=/y"])


def test_relative_paths_start_where_the_job_says(
    copied_by_ray: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_SAFE_BASE_DIR", "/shared")
    config = load_recipe(QUICKSTART, [])
    assert (config.trainer.output_dir, config.trainer.default_local_dir) == (
        "/shared/outputs",
        "/shared/checkpoints/quickstart",
    )
    assert config.model.path == "/shared/models/quickstart-qwen3-moe"
    there = copied_by_ray / "models" / "mine"
    there.mkdir(parents=True)
    assert load_recipe(QUICKSTART, ["model.path=models/mine"]).model.path == "models/mine"


@pytest.mark.parametrize(
    ("asked", "variable", "expected"),
    [
        (None, None, "local"),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        (None, "http://10.0.0.1:8265", "local"),
        ("auto", "10.0.0.1:6379", "auto"),
        ("local", "10.0.0.1:6379", "local"),
    ],
)
def test_a_submitted_job_joins_its_cluster(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, variable: str | None, expected: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert ray_address(ClusterConfig(ray_address=asked)) == expected


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../../x", "/etc", "a/b", "a\0b", "a\nb", "\x1b[2J", "x" * 201, "é" * 101, "\udc80"]
)
def test_a_run_name_is_the_name_of_one_folder(write: Write, name: str) -> None:
    recipe = write(BASE + f"trainer: {{run_name: {json.dumps(name)}}}\n")
    message = complaint(recipe)
    assert "trainer.run_name cannot be" in message or "invalid Unicode" in message
    assert message.isprintable()


@pytest.mark.parametrize("name", ["grpo-7b", "a b", "..a", "läuft", "x" * 200])
def test_plain_names_of_runs_are_taken(write: Write, name: str) -> None:
    assert load_recipe(write(BASE + f"trainer: {{run_name: {json.dumps(name)}}}\n")).trainer.run_name == name


def test_a_recipe_whose_name_is_no_run_name_is_told_of(write: Write) -> None:
    assert "trainer.run_name cannot be" in complaint(write(name="\x1b[2J.yaml"))


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, "a/" * 2_000, "a\x1bb"])
@pytest.mark.parametrize(
    "key",
    ["model.path", "trainer.output_dir", "trainer.default_local_dir", "data.train_files", "trainer.resume_from_path"],
)
def test_a_path_that_no_file_can_have_is_refused(write: Write, key: str, path: str) -> None:
    assert f"{key}" in complaint(write(), f"{key}={json.dumps(path)}", "trainer.resume_mode=resume_path")


def test_a_path_that_is_no_utf8_is_refused(write: Write) -> None:
    assert "not YAML" in complaint(write(), "model.path=\udcff")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.total_training_steps=2147483648", "cannot be 2147483648; it should be less than or equal to"),
        ("rl_safe.timeouts.save=1e300", "rl_safe.timeouts.save cannot be 1e+300; it should be less than"),
        (f"actor.optim.lr={10**400}", "a number of more than 300 characters"),
        (f"trainer.seed={'9' * 5000}", "cannot be read"),
        ("data.train_batch_size=1048576", "sequences a step"),
        ("model.create.num_hidden_layers=1048576", "are too large a model"),
        ("model.create.vocab.size=1", "unknown key model.create.vocab.size"),
        (".".join(["a"] * 10_000) + "=1", "unknown key a.a.a."),
        ("x" * 100_000 + "=1", "unknown key xxx"),
        ("trainer.seed=" + "x" * 100_000, "trainer.seed cannot be 'xxx"),
    ],
)
def test_a_value_out_of_all_measure_is_refused_soon(write: Write, override: str, message: str) -> None:
    assert message in (found := complaint(write(), override))
    assert len(found) < 1_000


def test_a_bootstrap_has_twice_the_time_in_which_ranks_look_for_failures() -> None:
    assert 2 * supervision._SLICE.total_seconds() == MIN_BOOTSTRAP_TIMEOUT_S
