"""A rank whose groups can be released, and what such a group is."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from rl_safe_workers.comms.releasable import register_backend
from rl_safe_workers.comms.release import RebuildReport, ReleaseReport, rebuild, release
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.worker import control_plane

SIZE = 4
PATIENCE = timedelta(seconds=30)


class Ranks:
    """One rank of a world whose groups can be released."""

    def __init__(self, rank: int, address: StoreAddress, *, backend: str | None = None, size: int = SIZE) -> None:
        self.rank, self.size = rank, size
        self.control = control_plane(address, rank=rank, size=size)
        self.store: Store = self.control.store
        dist.init_process_group(
            backend or register_backend("gloo"),
            store=PrefixStore(f"train/{backend}", self.store),
            rank=rank,
            world_size=size,
            timeout=PATIENCE,
        )

    def release(self, groups: Any = None, *, timeout: timedelta = PATIENCE, **options: Any) -> ReleaseReport:
        return release(groups, control=self.control, timeout=timeout, **options)

    def rebuild(self, groups: Any = None, *, timeout: timedelta = PATIENCE, **options: Any) -> RebuildReport:
        return rebuild(groups, control=self.control, timeout=timeout, **options)


def error_of(action: Callable[[], object]) -> tuple[type[BaseException], str, float]:
    """Returns the error that an action raises, and after how many seconds."""
    start_s = time.monotonic()
    try:
        action()
    except Exception as error:
        return type(error), str(error), time.monotonic() - start_s
    raise AssertionError("nothing was raised")


def three_threads() -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._threads = 3
    return options


def facts_of(group: Any) -> dict[str, Any]:
    cpu = torch.device("cpu")
    return {
        "id": id(group),
        "name": group.group_name,
        "desc": group.group_desc,
        "ranks": dist.get_process_group_ranks(group),
        "backend": dist.get_backend(group),
        "timeout": group._get_backend(cpu).options._timeout,
        "threads": group._get_backend(cpu).options._threads,
    }
