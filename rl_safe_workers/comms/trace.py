"""Every collective of this process as it is issued, with its group: what really fires, whatever a table says.

Whatever function of ``torch.distributed`` is called, under whichever name a library has bound it, issues through a
method of ``dist.ProcessGroup``. While any thread traces, these methods are replaced by ones that ask whether theirs
does. A dispatch mode would see more, but Dynamo compiles nothing under one, and never again what it has refused.

Seen are the collectives of the thread that traces, and of its backward passes, whose threads torch gives what that
thread keeps; not those of other threads, which may connect or send weights meanwhile. A group that Python extends is
seen where it passes a collective on to a plain one, as `ReleasableGroup` does. NCCL starts what was issued as a batch
at the batch's end only: the trace looks at that, too. It has the name of what was issued last.

Not seen is what C++ issues on a plain group: functional collectives, with the ``torch.distributed`` calls that
``torch.compile`` turns into them; the reductions of ``torch.nn.parallel.DistributedDataParallel``. On a
`ReleasableGroup` these come back to Python, and are seen. Direct calls of ``torch.ops.c10d`` are seen on neither.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist

from rl_safe_workers.topology.groups import OpClass

BATCH = "batch_isend_irecv"
"""Name of a send or a receive that is part of a batch: the function of torch that makes one."""
OP_CLASSES = {
    "allreduce": OpClass.REDUCE,
    "reduce": OpClass.REDUCE,
    "broadcast": OpClass.REDUCE,
    "barrier": OpClass.REDUCE,
    "allgather": OpClass.GATHER_SCATTER,
    "reduce_scatter": OpClass.GATHER_SCATTER,
    "alltoall": OpClass.ALL_TO_ALL,
    "gather": OpClass.ROOT_EXCHANGE,
    "scatter": OpClass.ROOT_EXCHANGE,
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


OPERATORS = {
    **{name: f"{name}_" for name in ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "monitored_barrier")},
    **{name: f"{name}_" for name in ("allgather", "allgather_coalesced", "gather", "scatter", "reduce_scatter")},
    **{name: f"{name}_" for name in ("alltoall", "recv")},
    "barrier": "barrier",
    "send": "send",
    "recv_anysource": "recv_any_source_",
    # One operator under the name that torch 2.11 calls and under that of 2.13.
    **dict.fromkeys(("_allgather_base", "all_gather_single"), "_allgather_base_"),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), "_reduce_scatter_base_"),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), "alltoall_base_"),
    **dict.fromkeys(
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), "allgather_into_tensor_coalesced_"
    ),
    **dict.fromkeys(
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), "reduce_scatter_tensor_coalesced_"
    ),
}
"""torch's operators, by the methods of a group that issue them; of those that this torch has."""
_START, _END = "_start_coalescing", "_end_coalescing"
_TRACES = "rl_safe_workers.comms.trace"
"""Where a thread keeps its traces, the outermost first; torch lends this to the threads of its backward passes."""


class _Batches(threading.local):
    """The operations that a thread has begun to coalesce."""

    def __init__(self) -> None:
        self.last: dict[dist.ProcessGroup, str] = {}
        """The last operation by group, ``""`` if there is none yet."""


class CollectiveTrace:
    """While it is entered, passes every collective of this thread and of its backward passes through a function.

    Traces nest; the innermost is asked first. What its function issues itself is seen by the outer ones alone.
    """

    def __init__(self, issue: Callable[[dist.ProcessGroup, str, Callable[[], Any]], Any]) -> None:
        """Records the function.

        Args:
            issue: Called with the group, the operator's name, and what issues it, whose value it must return.
        """
        self._issue = issue
        self._batches = _Batches()

    def __enter__(self) -> Self:
        """Begins."""
        _methods.replace()
        _keep((*_traces(), self))
        return self

    def __exit__(self, *raised: object) -> None:
        """Ends, in the thread that has begun it; traces that were begun inside this one must have ended."""
        _keep(_traces()[:-1])
        _methods.restore()

    def see(self, group: dist.ProcessGroup, method: str, call: Callable[[], Any]) -> Any:
        """Passes on what a method of a group does."""
        last = self._batches.last
        if method == _START:
            value = call()
            last[group] = ""
            return value
        if method == _END:
            operation = last.pop(group, "")
            return self._issue(group, operation, call) if operation else call()
        operation = OPERATORS[method]
        if method in ("send", "recv", "recv_anysource") and (group in last or _in_batch()):
            operation = BATCH
        if group in last:
            last[group] = operation
        return self._issue(group, operation, call)


class _Methods:
    """The methods of torch's groups, which are replaced while there is a trace in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces = 0
        self._replaced: dict[str, tuple[Any, Any]] = {}
        """torch's own, and what is in its place."""

    def replace(self) -> None:
        """Counts one trace more."""
        with self._lock:
            if not self._traces:
                own = vars(dist.ProcessGroup)
                for name in (*OPERATORS, _START, _END):
                    if name in own:
                        self._replaced[name] = own[name], _asking(name, getattr(dist.ProcessGroup, name))
                        setattr(dist.ProcessGroup, name, self._replaced[name][1])
            self._traces += 1

    def restore(self) -> None:
        """Counts one trace less."""
        with self._lock:
            self._traces -= 1
            if not self._traces:
                for name, (before, put) in self._replaced.items():
                    # What others have put there since is theirs; ours, inside it, passes everything on.
                    if vars(dist.ProcessGroup)[name] is put:
                        setattr(dist.ProcessGroup, name, before)
                self._replaced.clear()


_methods = _Methods()


def _asking(name: str, torch_method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method that passes one of torch's through the traces of its thread."""

    def issue(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return torch_method(group, *args, **kwargs)

    # For a class of Python's that leaves the method to torch, this would be called again in place of torch's, were it
    # not for pybind11, which takes a caller of the method's own name, on the same group, for the method itself.
    issue.__code__ = issue.__code__.replace(co_name=name)

    @functools.wraps(torch_method)
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return _pass(_traces(), group, name, lambda: issue(group, *args, **kwargs))

    # Else Dynamo would compile the trace, where it has compiled the caller up to a collective.
    disabled: Callable[..., Any] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
    return disabled


def _pass(traces: tuple[CollectiveTrace, ...], group: dist.ProcessGroup, method: str, call: Callable[[], Any]) -> Any:
    """Passes a call through traces, the innermost first; each while there are only those outside it."""
    if not traces:
        return call()
    *_, trace = traces
    with _only(outer := traces[:-1]):
        return trace.see(group, method, lambda: _pass(outer, group, method, call))


@contextmanager
def _only(traces: tuple[CollectiveTrace, ...]) -> Iterator[None]:
    before = _traces()
    _keep(traces)
    try:
        yield
    finally:
        _keep(before)


def _traces() -> tuple[CollectiveTrace, ...]:
    return torch._C._get_obj_in_tls(_TRACES) if torch._C._is_key_in_tls(_TRACES) else ()


def _keep(traces: tuple[CollectiveTrace, ...]) -> None:
    # torch 2.11 cannot remove it; what a thread still keeps takes the GIL when it ends.
    remove = getattr(torch._C, "_remove_obj_from_tls", None)
    if traces or remove is None:
        if _stash_takes_no_reference():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(traces))
        torch._C._stash_obj_in_tls(_TRACES, traces)
    elif torch._C._is_key_in_tls(_TRACES):
        remove(_TRACES)


@functools.cache
def _stash_takes_no_reference() -> bool:
    """Returns True if torch keeps an object without counting itself in, and yet counts itself out in the end.

    torch 2.11 does, 2.13 does not; with 2.11 the object is gone, and another in its place, once its caller lets go.
    """
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_TRACES, probe)  # until the caller puts its own there
    if sys.getrefcount(probe) > before:
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return True


def _in_batch() -> bool:
    """Returns True if torch's function issues a batch: gloo does not coalesce, so nothing else tells."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_name == BATCH:
            return True
    return False
