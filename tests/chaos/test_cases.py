"""The matrix itself, before any run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role
from tests.chaos.cases import PHASES, QUICK, QUICK_CHAIN, RANKS, Case, all_cases, chains
from tests.chaos.plan import OF_A_RANK, Kind, from_json, to_json

TRAIN_1 = Case(kind=Kind.KILL, phase=Phase.TRAIN, role=Role.TRAINER, rank=1)
SYNC_ROLLOUT = Case(kind=Kind.STALL, phase=Phase.SYNC, role=Role.ROLLOUT, rank=0)


def test_a_fault_survives_the_way_through_the_environment() -> None:
    faults = tuple(case.fault(Path("/tmp/run"), number) for number, case in enumerate(all_cases()))
    assert from_json(to_json(*faults)) == faults


def test_every_phase_and_rank_has_a_case_and_so_has_every_kind_where_the_rank_takes_part() -> None:
    cases = all_cases()
    assert len(set(cases)) == len(cases)
    assert {case.row for case in cases} == {(phase, role, rank) for phase in PHASES for role, rank in RANKS}
    assert {case.kind for case in cases if case.row == TRAIN_1.row} == set(OF_A_RANK)
    assert set(cases) > QUICK


def test_every_cell_that_starts_again_is_in_one_chain() -> None:
    assert sorted(map(str, (case for chain in chains() for case in chain))) == sorted(
        str(case) for case in all_cases() if case.restarts
    )
    assert QUICK_CHAIN[0] in all_cases()


@pytest.mark.parametrize(
    ("case", "error", "is_named"),
    [
        (TRAIN_1, "training rank 1 failed in phase train: the process died", True),
        (TRAIN_1, "training rank 0 failed in phase train: the process died", False),
        (TRAIN_1, "training rank 1 failed in phase logprob: the process died", False),
        (TRAIN_1, "rollout rank 1 failed in phase train: the process died", False),
        (TRAIN_1, "phase train: rank 1 of training world did not arrive within 6.0 s", True),
        (TRAIN_1, "phase train: rank 0 of training world did not arrive within 6.0 s", False),
        (TRAIN_1, "training rank 0 failed in phase train: phase train: training rank 1 failed in A", False),
        (TRAIN_1, "training rank 1 failed in phase train: training rank 0 is gone", True),
        (SYNC_ROLLOUT, "phase sync: rank 0 of the rollouts did not arrive within 6.0 s", True),
        (SYNC_ROLLOUT, "phase sync: rank 0 of the trainers did not arrive within 6.0 s", False),
    ],
)
def test_an_error_is_right_only_if_it_names_rank_and_phase(case: Case, error: str, is_named: bool) -> None:
    assert case.is_named_by(error) is is_named
