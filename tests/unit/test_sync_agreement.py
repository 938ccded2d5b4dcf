"""The agreement of the trainers after a weight sync, with a rank and an exchange of buckets that fail as told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_safe_workers.control.failure import Failure
from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.rollout.sent_digests import SentDigests
from rl_safe_workers.workers.outgoing import Outgoing
from rl_safe_workers.workers.weight_sync import WeightSync

LOST = Failure("its pair has left", foreign=ForeignCause.PEER_LOST)
NO_ROOM = Failure("there is no room")


def sync(training_rank: int, failed: dict[int, Failure]) -> WeightSync:
    """A sync whose trainers report these failures."""
    told = {"failed_ranks": lambda phase, failure: failed, "device": torch.device("cpu")}
    rank: Any = SimpleNamespace(training_rank=training_rank, **told)
    made = WeightSync(rank, SimpleNamespace())  # type: ignore[arg-type]
    made._digests = SentDigests()
    return made


@pytest.mark.parametrize(
    ("training_rank", "culprit"), [(0, 0), (1, 1), (2, 1)], ids=["the_victim", "the_culprit", "another"]
)
def test_a_rank_that_only_lost_its_peer_is_not_blamed_by_others(training_rank: int, culprit: int) -> None:
    one = sync(training_rank, {0: LOST, 1: NO_ROOM})
    with pytest.raises(WeightSyncError, match="weight sync failed on training rank 0-1: ") as caught:
        one._agree(None)
    assert caught.value.culprit == trainer_id(culprit)


def test_a_failed_sync_lets_go_of_the_weights_that_it_has_not_digested() -> None:
    one = sync(0, {1: NO_ROOM})
    with pytest.raises(WeightSyncError):
        one._agree(None)
    assert one._digests is None


def test_a_gpu_that_fails_at_the_end_of_a_sync_is_a_failure_that_the_ranks_agree_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(of: WeightSync) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    one = sync(0, {})
    one._outgoing = Outgoing(
        specs=(), mine=frozenset(), is_collective=False, weights=lambda adjacent: iter(()), in_place=lambda adjacent: ()
    )
    monkeypatch.setattr(WeightSync, "_await_side_streams", fail)
    failure = one._send([], frozenset(), [torch.empty(0)], None)
    # The first failure stays: this rank has not joined.
    assert failure == Failure("has not joined the joint group")
    one.joint_group = SimpleNamespace(limit=lambda time_left: None, flush=lambda timeout: None)  # type: ignore[assignment]
    one.rank.remaining = lambda: 1.0  # type: ignore[method-assign,assignment,return-value]
    failure = one._send([], frozenset(), [torch.empty(0)], None)
    assert failure is not None
    assert "illegal memory access" in failure.text
