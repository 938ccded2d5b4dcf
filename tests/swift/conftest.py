"""Skips these tests where ms-swift is absent: they have an environment of their own, made by scripts/test --swift."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import deselect, pytest_addoption

__all__ = ["pytest_addoption"]

HAS_SWIFT = importlib.util.find_spec("swift") is not None
collect_ignore_glob = [] if HAS_SWIFT else ["test_*.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--every-case"):
        deselect(config, items, "every_case")


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Qwen3-MoE of 0.5 M parameters, and 64 short conversations."""
    return write_inputs(tmp_path_factory.mktemp("inputs"), experts=8)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `inputs`, with a dense model in the place of the Qwen3-MoE."""
    return write_inputs(tmp_path_factory.mktemp("dense"), experts=0)


def write_inputs(folder: Path, *, experts: int) -> Path:
    from rl_safe_workers.config import SeededModelConfig
    from rl_safe_workers.models.seeded import create_seeded_model

    create_seeded_model(folder / "model", SeededModelConfig(num_experts=experts), dtype="bfloat16")
    turns = [(f"{i} + {i}", f"{2 * i}") for i in range(64)]
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in turns]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="session")
def forge() -> Iterator[object]:
    """A process with ms-swift imported, which forks the ranks of jobs."""
    from tests.swift.jobs import Forge

    with Forge() as forge:
        yield forge
