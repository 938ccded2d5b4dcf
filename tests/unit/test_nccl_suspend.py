"""Which NCCL can suspend a communicator, and how it is called where torch does not offer it; NCCL here is a fake."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_safe_workers.comms import nccl_suspend
from rl_safe_workers.errors import CommunicatorError

COMMUNICATOR = 0x7F00_0000_1234


class FakeNccl:
    """Records calls; refuses what it is told to."""

    def __init__(self, code: int = 23007, refuses: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._code, self._refuses = code, refuses
        self.ncclGetErrorString = lambda code: b"invalid usage"

    def ncclGetVersion(self, code: Any) -> int:  # noqa: N802
        ctypes.cast(code, ctypes.POINTER(ctypes.c_int))[0] = self._code
        return 0

    def __getattr__(self, name: str) -> Any:
        def call(pointer: ctypes.c_void_p, *flags: int) -> int:
            self.calls.append((name, pointer.value, *flags))
            return 5 if name == self._refuses else 0

        return call


def backend(pointer: int = COMMUNICATOR) -> Any:
    return SimpleNamespace(_comm_ptr=lambda: pointer)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns a function that puts a fake in the place of the NCCL that is loaded."""

    def load(nccl: FakeNccl | None, *, torch_suspends: bool = False, has_pointers: bool = True) -> None:
        group = SimpleNamespace(_comm_ptr=None) if has_pointers else SimpleNamespace()
        monkeypatch.setattr(nccl_suspend, "_library", lambda: nccl)
        monkeypatch.setattr(nccl_suspend, "_torch_suspends", lambda: torch_suspends)
        monkeypatch.setattr(nccl_suspend, "_process_group", lambda: group)
        nccl_suspend.loaded_version.cache_clear()

    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    yield load
    nccl_suspend.loaded_version.cache_clear()


def test_a_communicator_is_suspended_by_its_pointer_if_torch_offers_nothing(load) -> None:
    nccl = FakeNccl()
    load(nccl)
    nccl_suspend.suspend(backend())
    nccl_suspend.resume(backend())
    assert nccl.calls == [("ncclCommSuspend", COMMUNICATOR, 1), ("ncclCommResume", COMMUNICATOR)]


def test_what_nccl_refuses_is_an_error_with_its_reason(load) -> None:
    load(FakeNccl(refuses="ncclCommSuspend"))
    with pytest.raises(CommunicatorError, match="ncclCommSuspend: invalid usage"):
        nccl_suspend.suspend(backend())


def test_a_group_without_a_communicator_is_not_handed_to_nccl(load) -> None:
    nccl = FakeNccl()
    load(nccl)
    with pytest.raises(CommunicatorError, match="no communicator yet"):
        nccl_suspend.suspend(backend(pointer=0))
    assert nccl.calls == []


def test_torchs_own_call_is_taken_where_there_is_one(load) -> None:
    nccl, called = FakeNccl(), []
    load(nccl, torch_suspends=True)
    own = SimpleNamespace(suspend=lambda: called.append("suspend"), resume=lambda: called.append("resume"))
    nccl_suspend.suspend(own)
    nccl_suspend.resume(own)
    assert (called, nccl.calls) == (["suspend", "resume"], [])


@pytest.mark.parametrize(
    ("code", "torch_suspends", "has_pointers", "reason"),
    [
        (22907, False, True, ""),
        (23007, True, False, ""),
        (22809, True, True, "NCCL has that since 2.29.7"),
        (23007, False, False, "torch has that since 2.12"),
    ],
)
def test_nccl_and_torch_must_both_be_able_to(code, torch_suspends, has_pointers, reason, load) -> None:
    load(FakeNccl(code), torch_suspends=torch_suspends, has_pointers=has_pointers)
    assert nccl_suspend.why_not().startswith(reason)
    assert bool(nccl_suspend.why_not()) is bool(reason)
    assert nccl_suspend.can_suspend(torch.device("cuda"), sends_unbatched=False) is (reason == "")


def test_the_version_is_that_of_the_loaded_library(load) -> None:
    load(FakeNccl(23007))
    assert nccl_suspend.loaded_version() == (2, 30, 7)


def test_without_cumem_or_a_gpu_nothing_is_suspended(load, monkeypatch) -> None:
    load(FakeNccl())
    assert nccl_suspend.can_suspend(torch.device("cuda"), sends_unbatched=False)
    assert not nccl_suspend.can_suspend(torch.device("cpu"), sends_unbatched=False)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert not nccl_suspend.can_suspend(torch.device("cuda"), sends_unbatched=False)


@pytest.mark.parametrize("torch_suspends", [False, True])
def test_the_communicators_of_unbatched_sends_are_known_to_torch_alone(torch_suspends: bool, load) -> None:
    load(FakeNccl(), torch_suspends=torch_suspends)
    assert nccl_suspend.can_suspend(torch.device("cuda"), sends_unbatched=True) is torch_suspends


def test_no_library_is_loaded_by_the_question() -> None:
    nccl_suspend.loaded_version.cache_clear()
    was_loaded = nccl_is_loaded()  # a torch for CUDA brings it
    assert (nccl_suspend.why_not() == "no NCCL is loaded") is not was_loaded
    assert nccl_is_loaded() is was_loaded


def nccl_is_loaded() -> bool:
    return "libnccl.so" in Path("/proc/self/maps").read_text()
