"""The figures that the tests have measured, printed last."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.table import Row, print_table

_ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture(scope="session")
def rows(pytestconfig: pytest.Config) -> list[Row]:
    """The table to add figures to."""
    return pytestconfig.stash.setdefault(_ROWS, [])


def pytest_terminal_summary(config: pytest.Config) -> None:
    if found := config.stash.get(_ROWS, None):
        print_table(found, Console(width=140))
