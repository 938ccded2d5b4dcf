"""Runs the cells of this environment's hosts that have no kept result, keeps what they show, and writes the page.

With ``--diagnosis`` all of them, else a sample, whose results are not kept.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.conftest import deselect
from tests.diagnosis import page
from tests.diagnosis.cells import Host
from tests.diagnosis.host import ROOT
from tests.nemo_rl.source import SOURCE

KEPT = ROOT / "outputs" / "diagnosis.json"
"""Results of cells, so that a suite that was stopped goes on."""
SEEN = "diagnosis_seen"
"""The property of a test that holds it."""


def hosts() -> list[Host]:
    """Returns the hosts that this environment can run."""
    if importlib.util.find_spec("verl"):
        return [Host.VERL]
    if importlib.util.find_spec("swift"):
        return [Host.SWIFT]
    return [Host.BUILTIN, Host.SCRIPT, *([Host.NEMO_RL] if SOURCE else [])]


def kept() -> dict[str, dict[str, Any]]:
    """Returns what cells have shown, by their names."""
    found: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return found


def keep(cell: str, seen: Mapping[str, Any]) -> None:
    """Keeps what a cell has shown, and writes the page anew."""
    KEPT.parent.mkdir(exist_ok=True)
    found = {**kept(), cell: dict(seen)}
    KEPT.write_text(json.dumps(found, indent=1, sort_keys=True))
    page.write(found)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--diagnosis", action="store_true", help="run every cell without a kept result, not a sample")
    parser.addoption("--anew", action="store_true", help="with --diagnosis: keep no earlier result")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_cell: a cell that is run with --diagnosis only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--diagnosis"):
        deselect(config, items, "every_cell")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    properties = dict(report.user_properties)
    if report.when == "call" and (found := properties.get(SEEN)) is not None and found["is_kept"]:
        keep(found["cell"], found["seen"])
