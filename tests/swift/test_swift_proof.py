"""Proved weight syncs of ms-swift, with a real vLLM engine in each rank, or behind its server: some go wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import faulty_weights
from tests.swift import real_engine
from tests.swift.jobs import ENGINE, Forge, Job
from tests.swift.ray_jobs import run_ray

pytestmark = [pytest.mark.timeout(300), real_engine.needed]

OUT, GATE, NORM = ([name] for name in (faulty_weights.OUT, faulty_weights.GATE, faulty_weights.NORM))
EXPERTS = [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)]
FAULTS = {2: "a bit", 4: "experts", 6: "stale", 8: "wire", 10: "lost", 12: "a bit", 13: "a bit"}
"""By the number of the sync of rank 1. Each that is wrong is redone, so that one job shows them all."""
WRONG = {2: OUT, 3: EXPERTS, 4: GATE, 5: NORM, 6: GATE, 7: OUT}
"""Weights that are wrong, by the step."""
LAST = 7
RAY_FAULTS = {2: "a bit", 4: "experts", 6: "stale", 7: "a bit"}
IN_RAY = {"gpus": 1, "vllm_tensor_parallel_size": 1, "vllm_max_model_len": 64, "vllm_enforce_eager": True}


@pytest.fixture(scope="module")
def faulty(forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return forge.grpo(
        tmp_path_factory.mktemp("faulty") / "job",
        inputs,
        *("--expert_model_parallel_size", "2", "--train_iters", str(LAST), *real_engine.ARGUMENTS),
        settings={"prove_sync_freq": 1},
        env={real_engine.FAULTS: json.dumps(FAULTS)},
    )


def told(names: Sequence[str], *, rank: int = 1) -> str:
    wrong = r"rollout rank {}: {}: sent [0-9a-f]{{16}}, held [0-9a-f]{{16}}"
    return "; ".join(wrong.format(rank, re.escape(name)) for name in names)


def test_weights_that_are_wrong_once_are_named_on_every_rank_and_sent_again(faulty: Job) -> None:
    for step in range(2, LAST):
        for rank in (0, 1):
            assert re.search(f"the weight sync of step {step} is redone: {told(WRONG[step])}\n", faulty.log(rank)), step
    assert "the weight sync of step 1 is redone" not in faulty.log(0)


def test_the_log_has_what_was_proved(faulty: Job) -> None:
    weights = faulty.proofs[0][0]
    assert weights > 0
    assert faulty.proofs == [(weights, 0, 0), *[(weights, 0, 1)] * (LAST - 2)]


def test_a_sync_that_is_wrong_twice_ends_the_job_with_the_name(faulty: Job) -> None:
    assert faulty.statuses == [1, 1]
    wrong = rf"the weight sync of step {LAST} has put wrong weights into an engine, twice: {told(WRONG[LAST])}\n"
    for rank in (0, 1):
        assert re.search(rf"the job has failed on training rank 1: .*: {wrong}", faulty.log(rank)), faulty.log(rank)[
            -3000:
        ]


@pytest.mark.every_case
def test_a_driver_of_ray_mode_names_wrong_weights_and_ends_the_job(inputs: Path, tmp_path: Path) -> None:
    end = run_ray(
        tmp_path / "job",
        inputs,
        ours=True,
        settings={"prove_sync_freq": 1},
        tuner={"tuner_type": "full"},
        ranks=1,
        more={"rollout": IN_RAY},
        plugins=[ENGINE.parent / "real_server_plugin.py"],
        limit_s=280,
        **{real_engine.FAULTS: json.dumps(RAY_FAULTS)},
    )
    assert (end.status, end.left) == (1, []), end.output[-3000:]
    for number, names in {2: OUT, 3: EXPERTS, 4: GATE}.items():
        assert re.search(f"weight sync {number} is redone: {told(names, rank=0)}\n", end.output), number
    assert "weight sync 1 is redone" not in end.output
    proofs = Job(folder=tmp_path / "job", statuses=[], ended=[]).proofs
    weights = proofs[0][0]
    assert weights > 0
    assert proofs == [(weights, 0, 0), (weights, 0, 1), (weights, 0, 1)]
    assert re.search(f"weight sync 4 has put wrong weights into an engine, twice: {told(OUT, rank=0)}", end.verdict[0])
