"""The joint group on a GPU, with doubles of NCCL's works: a sync does not run ahead of a peer without end."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import pytest
import torch

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.worlds.joint_group import JointGroup

MANY = 100


class Work:
    """A broadcast that ends when ``ends`` says so. A stream waits for it, not the caller."""

    ends = True

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return self.ends


class Hanging(Work):
    ends = False


class Communicator:
    def __init__(self, kind: type[Work]) -> None:
        self.started = 0
        self._kind = kind

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self.started += 1
        return self._kind()

    def abort(self) -> None:
        pass


def group_of(communicator: Communicator) -> JointGroup:
    group = object.__new__(JointGroup)
    group.joint_rank = group._started = 0
    group._device, group._sync_timeout = torch.device("cuda", 0), timedelta(seconds=1)
    group._groups, group._works, group._under_way = {0: communicator}, deque(), deque()
    group._deadline = Deadline.after(60)
    return group


def send_all(group: JointGroup) -> None:
    for _ in range(MANY):
        group.broadcast(torch.ones(1), source=0)()


def test_a_peer_that_is_gone_ends_the_sync_in_time() -> None:
    communicator = Communicator(Hanging)
    group = group_of(communicator)
    with pytest.raises(WeightSyncError, match=r"timed out after .* a peer is gone, or raise rl_safe.timeouts.sync"):
        send_all(group)
    assert communicator.started < MANY / 2
    assert not group.is_open


def test_a_limit_bounds_the_waits_of_all_broadcasts() -> None:
    group = group_of(Communicator(Hanging))
    group._sync_timeout = timedelta(hours=1)
    group.limit(timedelta(seconds=0.2))
    with pytest.raises(WeightSyncError, match="timed out after"):
        send_all(group)


def test_broadcasts_that_end_keep_nothing() -> None:
    communicator = Communicator(Work)
    group = group_of(communicator)
    send_all(group)
    assert communicator.started == MANY
    assert len(group._under_way) < MANY / 2
