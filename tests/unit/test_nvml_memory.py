"""NVML's figure of this process is used after it has followed an allocation; NVML and CUDA here are fakes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_safe_workers.platforms import device_memory, nvml_memory

DEVICE = torch.device("cuda", 0)
MIB = 2**20


class FakeDevice:
    """A GPU with this process and a neighbour. ``listed`` is the id under which NVML lists this process."""

    def __init__(self, listed: int | None) -> None:
        self.listed, self.used, self.neighbour = listed, 600 * MIB, 900 * MIB

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        own = [SimpleNamespace(pid=self.listed, usedGpuMemory=self.used)] if self.listed else []
        return [*own, SimpleNamespace(pid=1, usedGpuMemory=self.neighbour)]

    @contextmanager
    def allocated(self, device: torch.device, size: int) -> Iterator[None]:
        self.used += size
        self.neighbour += 3 * MIB
        yield
        self.used -= size


def put(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    nvml_memory.process_memory.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(nvml_memory, "_allocated", fake.allocated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**37 - fake.used - fake.neighbour, 2**37))
    statistics = {"reserved_bytes": {"all": {"current": 100 * MIB}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: statistics)
    return fake


def test_a_neighbours_memory_does_not_count(monkeypatch) -> None:
    fake = put(FakeDevice(listed=os.getpid()), monkeypatch)
    outside = device_memory.outside_torch(DEVICE)
    assert outside is not None
    assert outside() == 500 * MIB
    fake.neighbour += 64 * MIB
    assert outside() == 500 * MIB
    fake.used += 8 * MIB
    assert outside() == 508 * MIB


@pytest.mark.parametrize("is_listed", [False, True])
def test_if_nvml_lists_us_under_another_id_or_not_the_whole_device_counts(is_listed, monkeypatch) -> None:
    fake = put(FakeDevice(listed=os.getpid() + 1 if is_listed else None), monkeypatch)
    outside = device_memory.outside_torch(DEVICE)
    assert outside is not None
    before = outside()
    fake.neighbour += 64 * MIB
    assert outside() == before + 64 * MIB


def test_a_process_of_the_machine_with_our_id_is_not_taken_for_us(monkeypatch) -> None:
    fake = put(FakeDevice(listed=os.getpid()), monkeypatch)

    @contextmanager
    def elsewhere(device: torch.device, size: int) -> Iterator[None]:
        yield

    monkeypatch.setattr(nvml_memory, "_allocated", elsewhere)
    assert fake.used == 600 * MIB
    assert nvml_memory.process_memory(DEVICE) is None


def test_without_nvml_the_whole_device_counts(monkeypatch) -> None:
    put(FakeDevice(listed=os.getpid()), monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_memory.process_memory(DEVICE) is None


def test_if_nvml_fails_later_the_last_figure_is_repeated(monkeypatch) -> None:
    fake = put(FakeDevice(listed=os.getpid()), monkeypatch)
    read = process_memory_of_us()
    fake.used += 8 * MIB
    assert read() == 608 * MIB
    fake.listed = None
    fake.used += 8 * MIB
    assert read() == 608 * MIB
    fake.listed = os.getpid()
    assert read() == 616 * MIB


def process_memory_of_us() -> Callable[[], int]:
    read = nvml_memory.process_memory(DEVICE)
    assert read is not None
    return read
