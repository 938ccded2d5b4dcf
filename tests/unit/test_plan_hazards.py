"""Each hazard is found where it is, and not where the setting avoids it; reported layouts find what their users met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.findings import Finding, Severity
from rl_safe_workers.plan.hazards import HAZARDS, find
from rl_safe_workers.plan.plan import make_plan
from rl_safe_workers.plan.request import Source, make_request
from rl_safe_workers.plan.sources import nemo_rl_source, verl_source

MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MOE))
    return str(folder)


def findings(values: dict[str, Any]) -> dict[str, Finding]:
    request = make_request(Source(name="test", values=values))
    return {finding.code: finding for finding in find(make_plan(request))}


Facts = dict[str, Any]
SWIFT: Facts = {"host": "ms-swift", "trainers": 32, "ep": 8, "etp": 1}
CASES: list[tuple[str, Facts, Facts]] = [
    ("world-mixed", {"world": 8, "trainers": 6, "default_group": "joint"}, {"default_group": "training"}),
    (
        "world-mixed-flags",
        {"world": 8, "trainers": 6, "default_group": "joint"},
        {"fully_parallel_save": False, "validate_access_integrity": False},
    ),
    ("world-device-id", {"world": 8, "trainers": 6, "device_id": True}, {"device_id": False}),
    ("timeout-not-inherited", {"trainers": 8, "timeout_s": 60}, {"group_timeout_s": 60}),
    ("timeout-expert-twin", {"trainers": 8, "ep": 2, "group_timeout_s": 60}, {"gloo": False}),
    ("timeout-unread", {"trainers": 8, "unread_timeout_s": 600}, {"unread_timeout_s": None}),
    ("timeout-short", {"host": "nemo-rl", "trainers": 16}, {"timeout_s": 1800}),
    ("timeout-none", {"host": "ms-swift", "trainers": 16}, {"timeout_s": 1800}),
    ("torch-eager-nccl", {"trainers": 8, "torch": 2.15}, {"torch": 2.14}),
    ("destroy-order", {"trainers": 8, "pp": 4}, {"teardown": "ordered"}),
    ("deepep-late", {"trainers": 8, "ep": 4, "dispatcher": "flex"}, {"dispatcher": "alltoall"}),
    ("exit-hang", {"trainers": 8, "ep": 2}, {"teardown": "ordered"}),
    ("expert-dp-late", SWIFT, {"bootstrap": True}),
    ("comms-late", SWIFT, {"bootstrap": True}),
    ("cumem-off", {"trainers": 8, "cumem": False, "release_comms": True}, {"cumem": True}),
    ("comms-kept", {"trainers": 8, "colocated": True}, {"release_comms": True}),
    ("comms-alone", {"trainers": 8}, {"bootstrap": True}),
    ("gather-on-nccl", {"trainers": 64}, {"backend": "cpu:gloo,cuda:nccl"}),
    ("tp-straddles", {"trainers": 16, "tp": 16, "etp": 1}, {"tp": 8}),
    ("ep-straddles", {"trainers": 16, "ep": 16}, {"ep": 8}),
    ("ep-straddles", {"trainers": 512, "pp": 8, "tp": 4, "ep": 16, "etp": 1, "dispatcher": "allgather"}, {"ep": 8}),
    ("engine-straddles", {"world": 16, "trainers": 4, "vllm_tp": 6}, {"vllm_tp": 4}),
    ("engine-straddles", {"trainers": 16, "colocated": True, "vllm_tp": 4, "vllm_pp": 4}, {"vllm_pp": 2}),
    ("engine-straddles", {"trainers": 16, "colocated": True, "vllm_tp": 4, "vllm_dp": 4}, {"vllm_dp": 1}),
    ("save-collective", {"trainers": 8, "ep": 2}, {"fully_parallel_save": False, "validate_access_integrity": False}),
    (
        "sharding-raises",
        {"trainers": 8, "optimizer_sharding": "fully_sharded_model_space"},
        {"optimizer_sharding": "fully_reshardable"},
    ),
    ("async-unfinalised", {"host": "verl", "trainers": 8, "async_save": True}, {"async_save": False}),
    (
        "async-collective",
        {"host": "rl-safe", "trainers": 8, "async_save": True, "fully_parallel_save": True},
        {"fully_parallel_save": False},
    ),
    (
        "save-one-writer",
        {"trainers": 32, "ep": 8, "optimizer_sharding": "fully_reshardable", "fully_parallel_save": False},
        {"fully_parallel_save": True},
    ),
    ("save-gathers-optimizer", {"host": "nemo-rl", "trainers": 8}, {"optimizer_sharding": "dp_reshardable"}),
    ("gloo-missing", {"trainers": 8, "gloo": False, "optimizer_sharding": "dp_zero_gather_scatter"}, {"gloo": True}),
]
"""Code, facts that have it, and what of them avoids it."""
OF_A_MODEL: list[tuple[str, Facts, Facts]] = [
    ("heads-indivisible", {"trainers": 24, "tp": 3, "etp": 3}, {"tp": 4, "etp": 1}),
    ("heads-indivisible", {"host": "rl-safe", "trainers": 8, "tp": 8}, {"host": "megatron"}),
    ("heads-indivisible", {"trainers": 12, "tp": 6}, {"tp": 2}),
    ("experts-indivisible", {"trainers": 24, "ep": 3}, {"ep": 4}),
    ("layers-indivisible", {"trainers": 10, "pp": 5}, {"first_stage_layers": 9, "last_stage_layers": 9}),
    ("layers-indivisible", {"trainers": 8, "pp": 4, "first_stage_layers": 11}, {"first_stage_layers": 12}),
    ("layers-indivisible", {"trainers": 8, "pp": 4, "vpp": 5}, {"vpp": 6}),
    ("layers-indivisible", {"trainers": 8, "pp": 4, "embedding_as_layer": True}, {"embedding_as_layer": False}),
    ("layers-indivisible", {"trainers": 10, "pp": 5}, {"embedding_as_layer": True, "loss_as_layer": True}),
    ("layers-indivisible", {"trainers": 10, "pp": 5, "vpp": 3}, {"pipeline_layout": "Et*10|(t*10|)*3t*8L"}),
    ("experts-apart", {"trainers": 8, "tp": 4, "etp": 1}, {"ep": 2}),
]


@pytest.mark.parametrize(("code", "facts", "remedy"), CASES, ids=[case[0] for case in CASES])
def test_a_hazard_is_found_and_its_setting_avoids_it(code: str, facts: Facts, remedy: Facts) -> None:
    assert code in findings(facts)
    assert code not in findings(facts | remedy)


@pytest.mark.parametrize(("code", "facts", "remedy"), OF_A_MODEL, ids=[case[0] for case in OF_A_MODEL])
def test_a_model_that_does_not_divide_is_found(code: str, facts: Facts, remedy: Facts, model: str) -> None:
    assert code in findings(facts | {"model": model})
    assert code not in findings(facts | remedy | {"model": model})


def test_every_hazard_has_a_case() -> None:
    assert {hazard.code for hazard in HAZARDS} == {code for code, *_ in [*CASES, *OF_A_MODEL]}


def test_every_hazard_says_since_when_with_what_evidence_and_what_avoids_it() -> None:
    codes = [hazard.code for hazard in HAZARDS]
    assert len(set(codes)) == len(codes)
    for hazard in HAZARDS:
        assert all((hazard.text, hazard.since, hazard.evidence, hazard.avoid)), hazard.code


def test_a_finding_names_groups_ranks_and_the_setting_in_the_words_of_its_source() -> None:
    source = Source(name="verl", values={"trainers": 16, "ep": 16}, keys={"ep": "expert_model_parallel_size"})
    (found,) = [f for f in find(make_plan(make_request(source))) if f.code == "ep-straddles"]
    assert found.groups == ("EXPERT_MODEL_PARALLEL_GROUP",)
    assert found.ranks == "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15"
    assert found.avoid == "expert_model_parallel_size times --etp that divides --gpus-per-node"
    assert "1 of 1 groups of 16" in found.text


@pytest.mark.parametrize(
    ("etp", "dispatcher", "expert", "tensor"),
    [
        (1, "alltoall", "EXPERT_MODEL_PARALLEL_GROUP", ""),
        (1, "allgather", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", ""),
        (4, "alltoall", "EXPERT_MODEL_PARALLEL_GROUP", ""),
        (4, "allgather", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", ""),
        (4, "flex", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", ""),
        (16, "alltoall", "", "EXPERT_TENSOR_PARALLEL_GROUP"),
        (16, "allgather", "", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"),
    ],
)
def test_the_group_that_straddles_is_the_one_over_which_the_dispatcher_sends(
    etp: int, dispatcher: str, expert: str, tensor: str, model: str
) -> None:
    found = findings({"trainers": 16, "ep": 16 // etp, "etp": etp, "dispatcher": dispatcher, "model": model})
    groups = {code: found[code].groups if code in found else ("",) for code in ("ep-straddles", "tp-straddles")}
    assert groups == {"ep-straddles": (expert,), "tp-straddles": (tensor,)}


def test_a_group_of_one_rank_is_not_said_to_hang() -> None:
    found = findings({"trainers": 128, "ep": 128, "etp": 1})["expert-dp-late"]
    assert found.groups == ("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",)
    assert "of the optimizer; each expert has one copy" in found.text
    assert "expert-dp-late" not in findings({"trainers": 4, "tp": 4})


def test_qwen3_235b_may_count_its_embedding_and_loss_as_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE | {"num_hidden_layers": 94}))
    facts = {"host": "verl", "trainers": 64, "pp": 8, "ep": 8, "etp": 1, "model": str(tmp_path)}
    assert "94 layers do not divide by --pp=8" in findings(facts)["layers-indivisible"].text
    counted = facts | {"embedding_as_layer": True, "loss_as_layer": True}
    assert "layers-indivisible" not in findings(counted)
    assert make_plan(make_request(Source(name="t", values=counted))).layers == [11, 12, 12, 12, 12, 12, 12, 11]
    virtual = findings(counted | {"vpp": 5})["layers-indivisible"].text
    assert "12 layers of a stage (embedding and loss counted) do not divide by --vpp=5" in virtual


def test_whose_rule_refuses_the_heads_is_said(model: str) -> None:
    found = findings({"host": "rl-safe", "trainers": 8, "tp": 8, "model": model})["heads-indivisible"]
    assert "4 key-value heads do not divide by --tp=8, a rule of rl_safe_workers' conversion" in found.text
    found = findings({"host": "rl-safe", "trainers": 6, "tp": 6, "model": model})["heads-indivisible"]
    assert "conversion" not in found.text


def test_what_stops_a_run_comes_first() -> None:
    severities = [
        f.severity for f in findings({"world": 64, "trainers": 32, "ep": 16, "default_group": "joint"}).values()
    ]
    assert severities == sorted(severities, key=list(Severity).index)
    assert severities[0] is Severity.STOPS
    assert severities[-1] is Severity.COSTS


def test_one_writer_is_named_with_what_it_writes(model: str) -> None:
    facts = {"trainers": 32, "ep": 8, "etp": 1, "model": model, "host": "nemo-rl", "fully_parallel_save": False}
    found = findings(facts)["save-one-writer"]
    assert found.ranks == "0"
    assert "writes 67.3 GiB where 12.4 would be even, and 24 of 32 ranks write nothing" in found.text


@pytest.mark.parametrize("facts", [{"trainers": 4, "ep": 2}, {"world": 16, "trainers": 8, "pp": 4}])
def test_a_run_of_ours_has_no_hazard(facts: Facts) -> None:
    assert findings(facts | {"host": "rl-safe"}) == {}


_VERL = "actor_rollout_ref.actor.megatron"


def verl(nodes: int, **sizes: int) -> dict[str, Finding]:
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
    }
    given = [f"{_VERL}.{names[name]}={size}" for name, size in sizes.items()]
    source = verl_source(["python3", "-m", "verl.trainer.main_ppo", f"trainer.nnodes={nodes}", *given])
    return {finding.code: finding for finding in find(make_plan(make_request(source)))}


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [(4, {"pp": 4, "cp": 2, "tp": 4}), (2, {"pp": 2, "tp": 4, "ep": 2}), (2, {"tp": 4, "pp": 2, "ep": 1})],
    ids=["4x8", "2x8 EP2", "2x8 EP1"],
)
def test_verl_2238_finds_the_gathers_that_its_save_was_stuck_in(nodes: int, sizes: dict[str, int]) -> None:
    found = verl(nodes, **sizes)
    assert "verl 2238" in found["save-collective"].evidence
    assert "sharding-raises" not in found


def test_ms_swift_9486_finds_the_hang_of_the_first_optimizer_step() -> None:
    found = findings(SWIFT)["expert-dp-late"]
    assert "ms-swift 9486" in found.evidence
    assert "EXPERT_DATA_PARALLEL_GROUP" in found.groups
    assert found.ranks == "0-31"


@pytest.mark.parametrize(("issue", "trainers", "ep"), [("ms-swift 9602", 16, 8), ("ms-swift 6387", 8, 8)])
def test_ms_swift_9602_and_6387_find_memory_that_is_taken_late(issue: str, trainers: int, ep: int) -> None:
    found = findings({"host": "ms-swift", "trainers": trainers, "ep": ep, "etp": 1})["comms-late"]
    assert issue in found.evidence
    assert "MiB on each GPU" in found.text


def test_nemo_rl_2225_finds_the_conversion_that_waits_for_late_ranks(tmp_path: Path) -> None:
    recipe = tmp_path / "grpo.yaml"
    recipe.write_text(
        "policy:\n"
        "  megatron_cfg:\n"
        "    {tensor_model_parallel_size: 8, expert_model_parallel_size: 8, expert_tensor_parallel_size: 1}\n"
        "  generation: {colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 3}\n"
    )
    plan = make_plan(make_request(nemo_rl_source([str(recipe)])))
    assert (plan.request.trainers, plan.request.rollouts) == (16, 8)
    found = {finding.code: finding for finding in find(plan)}
    for code in ("save-collective", "timeout-short"):
        assert "NeMo RL 2225" in found[code].evidence
    mixed = make_request(nemo_rl_source([str(recipe)]).overlaid(Source(name="o", values={"default_group": "joint"})))
    assert "world-mixed" in {finding.code for finding in find(make_plan(mixed))}
