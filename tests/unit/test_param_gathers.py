"""Which bucket groups of a chunk are gathered. With real ranks: tests/distributed/test_param_gathers.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rl_safe_workers.compat.param_gathers import complete_param_gathers


class Group:
    """A bucket group."""

    def __init__(self, *, dispatched: bool, handle: object = None, ranks: int = 2) -> None:
        self.param_gather_dispatched, self.param_gather_handle = dispatched, handle
        self.intra_distributed_optimizer_instance_size = ranks
        self.syncs: list[bool] = []

    def start_param_sync(self, *, force_sync: bool) -> None:
        self.syncs.append(force_sync)


def chunk(*groups: Group, **config: bool) -> Any:
    known = {
        "overlap_param_gather": True,
        "use_distributed_optimizer": True,
        "reuse_grad_buf_for_mxfp8_param_ag": False,
    }
    return SimpleNamespace(
        ddp_config=SimpleNamespace(**known | config), bucket_groups=groups[:1], expert_parallel_bucket_groups=groups[1:]
    )


def test_groups_that_are_put_off_or_under_way_are_gathered_at_once() -> None:
    put_off, under_way, done = Group(dispatched=False), Group(dispatched=True, handle=object()), Group(dispatched=True)
    assert complete_param_gathers([chunk(put_off, under_way, done)]) == 2
    assert (put_off.syncs, under_way.syncs, done.syncs) == ([True], [True], [])


def test_a_rank_that_is_alone_has_nothing_to_gather() -> None:
    put_off, under_way = Group(dispatched=False, ranks=1), Group(dispatched=True, handle=object(), ranks=1)
    assert complete_param_gathers([chunk(put_off, under_way)]) == 1
    assert (put_off.syncs, under_way.syncs) == ([], [True])


@pytest.mark.parametrize(
    "config",
    [
        {"overlap_param_gather": False},
        {"use_distributed_optimizer": False},
        {"reuse_grad_buf_for_mxfp8_param_ag": True},
    ],
)
def test_chunks_that_put_nothing_off_or_share_a_buffer_are_left_alone(config: dict[str, bool]) -> None:
    group = Group(dispatched=False)
    assert complete_param_gathers([chunk(group, **config)]) == 0
    assert group.syncs == []


def test_chunks_of_other_wrappers_are_left_alone() -> None:
    fsdp = SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=True))
    assert complete_param_gathers([fsdp, SimpleNamespace(), None]) == 0
