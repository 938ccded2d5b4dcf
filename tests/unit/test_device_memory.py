"""Device memory by owner: what is booked to whom, and what Megatron's state adds up to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_safe_workers.lifecycle import Lifecycle, Phase
from rl_safe_workers.platforms.device_memory import (
    DeviceMemory,
    allocated_bytes,
    make_room,
    megatron_owned,
    reserved_bytes,
)
from rl_safe_workers.ranks import Role

DEVICE = torch.device("cuda")
OUTSIDE = ("communicators", "context", "other")


class FakeProbe:
    """A device whose numbers a test sets; what is neither torch's nor another process's is ``outside``."""

    def __init__(self) -> None:
        self.torch_reserved = self.torch_allocated = self.outside = self.others = 0
        self.unmapped = 0

    def used(self) -> int:
        return self.torch_reserved - self.unmapped + self.outside + self.others

    def total(self) -> int:
        return 1_000_000

    def reserved(self) -> int:
        return self.torch_reserved

    def allocated(self) -> int:
        return self.torch_allocated


@pytest.fixture
def probe() -> FakeProbe:
    return FakeProbe()


@pytest.fixture
def memory(probe: FakeProbe) -> DeviceMemory:
    return DeviceMemory(DEVICE, dict, probe=probe)


def grow(memory: DeviceMemory, probe: FakeProbe, phase: Phase, size: int) -> dict[str, int]:
    """Passes through a phase in which memory outside torch grows; returns the non-zero accounts outside torch."""
    memory.begin(phase)
    probe.outside += size
    held = memory.end(phase)
    return {owner: held[owner] for owner in OUTSIDE if held[owner]}


@pytest.mark.parametrize(
    ("owner", "phases"),
    [
        ("context", {Phase.START, Phase.WORLD}),
        ("communicators", {Phase.GROUPS, Phase.BOOTSTRAP, Phase.JOINT, Phase.SYNC, Phase.TEARDOWN}),
        ("other", {Phase.CONVERT, Phase.LOAD, Phase.ROLLOUT, Phase.LOGPROB, Phase.TRAIN, Phase.SAVE}),
    ],
)
def test_growth_outside_torch_is_booked_by_phase(memory, probe, owner: str, phases: set[Phase]) -> None:
    for number, phase in enumerate(sorted(phases), start=1):
        assert grow(memory, probe, phase, 10) == {owner: 10 * number}


def test_a_closed_communicator_is_taken_off_its_owners_account(memory, probe) -> None:
    grow(memory, probe, Phase.START, 500)
    grow(memory, probe, Phase.BOOTSTRAP, 300)
    assert grow(memory, probe, Phase.GROUPS, -100) == {"context": 500, "communicators": 200}


def test_no_account_is_shown_negative_but_its_debt_is_kept(memory, probe) -> None:
    assert grow(memory, probe, Phase.TRAIN, -5) == {}
    assert grow(memory, probe, Phase.TRAIN, 15) == {"other": 10}


def test_what_another_process_does_between_two_phases_is_not_booked(memory, probe) -> None:
    probe.others = 7000
    grow(memory, probe, Phase.BOOTSTRAP, 300)
    probe.others = 90
    assert grow(memory, probe, Phase.TRAIN, 5) == {"communicators": 300, "other": 5}


def test_growth_in_a_phase_shared_with_another_process_is_booked_to_no_one(probe) -> None:
    memory = DeviceMemory(DEVICE, dict, shared={Phase.SYNC}, probe=probe)
    assert grow(memory, probe, Phase.SYNC, 5000) == {}
    assert grow(memory, probe, Phase.JOINT, 300) == {"communicators": 300}


def test_memory_is_not_read_before_a_phase_whose_growth_does_not_count(probe, monkeypatch) -> None:
    memory = DeviceMemory(DEVICE, dict, shared={Phase.SYNC}, probe=probe)
    monkeypatch.setattr(probe, "used", lambda: pytest.fail("it was read"))
    memory.begin(Phase.SYNC)


def test_torchs_statistics_before_and_after_the_first_use_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: statistics)
    assert (reserved_bytes(DEVICE), allocated_bytes(DEVICE)) == (0, 0)
    statistics |= {"reserved_bytes": {"all": {"current": 5}}, "allocated_bytes": {"all": {"current": 3}}}
    assert (reserved_bytes(DEVICE), allocated_bytes(DEVICE)) == (5, 3)


def test_owners_are_not_asked_again_after_a_phase_that_moves_nothing(probe) -> None:
    asked = iter([{"weights": 1}, {"weights": 2}])
    memory = DeviceMemory(DEVICE, lambda: next(asked), unmoved={Phase.SYNC}, probe=probe)
    found = [memory.end(phase)["weights"] for phase in (Phase.SYNC, Phase.SYNC, Phase.TRAIN, Phase.SYNC)]
    assert found == [1, 1, 2, 2]


@pytest.mark.parametrize(("free", "emptied"), [(99, 1), (100, 0)])
def test_torchs_cache_is_emptied_only_if_too_little_is_free(
    free: int, emptied: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    with caplog.at_level("INFO", logger="rl_safe_workers.platforms.device_memory"):
        make_room(DEVICE, 100, "the communicators")
        make_room(torch.device("cpu"), 100, "the communicators")
    assert len(calls) == len(caplog.records) == emptied


def test_growth_of_torchs_own_memory_is_not_booked_outside(memory, probe) -> None:
    memory.begin(Phase.TRAIN)
    probe.torch_reserved = 4000
    assert memory.end(Phase.TRAIN)["other"] == 0


def test_what_torch_holds_beyond_the_named_is_activations_and_cache(probe) -> None:
    memory = DeviceMemory(DEVICE, lambda: {"weights": 100, "optimizer": 200}, probe=probe)
    probe.torch_allocated, probe.torch_reserved, probe.outside = 350, 500, 40
    memory.begin(Phase.TRAIN)
    assert memory.end(Phase.TRAIN) == {
        "weights": 100,
        "optimizer": 200,
        "activations": 50,
        "cache": 150,
        "communicators": 0,
        "context": 0,
        "other": 0,
        "free": 1_000_000 - 540,
    }


def test_communication_buffers_of_torchs_are_added_to_the_communicators(probe) -> None:
    memory = DeviceMemory(DEVICE, lambda: {"communicators": 64}, probe=probe)
    probe.torch_allocated = probe.torch_reserved = 64
    assert grow(memory, probe, Phase.JOINT, 300) == {"communicators": 364}


def test_more_named_than_allocated_leaves_no_activations(probe) -> None:
    memory = DeviceMemory(DEVICE, lambda: {"weights": 400}, probe=probe)
    probe.torch_allocated, probe.torch_reserved = 350, 380
    held = memory.end(Phase.TRAIN)
    assert (held["activations"], held["cache"]) == (0, 0)


def test_memory_that_sleeps_belongs_to_no_one(probe) -> None:
    owned = {"weights": 100, "kv_cache": 800}
    memory = DeviceMemory(DEVICE, lambda: owned, mapped=lambda: probe.torch_reserved - probe.unmapped, probe=probe)
    memory.begin(Phase.START)
    probe.torch_allocated, probe.torch_reserved, probe.outside = 930, 1000, 60
    awake = memory.end(Phase.START)
    assert (awake["activations"], awake["cache"], awake["context"]) == (30, 70, 60)

    memory.begin(Phase.ROLLOUT)
    probe.unmapped, probe.outside, owned = 900, 65, {"weights": 0, "kv_cache": 0}
    asleep = memory.end(Phase.ROLLOUT)
    left = {"activations": 30, "cache": 70, "context": 60, "other": 5, "free": 1_000_000 - probe.used()}
    assert {owner: size for owner, size in asleep.items() if size} == left
    assert sum(asleep.values()) == 1_000_000


def test_a_phase_whose_beginning_was_not_seen_books_no_growth(memory, probe) -> None:
    grow(memory, probe, Phase.START, 500)
    probe.outside += 100
    assert memory.end(Phase.TRAIN)["other"] == 0
    assert grow(memory, probe, Phase.TRAIN, 10) == {"context": 500, "other": 10}


def test_a_context_created_before_the_first_phase_is_booked_if_begin_was_called_before(memory, probe) -> None:
    memory.begin(Phase.START)
    probe.outside = 500
    assert grow(memory, probe, Phase.START, 10) == {"context": 510}


def test_it_observes_a_lifecycle(memory, probe) -> None:
    lifecycle = Lifecycle(role=Role.TRAINER, rank=0)
    lifecycle.observer = memory
    with lifecycle.enter(Phase.WORLD):
        probe.outside += 500
    (event,) = lifecycle.drain_events()
    assert event.device_bytes["context"] == 500


class Chunk(torch.nn.Module):
    """A model chunk as Megatron's DistributedDataParallel leaves it: parameters are views into buffers."""

    buffers: Any = None

    def __init__(self, dense: int, expert: int, *, outside: int = 0) -> None:
        super().__init__()
        self.buffers = [self._buffer(dense)]
        self.expert_parallel_buffers = [self._buffer(expert)]
        halves = [b.param_data[half] for b in self._all() for half in (slice(0, 2), slice(2, None))]
        self.inside = torch.nn.ParameterList(torch.nn.Parameter(half) for half in halves)
        self.outside = torch.nn.Parameter(torch.zeros(outside))

    @staticmethod
    def _buffer(numel: int) -> SimpleNamespace:
        return SimpleNamespace(param_data=torch.zeros(numel, dtype=torch.bfloat16), grad_data=torch.zeros(numel))

    def _all(self) -> list[SimpleNamespace]:
        return [*self.buffers, *self.expert_parallel_buffers]


def adam(*parameters: torch.Tensor) -> SimpleNamespace:
    """One of Megatron's optimizers around an Adam that has taken a step."""
    state = {
        p: {"exp_avg": torch.zeros(p.numel()), "exp_avg_sq": torch.zeros(p.numel()), "step": 3} for p in parameters
    }
    return SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"params": [p]} for p in parameters], state=state))


def owned(chunks: list[Any], optimizer: Any) -> tuple[int, ...]:
    return tuple(megatron_owned(chunks, optimizer, device_type="cpu").values())


def test_weights_and_gradients_are_the_buffers_and_parameters_outside_them() -> None:
    assert owned([Chunk(10, 6), Chunk(4, 4, outside=3)], None) == (24 * 2 + 3 * 4, 24 * 4, 0)


def test_the_optimizer_owns_its_state_and_its_main_parameters() -> None:
    chained = SimpleNamespace(chained_optimizers=[adam(torch.zeros(5)), adam(torch.zeros(2), torch.zeros(1))])
    assert owned([], adam(torch.zeros(5))) == (0, 0, 3 * 5 * 4)
    assert owned([], chained) == (0, 0, 3 * 8 * 4)


def test_main_parameters_that_are_views_into_the_buffers_are_weights() -> None:
    chunk = Chunk(10, 6)
    optimizer = adam(chunk.buffers[0].param_data[2:6], chunk.expert_parallel_buffers[0].param_data[:3])
    assert owned([chunk], optimizer) == (16 * 2, 16 * 4, 2 * (4 + 3) * 4)


def test_offloaded_storage_does_not_count() -> None:
    chunk, optimizer = Chunk(10, 6), adam(torch.zeros(5))
    chunk.buffers[0].param_data.untyped_storage().resize_(0)
    chunk.expert_parallel_buffers[0].grad_data.untyped_storage().resize_(0)
    for state in optimizer.optimizer.state.values():
        state["exp_avg"].untyped_storage().resize_(0)
    assert owned([chunk], optimizer) == (6 * 2, 10 * 4, 2 * 5 * 4)


def test_a_buffer_without_parameters_of_its_own_counts_its_gradients() -> None:
    chunk = Chunk(10, 6)
    chunk.buffers[0].param_data = None
    del chunk.inside
    assert owned([chunk], None) == (6 * 2, 16 * 4, 0)


def test_a_model_that_is_not_wrapped_yet_is_its_parameters() -> None:
    assert owned([torch.nn.Linear(3, 2)], None) == ((6 + 2) * 4, 0, 0)


def test_without_a_model_nothing_is_owned() -> None:
    nothing = {"weights": 0, "gradients": 0, "optimizer": 0}
    assert megatron_owned([], None, device_type="cpu") == nothing
    assert megatron_owned([], SimpleNamespace(optimizer=None), device_type="cpu") == nothing


def test_host_memory_counts_only_where_asked_for() -> None:
    chunk, optimizer = Chunk(10, 6, outside=3), adam(torch.zeros(5))
    assert sum(megatron_owned([chunk], optimizer).values()) == 0
    assert sum(owned([chunk], optimizer)) > 0
