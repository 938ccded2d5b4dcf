"""Fixtures of more than one test module."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from rl_safe_workers.errors import RlSafeError

SAID = "an error of ours"


@pytest.fixture
def without_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every error of ours is made with the same message, so that nothing can be decided by what it says."""
    monkeypatch.setattr(RlSafeError, "__init__", lambda self, *args: Exception.__init__(self, SAID))


@pytest.fixture
def infos_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], list[str]]:
    """Returns the messages of a module at level INFO, whatever other tests have done to this process's loggers."""

    def collect(module: ModuleType) -> list[str]:
        found: list[str] = []
        monkeypatch.setattr(module.logger, "info", lambda text, *args: found.append(text % args))
        return found

    return collect
