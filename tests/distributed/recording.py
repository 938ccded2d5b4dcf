"""Records every collective of this thread where torch dispatches it, whichever function it was called through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from rl_safe_workers.comms.catalog import OpClass

OP_CLASSES = {
    "allreduce_": OpClass.REDUCE,
    "broadcast_": OpClass.REDUCE,
    "barrier": OpClass.REDUCE,
    "allgather_": OpClass.GATHER_SCATTER,
    "_allgather_base_": OpClass.GATHER_SCATTER,
    "allgather_into_tensor_coalesced_": OpClass.GATHER_SCATTER,
    "gather_": OpClass.GATHER_SCATTER,
    "scatter_": OpClass.GATHER_SCATTER,
    "_reduce_scatter_base_": OpClass.GATHER_SCATTER,
    "reduce_scatter_tensor_coalesced_": OpClass.GATHER_SCATTER,
    "alltoall_": OpClass.ALL_TO_ALL,
    "alltoall_base_": OpClass.ALL_TO_ALL,
    "send": OpClass.P2P,
    "recv_": OpClass.P2P,
}
"""The kind of connection that each c10d operator needs."""


@dataclass(frozen=True)
class Collective:
    """One operator on one group, e.g. ``Collective("allreduce_", "EXPERT_DATA_PARALLEL_GROUP", (0, 2))``."""

    op: str
    group: str
    ranks: tuple[int, ...]

    @property
    def connection(self) -> tuple[str, tuple[int, ...], OpClass]:
        """What must be connected for it."""
        return self.group, self.ranks, OP_CLASSES[self.op]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
            ranks = tuple(dist.get_process_group_ranks(group))
            self.collectives.append(Collective(func._opname, group.group_desc, ranks))
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded_collectives() -> Iterator[list[Collective]]:
    """Yields a list that fills with the collectives of the body."""
    with _Recorder() as recorder:
        yield recorder.collectives


def is_connected(group: dist.ProcessGroup) -> bool:
    """Whether this rank has taken part in any collective of a gloo group, which counts its own."""
    return group._get_sequence_number_for_group() > 0
