"""The tests of whole runs tell what a run has left in shared memory from what another process uses."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from multiprocessing import get_context, shared_memory

import pytest

from tests.integration.runs import SHARED_MEMORY, is_in_use


def a_semaphore() -> tuple[object, str]:
    lock = get_context("spawn").Lock()
    return lock, f"sem.{lock._semlock.name.lstrip('/')}"  # type: ignore[attr-defined]


def a_segment() -> tuple[object, str]:
    segment = shared_memory.SharedMemory(create=True, size=16)
    return segment, segment.name


@pytest.mark.parametrize("make", [a_semaphore, a_segment])
def test_what_a_process_has_mapped_is_in_use(make: Callable[[], tuple[object, str]]) -> None:
    made, name = make()
    try:
        assert is_in_use(SHARED_MEMORY / name)
    finally:
        if isinstance(made, shared_memory.SharedMemory):
            made.close()
            made.unlink()


def test_what_nobody_has_mapped_is_not() -> None:
    path = SHARED_MEMORY / f"rl_safe_test_{uuid.uuid4().hex}"
    path.touch()
    try:
        assert not is_in_use(path)
    finally:
        path.unlink()
    assert not is_in_use(path)
