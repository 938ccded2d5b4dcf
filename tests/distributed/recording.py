"""Records every collective of this thread where torch dispatches it, whichever function it was called through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rl_safe_workers.comms.trace import CollectiveTrace, op_class
from rl_safe_workers.topology.groups import OpClass


@dataclass(frozen=True)
class Collective:
    """One operator on one group, e.g. ``Collective("allreduce_", "EXPERT_DATA_PARALLEL_GROUP", (0, 2))``."""

    op: str
    group: str
    ranks: tuple[int, ...]

    @property
    def connection(self) -> tuple[str, tuple[int, ...], OpClass]:
        """The connection that it needs."""
        found = op_class(self.op)
        assert found is not None, f"{self.op} has no class"
        return self.group, self.ranks, found


@contextmanager
def recorded_collectives() -> Iterator[list[Collective]]:
    """Yields a list that fills with the collectives of the body's thread."""
    collectives: list[Collective] = []

    def issue(group: dist.ProcessGroup, op: str, call: Callable[[], Any]) -> Any:
        collectives.append(Collective(op, group.group_desc, tuple(dist.get_process_group_ranks(group))))
        return call()

    with CollectiveTrace(issue):
        yield collectives


def is_connected(group: dist.ProcessGroup) -> bool:
    """Returns True if this rank has taken part in any collective of a gloo group, which counts its own."""
    return group._get_sequence_number_for_group() > 0
