"""``rl-safe plan``: what it prints, where its facts come from, what bad input costs, and how long it takes."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.cli.main import main
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.plan.fields import BY_NAME, FIELDS, HOST_DEFAULTS, HOSTS
from rl_safe_workers.plan.plan import make_plan
from rl_safe_workers.plan.request import Request, Source, make_request
from rl_safe_workers.plan.sources import nemo_rl_source, recipe_source, verl_source

ROOT = Path(__file__).parents[2]
HEAVY = ("mbridge", "megatron", "numpy", "omegaconf", "pyarrow", "ray", "torch", "transformers", "vllm")
"""Packages that take longer to import than a plan takes."""
ISSUE = [
    "--world=512",
    "--trainers=256",
    "--tp=4",
    "--pp=2",
    "--ep=8",
    "--etp=1",
    "--cp=1",
    "--optimizer-instances=2",
    "--vllm-tp=4",
    "--gpus-per-node=8",
]
SEED, CONFIGURATIONS = 9, 2000


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rl-safe: error: ")
    assert error.count("\n") == 1
    return error.removeprefix("rl-safe: error: ")


def test_the_example_of_512_gpus_has_its_nodes_groups_and_memory(capsys) -> None:
    plan = planned(capsys, *ISSUE)
    groups = {entry["group"]: entry for entry in plan["communicators"]}
    assert len(plan["nodes"]) == 64
    assert (plan["nodes"][31], plan["nodes"][32]) == (
        {"node": 31, "trainer": [248, 255]},
        {"node": 32, "rollout": [256, 263]},
    )
    assert groups["HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1"]["size"] == 2
    assert groups["EXPERT_DATA_PARALLEL_GROUP"]["members"][0] == list(range(0, 128, 8))
    assert groups["VLLM_ENGINE_GROUP"]["members"][0] == [256, 257, 258, 259]
    assert groups["JOINT_GROUP"]["first_phase"] == "sync"
    assert groups["EXPERT_DATA_PARALLEL_GROUP"]["crosses_nodes"] == 16
    memory = plan["memory_bytes"]
    assert memory["rl_safe_workers"]["likely"] < memory["at first use"]["low"] < memory["every group warmed"]["low"]
    assert {"expert-dp-late", "comms-late"} <= {hazard["code"] for hazard in plan["hazards"]}


def test_every_rank_is_in_the_members_that_json_lists(capsys) -> None:
    for entry in planned(capsys, "--trainers", "16", "--tp", "2", "--ep", "4")["communicators"]:
        ranks = sorted(rank for group in entry["members"] for rank in group)
        assert ranks == list(range(16)), entry["group"]


def test_text_has_every_table_and_hazard(capsys, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"num_experts": 4, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 8}'
    )
    assert main(["plan", "--world", "12", "--trainers", "8", "--ep", "2", "--model", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for part in ("Ranks", "Communicators", "Communicator memory", "A save of", "expert-dp-late", "Avoid: "):
        assert part in text
    assert "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP" in text
    assert "rollout 8-11" in text


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (["--trainers=8"], 0),
        (["--trainers=8", "--check"], 0),
        (["--world=8", "--trainers=6", "--default-group=joint"], 0),
        (["--world=8", "--trainers=6", "--default-group=joint", "--check"], 1),
    ],
)
def test_check_fails_for_a_plan_that_stops(capsys, facts: list[str], code: int) -> None:
    assert main(["plan", *facts]) == code


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--trainers=abc"], "--trainers=abc cannot be used: it takes a whole number from 1 to 1048576"),
        (["--trainers=0"], "--trainers=0 cannot be used"),
        (["--trainers=9999999999999999999"], "--trainers=9999999999999999999 cannot be used"),
        (["--trainers=30", "--tp=4"], "set --trainers to 28 or 32"),
        (["--trainers=8", "--ep=3"], "--ep to 1"),
        (["--trainers=8", "--optimizer-instances=3"], "--optimizer-instances=3 must divide 8"),
        (["--trainers=8", "--world=4"], "--trainers=8 is more than --world=4: it takes 1 to 4"),
        (["--world=8", "--trainers=4", "--rollouts=3"], "--rollouts=3 with --trainers=4 is not --world=8: set it to 4"),
        (["--world=4", "--rollouts=4"], "--rollouts=4 leaves no trainer of --world=4"),
        (["--world=8", "--trainers=4", "--vllm-tp=3"], "--vllm-tp=3 does not divide 4 rollout ranks"),
        (["--trainers=8", "--colocated", "--vllm-tp=3", "--ep=8"], "--vllm-tp=3 does not divide 8 rollout ranks"),
        (
            ["--trainers=8", "--colocated", "--vllm-tp=2", "--vllm-pp=3"],
            "--vllm-tp=2 x --vllm-pp=3, an engine of 6 ranks, does not divide 8 rollout ranks: set them to a product",
        ),
        (["--world=12", "--trainers=4", "--vllm-dp=16"], "--vllm-dp=16 does not divide 8 rollout ranks"),
        (
            ["--trainers=4", "--pp=4", "--first-stage-layers=2", "--loss-as-layer"],
            "--first-stage-layers=2 does not go with --loss-as-layer=True: leave one of them out",
        ),
        (
            ["--trainers=4", "--pp=4", "--embedding-as-layer", "--pipeline-layout=Et|t|t|tL"],
            "--embedding-as-layer=True does not go with --pipeline-layout=Et|t|t|tL",
        ),
        (["--trainers=4", "--rollouts=2", "--colocated"], "--rollouts=2 with --colocated=true shares the GPUs"),
        (["--trainers=4", "--vpp=2"], "--vpp=2 needs two or more pipeline stages"),
        (["--trainers=4", "--megatron=0.15"], "--megatron=0.15 cannot be used: it takes one of 0.16, 0.17"),
        (["--trainers=4", "--torch=nan"], "--torch=nan cannot be used: it takes a number from 2 to 3"),
        (["--trainers=4", "--model=nowhere"], "--model=nowhere cannot be read (nowhere does not exist"),
        (["--trainers=4", "--svg=nowhere/x.svg"], "--svg=nowhere/x.svg cannot be written"),
        (["--trainers=20000", "--html=x.html"], "--svg and --html take at most 16384"),
        ([], "--trainers is missing"),
        (["nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["a.yaml", "--from", "verl"], "give a recipe or --from, not both"),
        (["--from"], "--from is empty: it takes one of verl, nemo-rl"),
        (["--from", "slime"], "--from=slime is not known: it takes one of verl, nemo-rl"),
        (["--from", "verl", "a"], "'a' is not understood: it takes key=value or a YAML file"),
        (["--from", "verl", "[a=1"], "'[a=1' is not understood: it takes key=value or a YAML file"),
        (["--from", "verl", "trainer.nnodes=[1]"], "trainer.nnodes=[1] cannot be used"),
        (["--from", "verl", "a={"], "cannot be read"),
        (["--from", "nemo-rl"], "--from nemo-rl takes a YAML file"),
        (["--from", "nemo-rl", "nowhere.yaml"], "nowhere.yaml cannot be read"),
    ],
)
def test_bad_input_is_one_line_with_key_value_and_what_is_valid(capsys, arguments, complaint: str) -> None:
    assert complaint in refusal(capsys, *arguments)


def test_a_recipe_is_read_as_a_run_reads_it_and_options_win(capsys) -> None:
    recipe = str(ROOT / "recipes" / "quickstart_tp2.yaml")
    plan = planned(capsys, recipe, "cluster.num_trainers=8", "--gpus-per-node=4")
    assert (plan["layout"]["world_size"], plan["layout"]["tensor"], len(plan["nodes"])) == (8, 2, 3)
    assert plan["facts"]["host"] == "rl-safe"
    assert plan["hazards"] == []


def test_a_wrong_layout_of_a_recipe_is_told_in_its_keys(capsys) -> None:
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    assert "set cluster.num_trainers to 3 or 6, or megatron.expert_model_parallel_size to 1, 2 or 4" in refusal(
        capsys, recipe, "megatron.expert_model_parallel_size=3"
    )


def request_of(source: Source) -> Request:
    return make_request(source)


def test_verls_keys_are_understood_from_a_command_line() -> None:
    megatron, rollout = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
    found = request_of(
        verl_source(
            [
                "python3",
                "-m",
                "verl.trainer.main_ppo",
                "--config-name=x",
                "trainer.nnodes=4",
                "trainer.n_gpus_per_node=8",
                f"{megatron}.tensor_model_parallel_size=4",
                f"{megatron}.pipeline_model_parallel_size=2",
                f"{megatron}.expert_model_parallel_size=4",
                f"{megatron}.expert_tensor_parallel_size=null",
                f"+{megatron}.override_transformer_config.moe_token_dispatcher_type=alltoall",
                f"{rollout}.tensor_model_parallel_size=8",
                "actor_rollout_ref.actor.checkpoint.async_save=True",
                "actor_rollout_ref.nccl_timeout=1200",
                "data.train_files=[a,b]",
            ]
        )
    )
    assert (found.trainers, found.rollouts, found.colocated, found.vllm_tp) == (32, 32, True, 8)
    assert (found.layout.tensor, found.layout.pipeline, found.layout.expert) == (4, 2, 4)
    assert found.layout.expert_tensor == 4  # Megatron's default
    assert (found.async_save, found.unread_timeout_s) == (True, 1200)


RL_SAFE = "actor_rollout_ref.rl_safe"


@pytest.mark.parametrize(
    ("given", "is_ours"),
    [
        ([], False),
        (["+rl_safe=enabled"], True),
        (["+rl_safe=default"], False),
        ([f"+{RL_SAFE}.enabled=true"], True),
        (["+rl_safe=enabled", f"{RL_SAFE}.enabled=false"], False),
    ],
    ids=["stock", "enabled", "default", "key", "turned off"],
)
def test_a_plan_of_verl_knows_what_our_engines_change(given: list[str], is_ours: bool) -> None:
    entry = ["python", "-m", "rl_safe_workers.adapters.verl.main_ppo", "trainer.nnodes=1"]
    found = request_of(verl_source([*entry, "actor_rollout_ref.nccl_timeout=900", *given]))
    assert (found.bootstrap, found.budget, found.finalizes) == (is_ours,) * 3
    assert (found.fully_parallel_save, found.validate_access_integrity) == (not is_ours,) * 2
    assert found.teardown == ("ordered" if is_ours else "killed")
    assert (found.timeout_s, found.unread_timeout_s) == ((None, None) if is_ours else (1800, 900))


def test_a_plan_of_verl_reads_the_limits_of_our_engines() -> None:
    given = ["trainer.nnodes=1", "+rl_safe=enabled", f"{RL_SAFE}.bootstrap.budget=false"]
    source = verl_source([*given, f"{RL_SAFE}.bootstrap.max_ctas.pp=32"])
    assert not request_of(source).budget
    assert source.max_ctas == {"pp": 32}
    for wrong, told in (
        ("bootstrap.max_ctas.pq=32", r"bootstrap.max_ctas.pq; the nearest"),
        ("bootstrap.max_ctas=3", r"bootstrap.max_ctas cannot be 3"),
        ("bootstrap=[1]", r"bootstrap=\[1\] cannot be used: it takes keys"),
        ("enabled=yess", rf"{RL_SAFE}.enabled=yess cannot be used: it takes true or false"),
    ):
        with pytest.raises(ConfigError, match=told):
            verl_source([*given, f"{RL_SAFE}.{wrong}"])
    limited = verl_source([*given, f"{RL_SAFE}.bootstrap.max_ctas.inter_ep_dp=8"])
    with pytest.raises(ConfigError, match=f"^{RL_SAFE}.bootstrap.max_ctas.inter_ep_dp: Megatron creates none"):
        make_plan(request_of(limited))


def test_verls_sharding_follows_its_flag() -> None:
    flag = "actor_rollout_ref.actor.megatron.dist_ckpt_optim_fully_reshardable"
    for given, sharding in (
        ([], "dp_reshardable"),
        ([f"{flag}=False"], "dp_reshardable"),
        ([f"{flag}=true"], "fully_reshardable"),
    ):
        found = request_of(verl_source(["trainer.nnodes=1", *given]))
        assert (found.optimizer_sharding, found.setting("optimizer_sharding")) == (sharding, flag)
    with pytest.raises(ConfigError, match=r"dist_ckpt_optim_fully_reshardable=3 .* it takes true or false"):
        verl_source([f"{flag}=3"])


def test_verls_engines_and_splits_are_understood() -> None:
    rollout = "actor_rollout_ref.rollout"
    transformer = "+actor_rollout_ref.actor.megatron.override_transformer_config"
    engines = [
        f"{rollout}.tensor_model_parallel_size=2",
        f"{rollout}.data_parallel_size=2",
        f"{rollout}.pipeline_model_parallel_size=2",
    ]
    found = request_of(
        verl_source(
            [
                "trainer.nnodes=1",
                *engines,
                f"{transformer}.account_for_embedding_in_pipeline_split=True",
                f"{transformer}.account_for_loss_in_pipeline_split=True",
            ]
        )
    )
    assert (found.engine_ranks, found.embedding_as_layer, found.loss_as_layer) == (8, True, True)
    with pytest.raises(ConfigError, match=f"{rollout}.data_parallel_size=2, an engine of 8 ranks, does not divide 4"):
        request_of(verl_source(["trainer.nnodes=1", "trainer.n_gpus_per_node=4", *engines]))
    for layout in ("Et*3|(tt|)*2t*3L", "[[embedding,decoder],[decoder,loss]]"):
        found = request_of(verl_source(["trainer.nnodes=1", f"{transformer}.pipeline_model_parallel_layout={layout}"]))
        assert found.pipeline_layout is not None


def test_nemo_rls_engines_are_pipelines_and_data_parallel_inside(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "policy:\n"
        "  megatron_cfg: {account_for_loss_in_pipeline_split: true}\n"
        "  generation:\n"
        "    vllm_cfg: {tensor_parallel_size: 2, pipeline_parallel_size: 2, expert_parallel_size: 8}\n"
        "    colocated: {enabled: true}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 2}\n"
    )
    found = request_of(nemo_rl_source([str(recipe)]))
    assert (found.vllm_tp, found.vllm_pp, found.vllm_dp, found.engine_ranks) == (2, 2, 4, 16)
    assert found.loss_as_layer
    with pytest.raises(ConfigError, match=r"expert_parallel_size=3 .* it takes 1 or a multiple of 2"):
        nemo_rl_source([str(recipe), "policy.generation.vllm_cfg.expert_parallel_size=3"])


def test_verls_rollouts_may_have_nodes_of_their_own() -> None:
    given = ["trainer.nnodes=2", "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=4"]
    found = request_of(verl_source(given))
    assert (found.trainers, found.rollouts, found.colocated) == (16, 4, False)


def test_verls_yaml_is_read_and_arguments_after_it_win(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("trainer: {nnodes: 2, n_gpus_per_node: 4}\nother: ${oc.env:NOWHERE}\n")
    assert request_of(verl_source([str(file), "trainer.nnodes=3"])).trainers == 12


def test_nemo_rls_yaml_is_read_with_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "policy:\n"
        "  model_name: some/model\n"
        "  megatron_cfg:\n"
        "    {tensor_model_parallel_size: 2, expert_tensor_parallel_size: 1, checkpoint: {async_save: true}}\n"
        "  generation: {colocated: {enabled: true}, vllm_cfg: {tensor_parallel_size: 4}}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "defaults: base.yaml\n"
        "policy:\n"
        "  megatron_cfg: {expert_model_parallel_size: 8, pipeline_model_parallel_size: 2}\n"
        "  generation: {colocated: {enabled: false, resources: {num_nodes: 2, gpus_per_node: 8}}}\n"
        "cluster: {num_nodes: 4}\n"
    )
    found = request_of(nemo_rl_source([str(recipe)]))
    assert (found.trainers, found.rollouts, found.vllm_tp, found.nodes) == (16, 16, 4, 4)
    assert (found.layout.tensor, found.layout.pipeline, found.layout.expert, found.async_save) == (2, 2, 8, True)
    assert request_of(nemo_rl_source([str(recipe), "cluster.num_nodes=6"])).trainers == 32
    with pytest.raises(ConfigError, match=r"num_nodes=2 leaves no trainer of cluster.num_nodes=2 .* from 1 to 1"):
        nemo_rl_source([str(recipe), "cluster.num_nodes=2"])


def test_defaults_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("defaults: [a.yaml]\n")
    with pytest.raises(ConfigError, match="files start from each other"):
        nemo_rl_source([str(recipe)])


def test_every_fact_of_a_recipe_has_a_key_that_exists() -> None:
    source = recipe_source(str(ROOT / "recipes" / "quickstart_gpu.yaml"), [])
    assert {field.name for field in FIELDS if field.recipe} <= source.values.keys()
    assert request_of(source).backend == "nccl"


def test_each_host_has_habits_for_the_same_facts() -> None:
    assert HOST_DEFAULTS.keys() == set(HOSTS)
    assert len({frozenset(habits) for habits in HOST_DEFAULTS.values()}) == 1
    for habits in HOST_DEFAULTS.values():
        for name, value in habits.items():
            assert value is None or BY_NAME[name].parse(value, key=name) == value


def heavy_modules(*arguments: str) -> list[str]:
    """Returns those of `HEAVY` that a plan in a process of its own imports."""
    code = (
        "import sys; from rl_safe_workers.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"print(*sorted(set({HEAVY!r}) & sys.modules.keys()), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stderr.split()


@pytest.mark.parametrize("arguments", [["--help"], ["--trainers=64", "--tp=4", "--ep=8", "--etp=1"]])
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    assert heavy_modules(*arguments) == []


def test_a_world_of_131072_ranks_is_planned_in_two_gib() -> None:
    assert heavy_modules("--trainers=131072", "--tp=4", "--pp=2", "--ep=8", "--etp=1", "--json") == []
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= 2 * 2**20


NONSENSE = ("", "-1", "0", "x", "nan", "1e9", "99999999999", "1.5", "None", "{}", "true", "\u0664", "8 8", "=", "'")


def configuration(chance: random.Random, model: str) -> list[str]:
    """A random configuration; a third have a value that makes no sense."""
    sizes = [1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 4, 8, 3]
    facts = {
        "trainers": chance.choice([8, 16, 24, 32, 64, 128, 256, 512, 1024, 7, 30]),
        "rollouts": chance.choice([0, 1, 2, 4, 8, 32, 5]),
        **{name: chance.choice(sizes) for name in ("tp", "pp", "ep", "etp", "cp", "optimizer_instances", "vllm_tp")},
        **{name: chance.choice(sizes) for name in ("vllm_pp", "vllm_dp") if chance.random() < 0.3},
        **{
            name: chance.choice([1, 2, 3])
            for name in ("first_stage_layers", "last_stage_layers")
            if chance.random() < 0.1
        },
        **({"vpp": chance.choice([2, 3])} if chance.random() < 0.1 else {}),
        **({"pipeline_layout": chance.choice(["Et*3|t*3L", "[[embedding],[loss]]"])} if chance.random() < 0.1 else {}),
        "gpus_per_node": chance.choice([1, 4, 8, 16, 5]),
        **{field.name: chance.choice(field.choices) for field in FIELDS if field.choices and chance.random() < 0.3},
    }
    arguments = {BY_NAME[name].option: str(value) for name, value in facts.items() if chance.random() < 0.8}
    if chance.random() < 0.3:
        arguments["--model"] = model
    if chance.random() < 1 / 3:
        for field in chance.sample([field for field in FIELDS if field.kind is not bool], chance.randint(1, 3)):
            arguments[field.option] = chance.choice(NONSENSE)
    flags = [field.option for field in FIELDS if field.kind is bool and chance.random() < 0.1]
    return [*(f"{option}={value}" for option, value in arguments.items()), *flags]


def test_no_configuration_however_wrong_makes_a_traceback_or_takes_a_second(capsys, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"num_experts": 8, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 64}'
    )
    chance = random.Random(SEED)
    codes = {0: 0, 2: 0}
    for _ in range(CONFIGURATIONS):
        arguments = configuration(chance, str(tmp_path))
        began = time.process_time()
        code = main(["plan", "--json", *arguments])
        took = time.process_time() - began
        error = capsys.readouterr().err
        assert took <= 1, arguments
        codes[code] += 1
        assert code == 0 or "--" in error, (arguments, error)
        assert code == 0 or any(word in error for word in ("it takes", "set ", "say how", "leave")), (arguments, error)
    assert codes[0] >= CONFIGURATIONS / 10
    assert codes[2] >= CONFIGURATIONS / 3


def test_packed_weight_syncs_of_verl_use_the_default_group() -> None:
    given = ["trainer.nnodes=1", "trainer.n_gpus_per_node=4"]
    packed = request_of(verl_source([*given, "actor_rollout_ref.rl_safe.packed_sync=true"]))
    assert packed.features(moe=True, tied=False).weights_over_world
    assert not request_of(verl_source(given)).features(moe=True, tied=False).weights_over_world
