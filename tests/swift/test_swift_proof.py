"""Proved weight syncs of ms-swift's own trainer, with a real vLLM engine in each rank: some go wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.swift import real_engine
from tests.swift.jobs import Forge, Job

pytestmark = [pytest.mark.timeout(300), real_engine.needed]

OUT, GATE, NORM = ([name] for name in (real_engine.OUT, real_engine.GATE, real_engine.NORM))
EXPERTS = [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)]
FAULTS = {2: "a bit", 4: "experts", 6: "stale", 8: "wire", 10: "lost", 12: "a bit", 13: "a bit"}
"""By the number of the sync of rank 1. Each that is wrong is redone, so that one job shows them all."""
WRONG = {2: OUT, 3: EXPERTS, 4: GATE, 5: NORM, 6: GATE, 7: OUT}
"""Weights that are wrong, by the step."""
LAST = 7


@pytest.fixture(scope="module")
def faulty(forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return forge.grpo(
        tmp_path_factory.mktemp("faulty") / "job",
        inputs,
        *("--expert_model_parallel_size", "2", "--train_iters", str(LAST), *real_engine.ARGUMENTS),
        settings={"prove_sync_freq": 1},
        env={real_engine.FAULTS: json.dumps(FAULTS)},
    )


def told(names: Sequence[str]) -> str:
    return "; ".join(rf"rollout rank 1: {re.escape(name)}: sent [0-9a-f]{{16}}, held [0-9a-f]{{16}}" for name in names)


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
