"""Proved weight syncs with a real vLLM engine: every corruption is found and named, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import Family, create_seeded_model
from tests.distributed.families import make, maps
from tests.distributed.proved_engine import CORRUPTIONS, all_corruptions, broken_updates, clean_update, refusals
from tests.distributed.ranks import run_ranks, values

VOCABULARY = 130
"""vLLM pads it to 192 rows."""
WHERE = ("before packing", "on the wire", "after the loader")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("proof") / "model"
    create_seeded_model(
        path,
        SeededModelConfig(num_experts=8),
        family=Family.QWEN2,
        is_tied=True,
        settings={"vocab_size": VOCABULARY},
    )
    (result,) = values(run_ranks(all_corruptions, 1, path, timeout_s=180.0))
    return result


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("label", CORRUPTIONS)
def test_a_corruption_is_found_and_named_and_the_next_sync_is_clean(label: str, where: str, found: Any) -> None:
    wrong, afterwards, corrupted = found[label, where]
    named = {sentence.split(":")[0] for sentence in wrong}
    assert named == corrupted
    assert afterwards == []


SAMPLE = ("qwen2_moe", "glm4_moe")


@pytest.mark.parametrize(
    "kind",
    [
        *SAMPLE,
        *(pytest.param(kind, marks=pytest.mark.every_case) for kind in ("qwen2", "qwen3", "llama3", "mixtral")),
    ],
)
def test_a_clean_sync_of_each_family_is_proved(kind: str, tmp_path: Path) -> None:
    if not maps("mbridge", kind):
        pytest.skip("the trainer has no mapping")
    ((wrong, held, names),) = values(run_ranks(clean_update, 1, make(tmp_path / "model", kind), timeout_s=120.0))
    assert wrong == []
    assert {name for name, _ in held.digests} | set(held.unread) == set(names)
    assert all(".layers.2." in name for name in held.unread), "only an MTP layer is not in the engine"


def test_an_engine_takes_all_weights_after_an_update_that_was_broken_off(tmp_path: Path) -> None:
    """The first update after ``announce`` goes through vLLM's loaders, and the next one straight into the model."""
    create_seeded_model(tmp_path / "model", SeededModelConfig(num_experts=8))
    (found,) = values(run_ranks(broken_updates, 1, tmp_path / "model", timeout_s=120.0))
    assert found == [[]] * 6


def test_an_engine_generates_nothing_before_it_has_all_weights() -> None:
    ((before, broken),) = values(run_ranks(refusals, 1))
    assert before == "the engine has no weights to generate with: the engine has not been built"
    assert broken == "the engine has no weights to generate with: a weight sync has not ended"
