"""A weight sync that fails on one trainer fails on all of them, in bounded time, and leaves a world that works."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_safe_workers.control.failure import Failure
from rl_safe_workers.errors import PhaseTimeoutError, Victim, WeightSyncError, first_line
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.rollout.packing import Adjacent
from rl_safe_workers.rollout.protocol import Bucket, plan_buckets
from rl_safe_workers.root_cause import cause_of
from rl_safe_workers.workers import weight_sync
from rl_safe_workers.workers.outgoing import Items, Outgoing
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.joint_group import joint_world
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.failing_sync import (
    BUCKET_BYTES,
    FAILING,
    PATIENCE,
    SOON_S,
    SYNC_S,
    TRAINERS,
    Case,
    Seen,
    joint_rank,
)
from tests.distributed.file_pair import FilePair
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, control_plane, run_config

NO_ROOM = "there is no room for the buffers"


Run = Callable[[Case], list[Seen]]


@pytest.fixture
def run(address: StoreAddress, seeded_models: dict[str, Path], tmp_path: Path) -> Run:
    """Runs a case, and returns what the trainers saw once all is well again."""

    def run(case: Case) -> list[Seen]:
        config = run_config(seeded_models["moe"], tp=case.tp, ep=2)
        config.rl_safe.timeouts.sync = SYNC_S
        first, fresh = TRAINERS + case.rollouts, case.rollouts if case.again else 0
        outcomes = run_ranks(joint_rank, first + fresh, address, config, tmp_path, case, timeout_s=3 * SYNC_S)
        trainers: list[Seen] = values(outcomes[:TRAINERS])
        if case.again:
            assert [rank.summed for rank in trainers] == [TRAINERS] * TRAINERS
            assert values(outcomes[first:]) == [trainers[0].prints] * fresh
            assert trainers[0].prints
        return trainers

    return run


def _assert_named(seen: list[Seen], reason: str) -> None:
    """Asserts that all have failed alike, know that rank ``FAILING`` has and why it did, and have left."""
    for rank in seen:
        assert isinstance(rank.error, WeightSyncError), rank.error
        # Rank 0 may have failed because of it.
        assert re.match(rf"weight sync failed on training rank (0-)?{FAILING}: ", str(rank.error))
        assert rank.left
    assert reason in str(seen[FAILING].error)


@pytest.mark.parametrize("stays", [True, False], ids=["stays", "leaves"])
def test_a_rollout_rank_that_stops_reading_fails_all_trainers_before_they_give_up_on_each_other(
    run: Run, stays: bool
) -> None:
    seen = run(Case(colocated=True, reads=1, stays=stays))
    _assert_named(seen, f"joint rank {FAILING}: its pair did not keep up: ")
    # Nobody blames the trainer, which only waited for the engine.
    assert {cause_of(rank.error, trainer_id(number)) for number, rank in enumerate(seen)} == {Victim()}
    # The pair may take half of the time; the broadcasts among the trainers, all of it.
    assert max(rank.waited_s for rank in seen) < 0.75 * SYNC_S


def _cannot_pack(worker: Worker, patch: pytest.MonkeyPatch, *, error: Exception, source: int) -> None:
    """Fails at the first bucket of a source from the third on."""
    number, pack, failed = count(1), Outgoing.pack, []

    def failing(outgoing: Outgoing, bucket: Bucket, *args: Any, **kwargs: Any) -> None:
        if next(number) >= 3 and bucket.source == source and not failed:
            failed.append(None)
            raise error
        pack(outgoing, bucket, *args, **kwargs)

    patch.setattr(Outgoing, "pack", failing)


@pytest.mark.parametrize(
    ("error", "source"),
    [(torch.OutOfMemoryError("CUDA out of memory.\nTried to"), FAILING), (ValueError("no such shape"), 0)],
    ids=["memory_for_its_own", "value_of_another"],
)
@pytest.mark.parametrize("colocated", [False, True], ids=["joint", "colocated"])
def test_a_bucket_that_cannot_be_packed_fails_all_trainers_at_once(
    run: Run, colocated: bool, error: Exception, source: int
) -> None:
    seen = run(Case(colocated=colocated, hinder=partial(_cannot_pack, error=error, source=source)))
    _assert_named(seen, f"{type(error).__name__}: {first_line(error)}")
    assert max(rank.waited_s for rank in seen) < SOON_S


def _cannot_end_the_export(worker: Worker, patch: pytest.MonkeyPatch) -> None:
    outgoing = worker.safe.weights._outgoing
    assert outgoing is not None

    def weights(adjacent: Adjacent) -> Items:
        yield from outgoing.weights(adjacent)
        raise RuntimeError("the export does not end")

    patch.setattr(worker.safe.weights, "_outgoing", replace(outgoing, weights=weights))


def _cannot_hand_on_the_last_bucket(worker: Worker, patch: pytest.MonkeyPatch) -> None:
    outgoing, number, broadcast = worker.safe.weights._outgoing, count(1), weight_sync.dist.broadcast
    assert outgoing is not None
    buckets = len(plan_buckets(outgoing.specs, bucket_bytes=BUCKET_BYTES))

    def failing(*args: Any, **kwargs: Any) -> Any:
        work = broadcast(*args, **kwargs)
        if next(number) == buckets:
            work.wait()
            raise RuntimeError("the world is lost")
        return work

    patch.setattr(weight_sync.dist, "broadcast", failing)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(hinder=_cannot_end_the_export), "the export does not end"),
        (Case(colocated=True, hinder=_cannot_hand_on_the_last_bucket), "the world is lost"),
    ],
    ids=["export", "broadcast"],
)
def test_an_error_between_two_buckets_fails_all_trainers_at_once(run: Run, case: Case, reason: str) -> None:
    seen = run(case)
    _assert_named(seen, f"RuntimeError: {reason}")
    assert max(rank.waited_s for rank in seen) < SOON_S


def _has_no_room(worker: Worker, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker.safe.weights, "_bucket_buffers", lambda size_bytes: (Failure(NO_ROOM), []))


def test_a_rank_without_room_for_buckets_fails_all_trainers_at_once(run: Run) -> None:
    seen = run(Case(hinder=_has_no_room))
    _assert_named(seen, NO_ROOM)
    assert max(rank.waited_s for rank in seen) < SOON_S


@pytest.mark.parametrize(
    "case", [Case(colocated=True, hinder=_has_no_room), Case(tp=2, hinder=_has_no_room)], ids=["colocated", "tp2"]
)
def test_where_collectives_follow_all_hear_of_a_rank_without_room_before_the_first(run: Run, case: Case) -> None:
    seen = run(case)
    _assert_named(seen, NO_ROOM)
    assert [rank.packed for rank in seen] == [0] * TRAINERS
    assert max(rank.waited_s for rank in seen) < SOON_S


def _has_left(worker: Worker, patch: pytest.MonkeyPatch) -> None:
    worker.leave()


def test_a_trainer_that_has_left_its_pair_fails_all_trainers_at_once(run: Run) -> None:
    seen = run(Case(colocated=True, hinder=_has_left))
    _assert_named(seen, "has not joined the joint group")
    assert max(rank.waited_s for rank in seen) < SOON_S


def _cannot_take(worker: Worker, patch: pytest.MonkeyPatch) -> None:
    number, take = count(1), Outgoing._take

    def failing(bucket: Bucket, first: int, weights: Items) -> tuple[torch.Tensor, int]:
        if next(number) == 6:
            raise WeightSyncError("weight a was announced as b")
        return take(bucket, first, weights)

    patch.setattr(Outgoing, "_take", staticmethod(failing))


def test_a_weight_that_cannot_be_taken_amid_tensor_parallel_collectives_fails_all_trainers_in_time(run: Run) -> None:
    """Promised are an error of ours on every trainer, and its time. Not that it names the rank, nor a world that works.

    The rank is out of step with the collectives that make the weights, so that its tensor-parallel group may be lost.
    """
    for rank in run(Case(tp=2, hinder=_cannot_take, again=False)):
        assert isinstance(rank.error, (WeightSyncError, PhaseTimeoutError))
        assert rank.waited_s < SYNC_S + 2


LIMIT_S, READ_S, BUFFER_BYTES = 1.0, 0.2, 1024


def _pass_within_a_limit(joint_rank: int, address: StoreAddress, folder: Path, turns: int, reads: int) -> float:
    """The reader takes its time for each of a few turns, and reads no more. Returns how long the sender waits."""
    FilePair.folder = folder
    store = connect_store(address, timeout=PATIENCE)
    control = control_plane(address, rank=joint_rank, size=2, trainers=1, world=joint_world(0))
    pair = FilePair(
        control,
        generation=0,
        timeout=PATIENCE,
        device=torch.device("cpu"),
        sync_timeout=timedelta(seconds=3 * LIMIT_S),
    )
    buffers = cycle(pair.buffers(BUFFER_BYTES))
    if joint_rank == 1:
        for _ in range(reads):
            time.sleep(READ_S)
            pair.broadcast(next(buffers), source=0)()
        store.wait(["over"], PATIENCE)
        return 0.0
    start_s = time.monotonic()
    pair.limit(timedelta(seconds=LIMIT_S))
    with pytest.raises(WeightSyncError, match="joint rank 0: its pair did not keep up: "):  # noqa: PT012
        waits = deque([pair.broadcast(next(buffers), source=0)])
        for _ in range(turns - 1):
            waits.append(pair.broadcast(next(buffers), source=0))
            waits.popleft()()
        pair.flush()
    waited_s = time.monotonic() - start_s
    assert not pair.is_open
    store.set("over", "")
    return waited_s


@pytest.mark.parametrize(
    ("turns", "reads"), [(20, 0), (20, 4), (2, 1)], ids=["never_reads", "reads_slowly", "does_not_read_the_last"]
)
def test_a_limit_holds_for_all_turns_together(address: StoreAddress, tmp_path: Path, turns: int, reads: int) -> None:
    waited_s, _ = values(run_ranks(_pass_within_a_limit, 2, address, tmp_path, turns, reads))
    assert 0.9 * LIMIT_S < waited_s < LIMIT_S + 0.5
