"""Every collective of this process as it is issued, with its group: what really fires, whatever a table says.

torch's collectives are operators of its dispatcher (``c10d::allreduce_`` and so on), also those that a library has
bound under another name, so a dispatch mode sees them all, those of a backward pass included. NCCL starts what was
issued as a batch at the batch's end only, which is no operator: the trace looks at that, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from rl_safe_workers.topology.groups import OpClass

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
    "batch_isend_irecv": OpClass.BATCHED_P2P,
}
"""By the beginning of the operator's name. Of a send it cannot be told whether it is part of a batch."""
BATCH_END = "batch_isend_irecv"
"""What the end of a batch of sends is called in a trace; that of other batches has the name of their last operator."""


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
        self._last: dict[str, str] = {}
        self._torch_end: Callable[..., Any] | None = None

    def __enter__(self) -> Self:
        """Begins; ends of batches are seen in all threads."""
        self._torch_end = torch_end = dist.ProcessGroup._end_coalescing

        def end_coalescing(group: dist.ProcessGroup, *args: Any) -> Any:
            return self._issue(group, self._name_of_batch(group), lambda: torch_end(group, *args))

        dist.ProcessGroup._end_coalescing = end_coalescing  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        """Ends; traces that were begun inside this one must have ended."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        dist.ProcessGroup._end_coalescing = self._torch_end  # type: ignore[method-assign,assignment]

    def _name_of_batch(self, group: dist.ProcessGroup) -> str:
        last = self._last.get(group.group_name, "")
        return BATCH_END if op_class(last) is OpClass.UNBATCHED_P2P else last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Sorts collectives out of all operators."""
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            group = next(filter(None, map(_as_group, (*args, *kwargs.values()))), None)
            if group is not None:
                operation = self._last[group.group_name] = func._schema.name.removeprefix("c10d::")
                return self._issue(group, operation, lambda: func(*args, **kwargs))
        return func(*args, **kwargs)


def _as_group(argument: Any) -> dist.ProcessGroup | None:
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(argument)
    except RuntimeError:  # an operation such as the sum of a reduction
        return None
