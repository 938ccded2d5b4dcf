from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.worker import served_store


@pytest.fixture(scope="session")
def seeded_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny Qwen3-MoE, one with layers for four stages, and a tiny dense Qwen3."""
    root = tmp_path_factory.mktemp("models")
    create_seeded_model(root / "moe", SeededModelConfig())
    create_seeded_model(root / "dense", SeededModelConfig(num_experts=0))
    create_seeded_model(root / "deep", SeededModelConfig(num_hidden_layers=4))
    return {name: root / name for name in ("moe", "dense", "deep")}


@pytest.fixture
def address() -> Iterator[StoreAddress]:
    """The address of a store that outlives every rank."""
    with served_store() as address:
        yield address
