"""Skips these tests where verl is absent: they have an environment of their own, made by scripts/test --verl."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.conftest import deselect, put_long_files_first, pytest_addoption

__all__ = ["pytest_addoption"]

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--every-case"):
        deselect(config, items, "every_case")
    put_long_files_first(config, items)


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of 0.5 M parameters in bf16, which verl's engine asks for."""
    from rl_safe_workers.config import SeededModelConfig
    from rl_safe_workers.models.seeded import create_seeded_model

    path = tmp_path_factory.mktemp("models") / "tiny-moe"
    create_seeded_model(path, SeededModelConfig(), dtype="bfloat16")
    return path
