"""Collectives that Megatron-Bridge's configuration asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rl_safe_workers.adapters.nemo_rl.bridge_features import features_of


def configured(**model: Any) -> Any:
    return SimpleNamespace(model=SimpleNamespace(**model), ddp=SimpleNamespace())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, {"p2p"}),
        ({"cp_comm_type": "all_gather"}, {"all_gather"}),
        ({"cp_comm_type": ["p2p", "a2a"]}, {"p2p", "a2a"}),
        ({"is_hybrid_model": True}, {"p2p", "a2a"}),
        ({"hybrid_override_pattern": "MEM*"}, {"p2p", "a2a"}),
    ],
)
def test_how_context_parallel_ranks_exchange(model: dict[str, Any], expected: set[str]) -> None:
    assert features_of(configured(**model)).context_exchange == expected
