"""Platforms: which device a process takes, and host memory that a device can copy to. The devices are fakes."""

from __future__ import annotations

import gc
from typing import Any, get_args

import pytest
import torch

from rl_safe_workers.config import Device
from rl_safe_workers.errors import ResourceError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.platforms import cpu, cuda
from rl_safe_workers.platforms.pinned import host_buffer
from rl_safe_workers.platforms.platform import open_platform

SIZE_BYTES = 4096
OUT_OF_MEMORY = 2


class FakeGpus:
    """The GPUs that a process sees. Stands for ``torch.cuda``."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.made_current: list[torch.device] = []

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: torch.device) -> None:
        self.made_current.append(device)

    def get_device_name(self, device: torch.device) -> str:
        return f"fake of {device}"


class FakeRuntime:
    """CUDA's page-locking calls; each answers with ``status``."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        self.registered.append((address, size_bytes))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.unregistered.append(address)
        return 0


class GrowingProbe:
    """A device of which every look finds one byte more in use, none of it torch's."""

    def __init__(self) -> None:
        self.looks = 0

    def used(self) -> int:
        self.looks += 1
        return self.looks

    def total(self) -> int:
        return 0

    def reserved(self) -> int:
        return 0

    def allocated(self) -> int:
        return 0


def see(monkeypatch: pytest.MonkeyPatch, count: int, local_rank: str | None = None) -> FakeGpus:
    gpus = FakeGpus(count)
    for name in ("is_available", "device_count", "set_device", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpus, name))
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    return gpus


def use(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> FakeRuntime:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_every_device_of_a_recipe_has_its_platform() -> None:
    assert {name: open_platform(name) for name in get_args(Device)} == {"cpu": cpu, "cuda": cuda}


@pytest.mark.parametrize("local_rank", [None, "0", "3"])
def test_the_only_gpu_is_taken_whatever_the_local_rank(monkeypatch: pytest.MonkeyPatch, local_rank: str | None) -> None:
    gpus = see(monkeypatch, 1, local_rank)
    assert cuda.start() == torch.device("cuda:0")
    assert gpus.made_current == [torch.device("cuda:0")]


@pytest.mark.parametrize("local_rank", ["0", "2", "3"])
def test_of_several_gpus_that_of_the_local_rank_is_taken(monkeypatch: pytest.MonkeyPatch, local_rank: str) -> None:
    gpus = see(monkeypatch, 4, local_rank)
    assert cuda.start() == cuda.start() == torch.device(f"cuda:{local_rank}")
    assert set(gpus.made_current) == {torch.device(f"cuda:{local_rank}")}


@pytest.mark.parametrize(
    ("count", "local_rank", "message"),
    [
        (0, None, "cluster.device=cuda, but torch .* sees no GPU in this process: check the driver"),
        (0, "0", "sees no GPU"),
        (4, None, "sees 4 GPUs and its local rank is not set: set LOCAL_RANK, or give it one GPU"),
        (4, "", "local rank is not set"),
        (4, "second", "local rank is not set"),
        (4, "-1", "local rank is not set"),
        (4, "4", "sees 4 GPUs and its local rank is 4: set LOCAL_RANK"),
    ],
)
def test_without_a_gpu_of_its_own_a_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, count: int, local_rank: str | None, message: str
) -> None:
    gpus = see(monkeypatch, count, local_rank)
    with pytest.raises(ResourceError, match=message):
        cuda.start()
    with pytest.raises(ResourceError, match=message):
        cuda.observer(dict)
    assert gpus.made_current == []


def test_gpus_that_torch_cannot_use_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match="sees no GPU"):
        cuda.start()


def test_the_observer_sees_the_context_being_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first look comes before `start`, and the one at the beginning of the phase does not replace it."""
    see(monkeypatch, 1)
    probe = GrowingProbe()
    observer = cuda.observer(dict, probe=probe)
    assert probe.looks == 1
    cuda.start()
    observer.begin(Phase.START)
    assert observer.end(Phase.START)["context"] == probe.looks - 1 > 0


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("size_bytes", [0, 1, SIZE_BYTES])
def test_a_host_buffer_is_writable_bytes_of_the_size_asked_for(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int, pinned: bool
) -> None:
    use(monkeypatch, FakeRuntime())
    buffer = host_buffer(size_bytes, pinned=pinned)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((size_bytes,), torch.uint8, "cpu")
    assert buffer.untyped_storage().nbytes() == size_bytes
    buffer.fill_(7)
    assert buffer.tolist() == [7] * size_bytes


def test_a_buffer_is_page_locked_once_from_its_first_byte_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(monkeypatch, FakeRuntime())
    buffer = host_buffer(SIZE_BYTES, pinned=True)
    assert runtime.registered == [(buffer.data_ptr(), SIZE_BYTES)]


def test_nothing_is_page_locked_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_runtime() -> Any:
        raise AssertionError("the CUDA runtime is not for this")

    monkeypatch.setattr(torch.cuda, "cudart", no_runtime)
    assert host_buffer(SIZE_BYTES, pinned=False).numel() == SIZE_BYTES
    assert host_buffer(0, pinned=True).numel() == 0


def test_a_buffer_is_unlocked_once_when_its_last_view_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(monkeypatch, FakeRuntime())
    buffer, other = host_buffer(SIZE_BYTES, pinned=True), host_buffer(SIZE_BYTES, pinned=True)
    address = buffer.data_ptr()
    part = buffer[64:128]
    view = part.view(torch.float32)
    del buffer, part
    gc.collect()
    assert runtime.unregistered == []
    view.fill_(1.0)
    del view
    gc.collect()
    assert runtime.unregistered == [address]
    del other
    gc.collect()
    assert len(runtime.unregistered) == 2


def test_memory_that_cannot_be_page_locked_is_refused_and_not_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(monkeypatch, FakeRuntime(status=OUT_OF_MEMORY))
    with pytest.raises(ResourceError, match="4096 bytes of host memory cannot be page-locked: CUDA error 2"):
        host_buffer(SIZE_BYTES, pinned=True)
    gc.collect()
    assert (len(runtime.registered), runtime.unregistered) == (1, [])
