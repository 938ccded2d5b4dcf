"""Traces every collective that this process really issues, with its group.

Every function of ``torch.distributed``, under whichever name a library has imported it, issues its collective through a
method of ``dist.ProcessGroup``. While any thread traces, this module replaces these methods. Each replacement checks
whether its own thread traces. A dispatch mode would see more, but Dynamo compiles nothing under one, and never retries
a function that it has refused.

The trace sees collectives of the tracing thread and of its backward passes, to whose threads torch lends the thread's
state. It does not see other threads, which may connect or send weights meanwhile. For a Python subclass of a group, it
sees the call to the inner plain group, as with `ReleasableGroup`. NCCL starts the operations of a batch only at the end
of the batch. So the trace passes the end of a batch on, too, under the name of the batch's last operation.

The trace does not see collectives that C++ issues on a plain group. These are functional collectives (also those that
``torch.compile`` makes from ``torch.distributed`` calls), and the reductions of
``torch.nn.parallel.DistributedDataParallel``. On a `ReleasableGroup` these calls return to Python, so the trace sees
them. It never sees direct calls of ``torch.ops.c10d``.
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
"""Name of a send or a receive that is part of a batch: the name of torch's function for batches."""
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
"""Op class by the beginning of the operator's name."""


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
    # The same operator: its method in torch 2.11, and its method in 2.13.
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
"""torch's operators by the methods of a group that issue them, as far as the installed torch has them."""
_START, _END = "_start_coalescing", "_end_coalescing"
_TRACES = "rl_safe_workers.comms.trace"
"""Key of a thread's traces, the outermost first. torch passes them on to the threads of its backward passes."""


class _Batches(threading.local):
    """The batches that a thread has begun to coalesce."""

    def __init__(self) -> None:
        self.last: dict[dist.ProcessGroup, str] = {}
        """The last operation by group, ``""`` if there is none yet."""


class CollectiveTrace:
    """Passes every collective of this thread and of its backward passes through a function, while it is entered.

    Traces nest; the innermost comes first. Only the outer traces see collectives that its function issues itself.
    """

    def __init__(self, issue: Callable[[dist.ProcessGroup, str, Callable[[], Any]], Any]) -> None:
        """Stores the function.

        Args:
            issue: Called with the group, the operator's name, and a function that issues the collective. It must return
                that function's value.
        """
        self._issue = issue
        self._batches = _Batches()

    def __enter__(self) -> Self:
        """Begins the trace in this thread."""
        _methods.replace()
        _keep((*_traces(), self))
        return self

    def __exit__(self, *raised: object) -> None:
        """Ends the trace, in the thread that began it. Traces inside it must have ended before."""
        _keep(_traces()[:-1])
        _methods.restore()

    def see(self, group: dist.ProcessGroup, method: str, call: Callable[[], Any]) -> Any:
        """Passes a call of a group's method through the trace's function."""
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
    """Replaces the methods of torch's groups while any thread has a trace."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces = 0
        self._replaced: dict[str, tuple[Any, Any]] = {}
        """torch's method and its replacement, by name."""

    def replace(self) -> None:
        """Counts a new trace; replaces the methods for the first one."""
        with self._lock:
            if not self._traces:
                own = vars(dist.ProcessGroup)
                for name in (*OPERATORS, _START, _END):
                    if name in own:
                        self._replaced[name] = own[name], _asking(name, getattr(dist.ProcessGroup, name))
                        setattr(dist.ProcessGroup, name, self._replaced[name][1])
            self._traces += 1

    def restore(self) -> None:
        """Counts the end of a trace; restores torch's methods after the last one."""
        with self._lock:
            self._traces -= 1
            if not self._traces:
                for name, (before, put) in self._replaced.items():
                    # Leave a replacement that another program has made since. Inside it, ours passes calls on.
                    if vars(dist.ProcessGroup)[name] is put:
                        setattr(dist.ProcessGroup, name, before)
                self._replaced.clear()


_methods = _Methods()


def _asking(name: str, torch_method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for one of torch's methods, which passes calls through the traces of its thread."""

    def issue(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return torch_method(group, *args, **kwargs)

    # A Python subclass of a group may not define this method. torch's method would then find the replacement as the
    # subclass's override and call it again. The shared name prevents that: pybind11 takes a caller of the same name, on
    # the same group, for the override itself.
    issue.__code__ = issue.__code__.replace(co_name=name)

    @functools.wraps(torch_method)
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return _pass(_traces(), group, name, lambda: issue(group, *args, **kwargs))

    # Dynamo must not compile the trace when it has compiled the caller up to a collective.
    disabled: Callable[..., Any] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
    return disabled


def _pass(traces: tuple[CollectiveTrace, ...], group: dist.ProcessGroup, method: str, call: Callable[[], Any]) -> Any:
    """Passes a call through traces, the innermost first. While a trace runs, only those outside it are active."""
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
    # torch 2.11 has no function for the removal. A thread that still has an object takes the GIL when it ends.
    remove = getattr(torch._C, "_remove_obj_from_tls", None)
    if traces or remove is None:
        if _stash_takes_no_reference():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(traces))
        torch._C._stash_obj_in_tls(_TRACES, traces)
    elif torch._C._is_key_in_tls(_TRACES):
        remove(_TRACES)


@functools.cache
def _stash_takes_no_reference() -> bool:
    """Returns True if torch stores an object without a reference, but releases a reference in the end.

    torch 2.11 does this, 2.13 does not. With 2.11, the object's memory may belong to another object once the caller has
    dropped its reference.
    """
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_TRACES, probe)  # until the caller stores its own object
    if sys.getrefcount(probe) > before:
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return True


def _in_batch() -> bool:
    """Returns True if torch's batch function is on the stack. Gloo does not coalesce, so there is no other sign."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_name == BATCH:
            return True
    return False
