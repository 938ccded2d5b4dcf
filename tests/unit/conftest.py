"""Fixtures of more than one test module."""

from __future__ import annotations

import pytest

from rl_safe_workers.errors import RlSafeError

SAID = "an error of ours"


@pytest.fixture
def without_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every error of ours is made with the same message, so that nothing can be decided by what it says."""
    monkeypatch.setattr(RlSafeError, "__init__", lambda self, *args: Exception.__init__(self, SAID))
