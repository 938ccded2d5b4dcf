"""Runs the quick cases, or with ``--chaos`` the whole matrix, and writes its results."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.chaos import table
from tests.chaos.cases import CONFIG, Case, all_cases
from tests.integration.runs import RECIPES, REPOSITORY, Outcome, finish, rl_safe

PAGE = REPOSITORY / "docs" / "reliability.md"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos", action="store_true", help="run the whole fault matrix and write docs/reliability.md")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--chaos", default=False):
        return
    whole = [item for item in items if item.get_closest_marker("chaos")]
    if whole:
        config.hook.pytest_deselected(items=whole)
        items[:] = [item for item in items if item not in whole]


@dataclass(kw_only=True)
class Results:
    """What the tests of this session have found."""

    seconds: dict[Case, float | None] = field(default_factory=dict)
    """From the fault to the end, of each case that was run; None for one that failed."""
    orphans: str | None = None
    """About the runs whose driver was killed; None if that was not tested."""


RESULTS = pytest.StashKey[Results]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = Results()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for case, seconds in config.stash[RESULTS].seconds.items():
        outcome = table.FAILED if seconds is None else f"{seconds:.1f} s from the fault to the end"
        terminalreporter.write_line(f"{case}: {outcome}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    results = session.config.stash[RESULTS]
    if results.seconds.keys() == set(all_cases()) and results.orphans is not None:
        table.write(PAGE, results.seconds, results.orphans)


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config) -> Results:
    """Where to put results. They are written to the page once there is one of every test."""
    return pytestconfig.stash[RESULTS]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run without a fault, which also makes the model. Its checkpoints are what others go on from."""
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome = finish(rl_safe("quickstart.yaml", f"model.path={folder / 'model'}", "model.create={}", *CONFIG), folder)
    assert outcome.code == 0, outcome.err
    return outcome


def checkpoints_of(folder: Path) -> Path:
    """Where the runs of the quickstart recipe keep their checkpoints."""
    return folder / "checkpoints" / "quickstart"


def chaos_command(model: Path, *overrides: str) -> list[str]:
    """The command line of a run with a fault."""
    recipe = str(RECIPES / "quickstart.yaml")
    return [sys.executable, "-m", "tests.chaos.command", "run", recipe, f"model.path={model}", *overrides]
