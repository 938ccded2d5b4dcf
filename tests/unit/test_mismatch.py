"""The rank with another shape in a collective of gloo, which ends the rank that gets more than it expects."""

from __future__ import annotations

import pytest

from rl_safe_workers.diagnostics.flight_recorder import Record, Work
from rl_safe_workers.diagnostics.mismatch import Mismatch, find_mismatch


def work(elements: int, *, op: str = "all_gather", number: int = 7, backend: str = "gloo", name: str = "3") -> Work:
    return Work(
        op=op,
        group="DATA_PARALLEL_GROUP",
        number=number,
        has_ended=False,
        created_s=float(number),
        group_name=name,
        backend=backend,
        tensors=f"{elements} Float",
        elements=elements,
    )


def found(*, ended: int, aborted_in: str = "all_gather", **elements: int) -> Mismatch | None:
    records = {int(rank.removeprefix("rank")): Record.of([work(count)]) for rank, count in elements.items()}
    return find_mismatch(records, ended=[ended], aborted_in=aborted_in)


def test_the_longer_tensor_is_named_and_not_the_neighbour_that_gloo_has_ended() -> None:
    mismatch = found(ended=2, rank0=4000, rank1=5000, rank3=4000)
    assert mismatch is not None
    assert mismatch.culprits == {1}
    assert mismatch.said == (
        "training rank 0, 3 with 4000 Float; training rank 1 with 5000 Float; gloo aborted training rank 2, which "
        "received more bytes than expected"
    )


def test_the_longer_of_two_tensors_is_named_because_whoever_was_ended_had_the_shorter() -> None:
    mismatch = found(ended=2, rank0=4000, rank1=5000)
    assert mismatch is not None
    assert mismatch.culprits == {1}


def test_a_rank_with_the_shorter_tensor_is_named_where_all_others_agree() -> None:
    mismatch = found(ended=1, rank0=4000, rank2=4000, rank3=4000)
    assert mismatch is not None
    assert mismatch.culprits == {1}
    assert mismatch.said.startswith("training rank 0, 2-3 with 4000 Float, and training rank 1 with less; gloo aborted")


def test_nobody_is_named_where_two_ranks_have_two_shapes() -> None:
    mismatch = found(ended=1, rank0=4000)
    assert mismatch is not None
    assert mismatch.culprits == set()
    assert mismatch.said.endswith("the wrong rank is not known, because only two ranks can be compared")


def test_nobody_is_named_where_as_many_have_one_shape_as_another() -> None:
    mismatch = found(ended=3, rank0=4000, rank1=5000, rank2=5000)
    assert mismatch is not None
    assert mismatch.culprits == set()
    assert mismatch.said.endswith("because as many ranks have one shape as another")


def test_a_rank_that_was_killed_by_something_else_has_no_other_shape() -> None:
    assert found(ended=1, aborted_in="", rank0=4000, rank2=4000) is None


def test_what_gloo_has_said_counts_without_a_stack_and_without_a_record() -> None:
    records = {rank: Record.of([work(4000)]) for rank in (0, 2)}
    mismatch = find_mismatch(records, ended=[1], aborted_in="", is_sure=True)
    assert mismatch is not None
    assert mismatch.culprits == {1}
    unseen = find_mismatch({}, ended=[1], aborted_in="", is_sure=True)
    assert unseen is not None
    assert (unseen.work, unseen.culprits) == (None, set())
    assert "the wrong rank is not known, because" in unseen.said


def test_a_rank_that_was_in_another_collective_has_no_other_shape() -> None:
    assert found(ended=1, aborted_in="barrier", rank0=4000, rank2=4000) is None


@pytest.mark.parametrize(
    "other",
    [work(5000, name="4"), work(5000, number=6), work(5000, backend="nccl", name="4"), work(5000, op="all_to_all")],
    ids=["another group", "another number", "another backend", "another collective"],
)
def test_shapes_of_other_collectives_are_not_compared(other: Work) -> None:
    records = {0: Record.of([work(4000)]), 1: Record.of([other])}
    assert find_mismatch(records, ended=[2], aborted_in="") is None


@pytest.mark.parametrize("uneven", [work(1, op="all_to_all"), work(1, backend="nccl")])
def test_collectives_that_may_have_different_shapes_are_left_alone(uneven: Work) -> None:
    other = Work(**{name: getattr(uneven, name) for name in uneven.__slots__} | {"tensors": "2 Float", "elements": 2})
    assert find_mismatch({0: Record.of([uneven]), 1: Record.of([other])}, ended=[2], aborted_in="") is None


def test_a_rank_that_has_gone_on_is_compared_where_the_others_still_wait() -> None:
    ahead = Record.of([work(5000), work(1, op="all_reduce", number=8)])
    records = {0: Record.of([work(4000)]), 1: ahead, 3: Record.of([work(4000)])}
    mismatch = find_mismatch(records, ended=[2], aborted_in="all_gather")
    assert mismatch is not None
    assert (mismatch.culprits, mismatch.work.number) == ({1}, 7)
