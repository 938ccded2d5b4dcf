"""A trace sees what this thread and its backward passes issue, and leaves torch and torch.compile as they were."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import batch_isend_irecv as bound_early
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from rl_safe_workers.comms.late import LateWatch
from rl_safe_workers.comms.releasable import FORWARDED, register_backend
from rl_safe_workers.comms.trace import BATCH, OPERATORS, CollectiveTrace
from rl_safe_workers.errors import first_line
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.ranks import run_ranks, values
from tests.distributed.recording import Collective, recorded_collectives

PATIENCE = timedelta(seconds=30)
BACKENDS = ["gloo", "rl_safe_gloo"]
REENTRANT = 100
"""Backward passes inside each other; after 60, torch's engine takes another thread."""


def _connect(rank: int, address: StoreAddress, *, size: int = 1, backend: str = "gloo") -> None:
    register_backend("gloo")
    dist.init_process_group(backend, store=connect_store(address, timeout=PATIENCE), rank=rank, world_size=size)


def _methods() -> dict[str, Any]:
    """The attributes of torch's groups as the class has them, and what issues batches."""
    functions = {"batch_isend_irecv": c10d.batch_isend_irecv, "dist.batch_isend_irecv": dist.batch_isend_irecv}
    return dict(vars(dist.ProcessGroup)) | functions


def _changed(before: dict[str, Any]) -> set[str]:
    now = _methods()
    return {name for name in before.keys() | now.keys() if before.get(name) is not now.get(name)}


def _ops(collectives: list[Collective]) -> list[str]:
    return [collective.op for collective in collectives]


class Compiler:
    """A backend of torch.compile that needs no C++ compiler, and counts."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        self.compiled += 1
        return module.forward


def _compile_under_a_watch(rank: int, address: StoreAddress, backend: str, *, around: bool) -> dict[str, Any]:
    os.environ.pop("TORCHDYNAMO_DISABLE", None)  # which the ranks of other tests have
    _connect(rank, address, backend=backend)
    compiler, ran_eagerly = Compiler(), []
    watch = LateWatch({})

    def fused(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            ran_eagerly.append(1)
        return torch.relu(x) * 2

    def around_a_collective(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        dist.broadcast(y, 0)
        return y * 3

    compiled = torch.compile(around_a_collective if around else fused, backend=compiler)
    one, counts = torch.ones(2, 2), []
    with recorded_collectives() as seen, watch.watching("train"):
        for _ in range(2):
            compiled(one)
            counts.append(compiler.compiled)
    for _ in range(2):
        compiled(one)
        counts.append(compiler.compiled)
    frames = torch._dynamo.utils.counters["frames"]["total"]
    return {"counts": counts, "ran_eagerly": len(ran_eagerly), "seen": _ops(seen), "frames": frames}


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_first_called_under_a_watch_is_compiled_then_and_stays_so(backend: str, address: StoreAddress) -> None:
    (found,) = values(run_ranks(partial(_compile_under_a_watch, around=False), 1, address, backend))
    assert found["counts"] == [1] * 4
    assert found["ran_eagerly"] == 0


@pytest.mark.parametrize(("backend", "frames"), [("gloo", 2), ("rl_safe_gloo", 3)])
def test_what_is_compiled_around_a_collective_is_so_under_a_watch_which_sees_it(
    backend: str, frames: int, address: StoreAddress
) -> None:
    (found,) = values(run_ranks(partial(_compile_under_a_watch, around=True), 1, address, backend))
    # One graph before the collective and one after it, and none of the trace itself. Of a group that Python extends
    # Dynamo also takes up a frame that gives no graph.
    assert found["counts"] == [2] * 4
    assert found["frames"] == frames
    assert found["seen"] == ["broadcast_"] * 2


def _do_nothing(group: dist.ProcessGroup, operation: str, call: Callable[[], Any]) -> Any:
    return call()


def _trace_and_fail() -> None:
    with CollectiveTrace(_do_nothing):
        raise KeyError("the body")


def test_the_methods_of_groups_are_torchs_own_after_a_trace() -> None:
    before = _methods()
    trace = CollectiveTrace(_do_nothing)
    assert _changed(before) == set()
    with trace:
        coalescing = {"_start_coalescing", "_end_coalescing"}
        assert _changed(before) == (OPERATORS.keys() | coalescing) & vars(dist.ProcessGroup).keys()
    assert _changed(before) == set()


def test_the_methods_of_groups_are_torchs_own_after_an_exception() -> None:
    before = _methods()
    with pytest.raises(KeyError, match="the body"):
        _trace_and_fail()
    assert _changed(before) == set()


def test_the_methods_of_groups_are_torchs_own_after_nested_traces() -> None:
    before = _methods()
    with CollectiveTrace(_do_nothing):
        replaced = _methods()
        with CollectiveTrace(_do_nothing):
            assert _changed(replaced) == set()
        assert _changed(replaced) == set()
        with pytest.raises(KeyError, match="the body"):
            _trace_and_fail()
        assert _changed(replaced) == set()
    assert _changed(before) == set()


def test_the_methods_of_groups_are_torchs_own_after_traces_that_overlap_in_two_threads() -> None:
    before, begun, may_end = _methods(), threading.Event(), threading.Event()

    def trace() -> None:
        with CollectiveTrace(_do_nothing):
            begun.set()
            may_end.wait()

    other = threading.Thread(target=trace, daemon=True)
    with CollectiveTrace(_do_nothing):
        replaced = _methods()
        other.start()
        begun.wait()
    assert _changed(replaced) == set()
    may_end.set()
    other.join()
    assert _changed(before) == set()


def test_what_others_have_put_on_groups_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _methods()

    def theirs(*_: Any) -> None:
        """Somebody else's."""

    with CollectiveTrace(_do_nothing), monkeypatch.context() as put:
        put.setattr(dist.ProcessGroup, "allreduce", theirs)
    assert _changed(before) == set()
    with monkeypatch.context() as put:
        with CollectiveTrace(_do_nothing):
            put.setattr(dist.ProcessGroup, "allreduce", theirs)
        assert _changed(before) == {"allreduce"}
        dist.ProcessGroup.allreduce = before["allreduce"]  # type: ignore[method-assign]


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch cannot remove it")
def test_a_thread_keeps_nothing_once_its_traces_have_ended() -> None:
    key = "rl_safe_workers.comms.trace"
    with CollectiveTrace(_do_nothing), CollectiveTrace(_do_nothing):
        assert torch._C._is_key_in_tls(key)
    assert not torch._C._is_key_in_tls(key)


def test_no_operator_of_torch_is_without_a_method() -> None:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")]
    on_groups = {schema.name.removeprefix("c10d::") for schema in schemas if "c10d.ProcessGroup" in str(schema)}
    assert on_groups == set(OPERATORS.values())
    assert OPERATORS.keys() >= FORWARDED


def _batch_and_send(rank: int, address: StoreAddress, backend: str) -> dict[str, list[str]]:
    _connect(rank, address, size=2, backend=backend)
    peer, one, other = 1 - rank, torch.ones(1), torch.zeros(1)
    seen = {}
    for name, batch in {"now": lambda ops: dist.batch_isend_irecv(ops), "bound_early": bound_early}.items():
        with recorded_collectives() as found:
            for work in batch([dist.P2POp(dist.isend, one, peer), dist.P2POp(dist.irecv, other, peer)]):
                work.wait()
        seen[name] = _ops(found)
    with recorded_collectives() as found:
        for work in [dist.isend(one, peer), dist.irecv(other, peer)]:
            work.wait()
    seen["single"] = _ops(found)
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_is_told_from_single_sends_under_whatever_name(backend: str, address: StoreAddress) -> None:
    for seen in values(run_ranks(_batch_and_send, 2, address, backend)):
        assert seen == {"now": [BATCH] * 2, "bound_early": [BATCH] * 2, "single": ["send", "recv_"]}


def test_the_end_of_a_batch_is_seen_with_the_name_of_what_was_issued_last(monkeypatch: pytest.MonkeyPatch) -> None:
    issued: list[str] = []
    for name in ("_start_coalescing", "_end_coalescing", "send", "recv", "allreduce"):
        monkeypatch.setattr(dist.ProcessGroup, name, lambda group, name=name: issued.append(name))
    seen: list[tuple[Any, str]] = []

    def issue(group: dist.ProcessGroup, operation: str, call: Callable[[], Any]) -> Any:
        seen.append((group, operation))
        return call()

    group: Any = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]
    other: Any = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]
    with CollectiveTrace(issue):
        group._start_coalescing()
        group.send()
        other.send()
        group._end_coalescing()
        group.recv()
        group._start_coalescing()
        group.allreduce()
        group._end_coalescing()
        group._start_coalescing()
        group._end_coalescing()
    assert seen == [
        (group, BATCH),
        (other, "send"),
        (group, BATCH),
        (group, "recv_"),
        (group, "allreduce_"),
        (group, "allreduce_"),
    ]
    assert issued.count("_start_coalescing") == issued.count("_end_coalescing") == 3


class _Reduced(torch.autograd.Function):
    """A collective in a backward pass that is inside ``depth`` others."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, threads: set[int]) -> torch.Tensor:
        ctx.depth, ctx.threads = depth, threads
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.depth:
            with torch.enable_grad():
                _Reduced.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.threads).backward()
        else:
            ctx.threads.add(threading.get_ident())
            dist.all_reduce(grad)
        return grad, None, None


def _issue_in_threads(rank: int, address: StoreAddress, backend: str) -> dict[str, Any]:
    _connect(rank, address, backend=backend)
    one, backward_threads = torch.ones(1), set()
    other: list[list[str]] = []

    def gather_elsewhere(*, traced: bool) -> None:
        def gather() -> None:
            if not traced:
                dist.all_gather([torch.ones(1)], one)
                return
            with recorded_collectives() as collectives:
                dist.all_gather([torch.ones(1)], one)
            other.append(_ops(collectives))

        thread = threading.Thread(target=gather)
        thread.start()
        thread.join()

    with recorded_collectives() as seen:
        gather_elsewhere(traced=False)
        gather_elsewhere(traced=True)
        nothing = _ops(seen)
        _Reduced.apply(torch.ones(1, requires_grad=True), REENTRANT, backward_threads).backward()
    gather_elsewhere(traced=False)
    return {
        "nothing": nothing,
        "other": other,
        "seen": _ops(seen),
        "backward_elsewhere": backward_threads.isdisjoint({threading.get_ident()}),
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_this_threads_collectives_are_seen_and_those_of_its_backward(backend: str, address: StoreAddress) -> None:
    (found,) = values(run_ranks(_issue_in_threads, 1, address, backend))
    assert found["nothing"] == []
    assert found["other"] == [["allgather_"]]
    assert found["backward_elsewhere"]
    assert found["seen"] == ["allreduce_"]


def _nest(rank: int, address: StoreAddress) -> list[tuple[str, str]]:
    _connect(rank, address)
    one, seen = torch.ones(1), []

    def outer(group: dist.ProcessGroup, operation: str, call: Callable[[], Any]) -> Any:
        seen.append(("outer", operation))
        return call()

    def inner(group: dist.ProcessGroup, operation: str, call: Callable[[], Any]) -> Any:
        seen.append(("inner", operation))
        dist.barrier()
        return call()

    with CollectiveTrace(outer):
        with CollectiveTrace(inner):
            dist.all_reduce(one)
            with pytest.raises(RuntimeError):
                dist.group.WORLD.send([one, one], 0, 0)
        dist.broadcast(one, 0)
    dist.all_reduce(one)
    return seen


def test_nested_traces_are_asked_from_the_inside_and_see_what_the_inner_ones_issue(address: StoreAddress) -> None:
    (seen,) = values(run_ranks(_nest, 1, address))
    assert seen == [
        ("inner", "allreduce_"),
        ("outer", "barrier"),
        ("outer", "allreduce_"),
        ("inner", "send"),
        ("outer", "barrier"),
        ("outer", "send"),
        ("outer", "broadcast_"),
    ]


class _LeftToTorch(dist.ProcessGroup):
    """A group of Python's that has no methods of its own."""


def _error_of(group: Any) -> str:
    with pytest.raises(RuntimeError) as raised:
        group.allreduce([torch.ones(1)])
    return first_line(raised.value)


def test_a_group_of_pythons_that_leaves_a_method_to_torch_gets_torchs_answer() -> None:
    with CollectiveTrace(_do_nothing):  # first, for torch remembers which methods a class leaves to it
        traced = _error_of(_LeftToTorch(0, 1))  # type: ignore[call-arg]
    untraced = _error_of(_LeftToTorch(0, 1))  # type: ignore[call-arg]
    assert traced == untraced
    assert "No backend" in untraced


def _issue_from_cpp(rank: int, address: StoreAddress) -> dict[str, list[str]]:
    _connect(rank, address, backend="rl_safe_gloo")
    one, seen = torch.ones(2), {}
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    for name, call in {
        "functional": lambda: functional.all_reduce(one, "sum", dist.group.WORLD).wait(),
        "backward": lambda: model(one).sum().backward(),
    }.items():
        with recorded_collectives() as collectives:
            call()
        seen[name] = _ops(collectives)
    return seen


def test_what_cpp_issues_is_seen_on_a_group_that_can_be_released(address: StoreAddress) -> None:
    (seen,) = values(run_ranks(_issue_from_cpp, 1, address))
    assert seen == {"functional": ["allreduce_"], "backward": ["allreduce_"]}
