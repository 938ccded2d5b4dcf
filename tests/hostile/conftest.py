"""Runs the quick inputs, or with ``--hostile`` all, and prints what became of them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import table
from tests.hostile.client import Warm

RESULT = "hostile_result"
"""Property of a test: a result, see `table.result`. pytest-xdist brings them from its workers."""


class Results:
    """Results of a session's tests."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._found: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collects what a test has found, wherever it was run."""
        fresh = [value for name, value in report.user_properties if name == RESULT and report.when == "call"]
        self._found += fresh
        if self._file is not None and fresh:
            with self._file.open("a") as file:
                file.writelines(json.dumps(value) + "\n" for value in fresh)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the table."""
        if not self._found:
            return
        terminalreporter.section("hostile inputs")
        for line in table.lines(self._found):
            terminalreporter.write_line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hostile", action="store_true", help="try every hostile input, not some of each kind")
    parser.addoption("--hostile-results", type=Path, help="also add what becomes of each, one JSON object a line")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # in pytest-xdist's controller, or where there is none
        config.pluginmanager.register(Results(config.getoption("--hostile-results", default=None)))


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    processes = Warm()
    try:
        yield processes
    finally:
        processes.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test: pytest keeps its own, and some inputs are large, or too deep for it."""
    path = tmp_path / "site"
    try:
        yield path
    finally:
        subprocess.run(["rm", "-rf", str(path)], check=True)
        shutil.rmtree(tmp_path, ignore_errors=True)
