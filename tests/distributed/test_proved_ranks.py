"""Workers of a real tensor-parallel vLLM engine prove what they hold together, and name a weight that one has wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from tests.distributed.proved_ranks import CLEAN, held_by_ranks
from tests.distributed.ranks import run_ranks, values
from tests.slow_digest import slow_digest

LAYER = "model.layers.0."
WRONG = [
    f"{LAYER}self_attn.k_proj.weight",
    f"{LAYER}self_attn.o_proj.weight",
    f"{LAYER}mlp.experts.7.down_proj.weight",
    "lm_head.weight",
    "model.norm.weight",
]


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"enable_expert_parallel": True}, marks=pytest.mark.every_case)],
    ids=["tensor parallel", "expert parallel, too"],
)
def test_workers_prove_what_they_hold_together(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model"
    create_seeded_model(path, SeededModelConfig())
    (found,) = values(run_ranks(held_by_ranks, 1, path, [CLEAN, *WRONG, CLEAN], options, timeout_s=180.0))
    sent = {name: slow_digest(tensor) for name, tensor in load_file(path / "model.safetensors").items()}
    for name, held in zip([CLEAN, *WRONG, CLEAN], found, strict=True):
        assert held is not None
        assert held.unread == ()
        assert {one for one, _ in held.digests} == set(sent)
        assert [text.partition(":")[0] for text in held.differences(sent)] == ([name] if name else [])
