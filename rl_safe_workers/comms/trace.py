"""Every collective of this process as it is issued, with its group: what really fires, whatever a table says.

torch's collectives are operators of its dispatcher (``c10d::allreduce_`` and so on), also those that a library has
bound under another name, so a dispatch mode sees them all, those of a backward pass included. NCCL starts what was
issued as a batch at the batch's end only, which is no operator: the trace looks at that, too. It has the name of what
was issued last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from rl_safe_workers.topology.groups import OpClass

BATCH = "batch_isend_irecv"
"""What a send or a receive is called that is part of a batch."""
OP_CLASSES = {
    "allreduce": OpClass.REDUCE,
    "reduce": OpClass.REDUCE,
    "broadcast": OpClass.REDUCE,
    "barrier": OpClass.REDUCE,
    "allgather": OpClass.GATHER_SCATTER,
    "reduce_scatter": OpClass.GATHER_SCATTER,
    "alltoall": OpClass.ALL_TO_ALL,
    "gather": OpClass.ALL_TO_ALL,
    "scatter": OpClass.ALL_TO_ALL,
    "send": OpClass.UNBATCHED_P2P,
    "recv": OpClass.UNBATCHED_P2P,
    BATCH: OpClass.BATCHED_P2P,
}
"""By the beginning of the operator's name."""


def op_class(operation: str) -> OpClass | None:
    """Returns the class of one of torch's operators, e.g. ``"_allgather_base_"``; None if it is not known."""
    name = operation.strip("_").replace("all_to_all", "alltoall").replace("all_gather", "allgather")
    found = [key for key in OP_CLASSES if name.startswith(key)]
    return OP_CLASSES[max(found, key=len)] if found else None


class CollectiveTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, passes every collective of this thread and of its backward passes through a function."""

    def __init__(self, issue: Callable[[dist.ProcessGroup, str, Callable[[], Any]], Any]) -> None:
        """Records the function.

        Args:
            issue: Called with the group, the operator's name, and what issues it, whose value it must return.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._issue = issue
        self._in_batch = False
        self._last: dict[str, str] = {}
        """The last operation by group."""
        self._torch: tuple[Any, Any] | None = None

    def __enter__(self) -> Self:
        """Begins; batches are seen in all threads."""
        torch_end, torch_batch = self._torch = dist.ProcessGroup._end_coalescing, c10d.batch_isend_irecv

        def end_coalescing(group: dist.ProcessGroup, *args: Any) -> Any:
            return self._issue(group, self._last.get(group.group_name, ""), lambda: torch_end(group, *args))

        def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
            self._in_batch = True
            try:
                return torch_batch(p2p_op_list)
            finally:
                self._in_batch = False

        _replace(end_coalescing, batch_isend_irecv)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        """Ends; traces that were begun inside this one must have ended."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if self._torch is not None:
            _replace(*self._torch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Sorts collectives out of all operators."""
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            group = next(filter(None, map(_as_group, (*args, *kwargs.values()))), None)
            if group is not None:
                name = BATCH if self._in_batch else func._schema.name.removeprefix("c10d::")
                self._last[group.group_name] = name
                return self._issue(group, name, lambda: func(*args, **kwargs))
        return func(*args, **kwargs)


def _replace(end_coalescing: Any, batch_isend_irecv: Any) -> None:
    dist.ProcessGroup._end_coalescing = end_coalescing  # type: ignore[method-assign]
    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv


def _as_group(argument: Any) -> dist.ProcessGroup | None:
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(argument)
    except RuntimeError:  # an operation such as the sum of a reduction
        return None
