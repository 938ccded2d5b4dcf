"""Checkpoints of one layout under others: every element of every tensor, and Megatron's own code as the judge.

What a run holds is described by Megatron's ``fully_reshardable`` code, which gathers it; what ours wrote and read is
compared with that, element by element.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from tests.distributed.laid_out_rank import assert_equal, whole
from tests.distributed.ranks import run_ranks, values
from tests.distributed.resharding import OTHERS, continue_on_two, make_round_trips, save_and_reshard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 48 and 20 elements, which no data-parallel boundary respects; an output layer that is the embedding."""
    path = tmp_path_factory.mktemp("resharding") / "model"
    spec = SeededModelConfig(num_hidden_layers=4, hidden_size=48, head_dim=12, moe_intermediate_size=20)
    create_seeded_model(path, spec, is_tied=True)
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(model: Path, root: Path) -> list[dict[str, Any]]:
    return values(run_ranks(save_and_reshard, 4, model, root))


@pytest.fixture(scope="module")
def two_ranks(model: Path, root: Path, ranks: list[Any]) -> list[dict[str, Any]]:
    (root / "store").unlink()
    return values(run_ranks(continue_on_two, 2, model, root))


@pytest.fixture(scope="module")
def round_trips(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(make_round_trips, 4, model, tmp_path_factory.mktemp("round_trips")))


def _of(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    return [rank[name] for rank in ranks]


@pytest.mark.parametrize("name", OTHERS)
def test_another_layout_of_four_ranks_loads_every_element(ranks, name) -> None:
    assert_equal(_of(ranks, name), _of(ranks, "saved"))


@pytest.mark.parametrize("name", OTHERS)
def test_every_layout_would_write_each_element_exactly_once(ranks, name) -> None:
    assert_equal(_of(ranks, f"{name} described"), _of(ranks, "saved"))


def test_half_the_ranks_load_every_element(ranks, two_ranks) -> None:
    assert_equal(_of(two_ranks, "held"), _of(ranks, "saved"))


def test_the_state_compared_has_moments_and_parameters_of_every_kind(ranks) -> None:
    tensors = whole(_of(ranks, "saved"))
    for state in ("param", "exp_avg", "exp_avg_sq"):
        of_state = {k: v for k, v in tensors.items() if k.startswith(f"optimizer.state.{state}.")}
        assert len(of_state) * 4 == len(tensors)
        assert all(v.any() for v in of_state.values())
    assert tensors["optimizer.state.exp_avg.decoder.layers.3.mlp.experts.experts.linear_fc1.weight"].shape == (
        8,
        40,
        48,
    )


@pytest.mark.parametrize("name", ["ours by stock", "stock by ours"])
def test_megatron_and_ours_read_each_others_checkpoints(ranks, name) -> None:
    assert_equal(_of(ranks, name), _of(ranks, "saved"))


@pytest.mark.parametrize("name", ["homogeneous", "dp_reshardable"])
def test_a_foreign_format_loads_with_the_metadata_it_was_saved_with(ranks, name) -> None:
    assert_equal(_of(ranks, name), _of(ranks, "saved"))


def test_describing_the_state_is_not_collective(ranks) -> None:
    assert _of(ranks, "collectives") == [[]] * 4


def test_a_description_follows_a_tensor_that_moved(ranks) -> None:
    assert _of(ranks, "follows") == [True] * 4


def test_random_state_is_restored_from_a_file_that_may_hold_no_code(ranks) -> None:
    for before, after in _of(ranks, "draws"):
        assert before == after


def test_some_rank_owns_a_part_of_a_row(ranks) -> None:
    """Else the tests above would not have met one."""
    assert any(_of(ranks, "cut rows"))


def test_training_goes_on_as_if_uninterrupted_where_data_parallelism_alone_changed(ranks, two_ranks) -> None:
    for mine, theirs in zip(two_ranks[0]["after"], ranks[0]["after"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", ["vpp", "pp1"])
def test_virtual_pipeline_stages_save_and_load_like_the_rest(round_trips, name) -> None:
    found = _of(round_trips, "vpp")
    assert_equal(_of(found, name), _of(found, "saved"))


@pytest.mark.parametrize("name", ["tp2", "ep4"])
def test_bf16_weights_and_their_fp32_originals_both_come_back(round_trips, name) -> None:
    found = _of(round_trips, "bf16")
    assert_equal(_of(found, name), _of(found, "saved"))
    tensors = whole(_of(found, name))
    key = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
    originals = torch.from_numpy(tensors[f"optimizer.state.param.{key}"])
    assert not torch.equal(originals, originals.bfloat16().float())
    assert torch.equal(originals.bfloat16().float(), torch.from_numpy(tensors[key]))
