"""Marks each test with the folder that it lies in, and leaves out what needs an option or a GPU."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

KINDS = ("unit", "distributed", "integration", "nodes", "gpu")
TESTS = Path(__file__).parent
LONG_FILES = (
    "verl/test_submitted_job.py",
    "verl/test_ending.py",
    "verl/test_driver_waits.py",
    "verl/test_sft.py",
    "verl/test_engine_life.py",
    "verl/test_whole_job.py",
)
"""Begun first and in this order by pytest-xdist, so that no process is left to run alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--every-case``. The conftest of a folder with a root of its own imports this, too."""
    with suppress(ValueError):  # it is there already
        parser.addoption("--every-case", action="store_true", help="also run the cases marked every_case")


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--every-case"):
        deselect(config, items, "every_case")
    put_long_files_first(config, items)
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0]
        if kind in KINDS:
            item.add_marker(kind)


def put_long_files_first(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the files for pytest-xdist. The order of the command line is lost where its arguments overlap."""
    if hasattr(config, "workerinput"):
        places = {TESTS / name: place for place, name in enumerate(LONG_FILES)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


def deselect(config: pytest.Config, items: list[pytest.Item], marker: str) -> None:
    """Leaves out what only an option asks for."""
    whole = [item for item in items if item.get_closest_marker(marker)]
    if whole:
        config.hook.pytest_deselected(items=whole)
        items[:] = [item for item in items if item not in whole]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    # Here and not above: unit tests run without torch.
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA device; torch {torch.__version__} finds none")
