"""Runs the quick cases, or with ``--chaos`` the whole matrix, and writes its results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.chaos import table
from tests.chaos.cases import CONFIG, all_cases
from tests.chaos.machine import MachineFault
from tests.conftest import deselect
from tests.integration.runs import RECIPES, REPOSITORY, Outcome, finish, made_once, rl_safe

PAGE = REPOSITORY / "docs" / "reliability.md"
KEPT = REPOSITORY / "outputs" / "chaos.json"
"""Results of the last run with ``--chaos``, for one with ``--chaos-again``."""
SECONDS, MACHINE, NOTE = "chaos_seconds", "chaos_machine", "chaos_note"
"""Properties of a test: ``(case, seconds)``, the same of a `MachineFault`, and a sentence for the page. pytest-xdist
brings them from its workers."""
LONG = ("test_orphans.py", "test_clean_exit.py")
"""Begun first, so that none of them is left to run alone."""


class Results:
    """Results of a session's tests."""

    def __init__(self) -> None:
        self.seconds: dict[str, float | None] = {}
        """Seconds of each case that was run; None for one that failed."""
        self.machine: dict[str, float | None] = {}
        """The same, of each `MachineFault`."""
        self.notes: dict[str, str] = {}
        """By test."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collects what a test has found, wherever it was run."""
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == SECONDS:
                case, seconds = value
                self.seconds[case] = seconds if report.passed else None
            elif name == MACHINE:
                fault, seconds = value
                self.machine[fault] = seconds if report.passed else None
            elif name == NOTE:
                # Instead of what a run before may have found, too.
                self.notes[report.nodeid] = value if report.passed else ""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints all."""
        for case, seconds in (self.seconds | self.machine).items():
            outcome = table.FAILED if seconds is None else f"{seconds:.1f} s"
            terminalreporter.write_line(f"{case}: {outcome}")
        for note in self.notes.values():
            terminalreporter.write_line(note)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keeps all, and writes the page if nothing is missing."""
        if not session.config.getoption("--chaos"):
            return
        if session.config.getoption("--chaos-again") and KEPT.exists():
            kept = json.loads(KEPT.read_text())
            self.seconds, self.notes = kept["seconds"] | self.seconds, kept["notes"] | self.notes
            self.machine = kept.get("machine", {}) | self.machine
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps({"seconds": self.seconds, "machine": self.machine, "notes": self.notes}))
        cases = all_cases()
        if {*map(str, cases)} <= self.seconds.keys() and len([*filter(None, self.notes.values())]) == len(LONG):
            results = {case: self.seconds[str(case)] for case in cases}
            table.write(PAGE, matrix=table.render(results, list(self.notes.values())))
        if {*MachineFault} <= self.machine.keys():
            table.write(PAGE, machine=table.render_machine(self.machine))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos", action="store_true", help="run the whole fault matrix and write docs/reliability.md")
    parser.addoption("--chaos-again", action="store_true", help="with --chaos: keep what the run before has found")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # in pytest-xdist's controller, or where there is none
        config.pluginmanager.register(Results())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--chaos", default=False):
        items.sort(key=lambda item: item.path.name not in LONG)
    else:
        deselect(config, items, "chaos")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run without a fault, which also makes the model. Its checkpoints are what others go on from."""

    def make(folder: Path) -> Outcome:
        model = (f"model.path={folder / 'model'}", "model.create={}")
        return finish(rl_safe("quickstart.yaml", *model, *CONFIG), folder)

    outcome = made_once(tmp_path_factory, "undisturbed", make)
    assert outcome.code == 0, outcome.err
    return outcome


def checkpoints_of(folder: Path) -> Path:
    """Where the runs of the quickstart recipe keep their checkpoints."""
    return folder / "checkpoints" / "quickstart"


def chaos_command(model: Path, *overrides: str) -> list[str]:
    """The command line of a run with a fault."""
    recipe = str(RECIPES / "quickstart.yaml")
    return [sys.executable, "-m", "tests.chaos.command", "run", recipe, f"model.path={model}", *overrides]
