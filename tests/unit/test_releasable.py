"""A releasable group answers everything that torch asks a group: by its inner group, itself, or by a refusal."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.comms import channel, release
from rl_safe_workers.comms.releasable import FORWARDED, GroupState, ReleasableGroup, register_backend
from rl_safe_workers.errors import CommunicatorError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TIMEOUT = timedelta(seconds=20)
UNSUPPORTED = ("split_group", "merge_remote_group", "monitored_barrier", "_register_backend", "_wait_for_pending_works")


def make_group(backend: str = "gloo", *, options: Any = None) -> ReleasableGroup:
    """A group of one, made as torch makes it."""
    base = c10d._DistributedBackendOptions()
    base.store, base.group_rank, base.group_size = HashStore(), 0, 1
    base.timeout, base.group_id, base.global_ranks_in_group = TIMEOUT, "7", [0]
    group = ReleasableGroup(backend, base, options)
    group._set_group_name("7")
    group._set_group_desc("TENSOR_MODEL_PARALLEL_GROUP")
    return group


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReleasableGroup]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group = make_group()
    yield group
    group.shutdown()


class Recorder:
    """Stands for an inner group and its backend: records what it is asked."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def record(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append(name)
            return self

        return record


def test_everything_that_torchs_groups_can_do_is_answered_by_this_class() -> None:
    can = {name for name in dir(dist.ProcessGroup) if callable(getattr(dist.ProcessGroup, name))}
    left_to_torch = {name for name in can if not name.startswith("__") and name not in vars(ReleasableGroup)}
    assert left_to_torch == {
        *("rank", "size", "name", "boxed", "unbox", "BackendType", "_pybind11_conduit_v1_"),
        *("_id", "_backend_id", "_get_backend_name"),
    }


@pytest.mark.parametrize("op", sorted(name for name in FORWARDED if hasattr(dist.ProcessGroup, name)))
def test_every_collective_goes_to_the_inner_group_under_its_own_name(group, op) -> None:
    group.channels["cpu"].inner = recorder = Recorder()
    getattr(group, op)([torch.zeros(1)])
    assert recorder.calls == [op]


@pytest.mark.parametrize("op", UNSUPPORTED)
def test_what_it_does_not_have_is_refused_by_name(group, op) -> None:
    with pytest.raises(
        CommunicatorError, match=rf"^{op} on group TENSOR_MODEL_PARALLEL_GROUP \[0\]: .* use a plain one"
    ):
        getattr(group, op)([0])


def test_tensors_of_another_device_are_refused(group) -> None:
    with pytest.raises(CommunicatorError, match="allreduce on group .*: it carries cpu tensors, not meta"):
        group.allreduce([torch.zeros(1, device="meta")])


def test_it_is_told_apart_by_name_and_description_in_every_generation(group) -> None:
    for generation in (1, 2):
        inner = group.channels["cpu"].inner
        assert (inner.group_name, inner.group_desc) == (group.group_name, group.group_desc)
        assert (group.group_name, group.group_desc, group.name()) == (
            "7",
            "TENSOR_MODEL_PARALLEL_GROUP",
            "rl_safe_gloo",
        )
        group.detach().shutdown()
        group.reconnect(generation, bound=TIMEOUT)


def test_its_states_follow_from_each_other_and_closed_is_the_last(group) -> None:
    states = [group.state]
    group.detach().shutdown()
    states.append(group.state)
    assert group.detach() is None
    group.reconnect(1, bound=TIMEOUT)
    states.append(group.state)
    group.shutdown()
    group.abort()
    states.append(group.state)
    assert group.detach() is None
    assert states == [GroupState.CONNECTED, GroupState.RELEASED, GroupState.CONNECTED, GroupState.CLOSED]
    with pytest.raises(CommunicatorError, match="is closed and cannot be rebuilt"):
        group.reconnect(2, bound=TIMEOUT)


@pytest.mark.parametrize("ask", [lambda view: view.set_timeout, lambda view: view._set_default_timeout])
def test_a_timeout_reaches_this_generation_and_the_next(group, ask) -> None:
    view, seconds = group._get_backend(CPU), iter((3, 4))
    assert isinstance(view, dist.ProcessGroupGloo)
    ask(view)(timedelta(seconds=next(seconds)))
    assert view.options._timeout == timedelta(seconds=3)
    group.detach().shutdown()
    ask(view)(timedelta(seconds=next(seconds)))
    group.reconnect(1, bound=TIMEOUT)
    assert group._get_backend(CPU).options._timeout == timedelta(seconds=4)


def test_torch_sets_timeouts_in_every_state_without_a_warning(group, monkeypatch) -> None:
    monkeypatch.setattr(c10d, "_rank_not_in_group", lambda group: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for end in (lambda: None, group.detach, group.shutdown):
            end()
            c10d._set_pg_timeout(TIMEOUT, group)


def test_a_limit_lasts_for_a_while_and_a_timeout_for_good(group) -> None:
    view = group._get_backend(CPU)
    group.limit(timedelta(seconds=2))
    assert (view.options._timeout, group.timeout) == (timedelta(seconds=2), TIMEOUT)
    group.limit(timedelta(days=1))
    assert view.options._timeout == TIMEOUT
    group.limit(None)
    assert view.options._timeout == TIMEOUT


def test_the_backend_of_a_released_group_says_that_there_is_none(group) -> None:
    view = group._get_backend(CPU)
    assert view.rank() == 0
    group.detach().shutdown()
    view._group_start(), view._group_end()
    with pytest.raises(CommunicatorError, match="supports_coalescing of a gloo backend: it is released"):
        _ = view.supports_coalescing
    with pytest.raises(RuntimeError, match="No backend type associated with device type cuda"):
        group._get_backend(CUDA)


def test_a_batch_is_given_to_the_inner_group_as_one(group, monkeypatch) -> None:
    # torch itself batches only if the type of a group is ProcessGroup, and would send these one by one.
    register_backend("gloo")
    monkeypatch.setitem(c10d._world.pg_map, group, ("rl_safe_gloo", None))
    monkeypatch.setitem(c10d._world.pg_group_ranks, group, {0: 0})
    group.channels["cpu"].inner = group.channels["cpu"]._live = recorder = Recorder()
    ops = [dist.P2POp(op, torch.zeros(1), group=group, group_peer=0) for op in (dist.isend, dist.irecv)]
    assert len(dist.batch_isend_irecv(ops)) == 1
    assert recorder.calls == ["_start_coalescing", "send", "recv", "_end_coalescing"]


def test_registering_twice_changes_nothing_the_second_time() -> None:
    # miles#545: patched twice, every call went through two copies.
    assert register_backend("gloo") == "rl_safe_gloo"
    once = dist.batch_isend_irecv
    assert register_backend("gloo") == "rl_safe_gloo"
    assert dist.batch_isend_irecv is c10d.batch_isend_irecv is once
    assert not hasattr(once.__wrapped__, "batches_releasable_groups")
    assert dist.Backend.backend_capability["rl_safe_gloo"] == ["cpu"]


def test_only_gloo_and_nccl_can_be_released() -> None:
    with pytest.raises(CommunicatorError, match="backend mpi: only gloo and nccl groups can be released"):
        register_backend("mpi")


def test_groups_that_look_alike_are_each_shut_down(group, monkeypatch) -> None:
    twin = make_group()
    recorders = [Recorder(), Recorder()]
    for one, recorder in zip((group, twin), recorders, strict=True):
        monkeypatch.setattr(one.channels["cpu"], "_live", recorder)
    assert release._drop([group, twin], "rebuild()", TIMEOUT) is None
    assert [recorder.calls for recorder in recorders] == [["shutdown"]] * 2


class Nccl(dist.ProcessGroupGloo):
    """NCCL's place on a machine without a GPU."""

    class Options:
        """As NCCL's."""

        max_ctas = 0


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ReleasableGroup, list[Any]]]:
    """A group for GPUs, and the options of each NCCL backend that was made for it."""
    made: list[Any] = []

    def connect(store: Any, rank: int, size: int, timeout: timedelta, options: Any) -> Nccl:
        made.append(options)
        return Nccl(store, rank, size, timeout=timeout)

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(channel, "_connect_nccl", connect)
    options = Nccl.Options()
    options.max_ctas = 4
    group = make_group("nccl", options=options)
    yield group, made
    group.shutdown()


def test_on_gpus_cpu_tensors_stay_on_gloo_while_the_device_part_is_released(nccl) -> None:
    group, _ = nccl
    assert {device.type for device in group._device_types} == {"cpu", "cuda"}
    assert c10d._get_object_coll_device(group) == "cpu"
    assert isinstance(group._get_backend(CUDA), Nccl)
    kept = group.channels["cpu"].inner
    group.detach().shutdown()
    group.allreduce([torch.zeros(1)]).wait()
    options = dist.BarrierOptions()
    options.device = CPU
    group.barrier(opts=options).wait()
    options.device = torch.device("cuda", 0)
    with pytest.raises(CommunicatorError, match="barrier on group .* were released"):
        group.barrier(opts=options)
    assert group.channels["cpu"].inner is kept


def test_on_gpus_every_generation_has_the_options_of_the_first(nccl) -> None:
    group, made = nccl
    for generation in (1, 2):
        group.detach().shutdown()
        group.reconnect(generation, bound=TIMEOUT)
    assert [options.max_ctas for options in made] == [4, 4, 4]
    assert {options.group_name for options in made} == {"7"}


def test_aborting_a_group_aborts_all_of_it(nccl) -> None:
    group, _ = nccl
    group.abort()
    for device in (CPU, torch.device("cuda")):
        assert group.channels[device.type].inner is None
