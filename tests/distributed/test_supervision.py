"""Work under one deadline: groups of any size, plans in one order, and whatever fails anywhere is heard by all."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import timedelta

import pytest

from rl_safe_workers.control.supervision import Supervision
from rl_safe_workers.errors import CommunicatorError, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import control_plane

SIZE = 2
A_THOUSAND_RANKS = f"WORLD {list(range(2048))}"
"""Longer than a key of TCPStore may be."""


def _work(rank: int, address: StoreAddress, *, timeout_s: float = 10) -> Supervision:
    control = control_plane(address, rank=rank, size=SIZE)
    return Supervision(control, "test", phase=Phase.BOOTSTRAP, timeout=timedelta(seconds=timeout_s))


def _large(rank: int, address: StoreAddress) -> int:
    work = _work(rank, address)
    work.compare("plan", {A_THOUSAND_RANKS: ["reduce"]}, [range(SIZE)])
    done: int = work.part(A_THOUSAND_RANKS, range(SIZE), lambda: rank)
    work.finish()
    return done


def test_the_name_of_a_large_group_is_no_key(address: StoreAddress) -> None:
    assert len(A_THOUSAND_RANKS) > 8192
    assert values(run_ranks(_large, SIZE, address)) == [0, 1]


def _compare(rank: int, address: StoreAddress, plans: Mapping[int, dict[str, list[str]]]) -> None:
    _work(rank, address).compare("plan", plans[rank], [range(SIZE)] * len(plans[rank]))


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        ({"A": ["reduce"], "B": []}, r"it plans \[(|'reduce')\], but rank \d \[(|'reduce')\]"),
        ({"B": ["reduce"], "A": []}, r"it connects the groups that it shares with rank \d in another order"),
    ],
)
def test_plans_that_differ_in_classes_or_in_order_are_refused_on_every_rank(
    plan: dict[str, list[str]], complaint: str, address: StoreAddress
) -> None:
    outcomes = run_ranks(_compare, SIZE, address, {0: {"A": [], "B": ["reduce"]}, 1: plan})
    for outcome in outcomes:
        assert isinstance(outcome.error, CommunicatorError)
        assert outcome.error.culprit in trainer_ids((0, 1))
        with pytest.raises(CommunicatorError, match=complaint):
            raise outcome.error


def _fail_alone(rank: int, address: StoreAddress) -> None:
    work = _work(rank, address)
    if rank == 1:
        work.alone("NCCL's kernels", lambda: [].pop())
    work.part("A", range(SIZE), lambda: None)


def test_what_fails_on_one_rank_alone_is_heard_by_the_others_at_once(address: StoreAddress) -> None:
    outcomes = run_ranks(_fail_alone, SIZE, address)
    for outcome in outcomes:
        assert isinstance(outcome.error, CommunicatorError)
        assert outcome.error.culprit == trainer_id(1)
        assert str(outcome.error) == (
            "phase bootstrap: training rank 1 failed in NCCL's kernels: IndexError: pop from empty list"
        )


def _dawdle() -> None:
    time.sleep(60)


def _come_late(rank: int, address: StoreAddress) -> None:
    work = _work(rank, address, timeout_s=2)
    work.part("A", range(SIZE), _dawdle if rank == 1 else lambda: None)
    work.finish()


def test_a_rank_that_does_something_else_is_named_with_its_line(address: StoreAddress) -> None:
    for outcome in run_ranks(_come_late, SIZE, address):
        assert isinstance(outcome.error, PhaseTimeoutError)
        assert outcome.error.missing == {trainer_id(1)}
        assert re.fullmatch(r"rank 1 is at \S*test_supervision\.py:\d+ \(_dawdle\)", outcome.error.detail)
