"""Each HF weight is sent by one rank that has it, bit for bit as the export to all ranks has it, in every layout."""

from __future__ import annotations

import re
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.rollout.protocol import WeightSpec
from tests.distributed.own_weights import LAYOUTS, NUM_EXPERTS, QKV, SIZE, SPLIT, Prints, Seen, see
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import served_store

EXPERT = re.compile(r"\.experts\.(\d+)\.")
WITHOUT_TENSOR_PARALLELISM = {name: layout for name, layout in LAYOUTS.items() if layout.tp == layout.etp == 1}
WITH_EXPERTS_SPREAD = {name: layout for name, layout in LAYOUTS.items() if layout.ep > 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All weights are random, norms too, so that no two are equal by chance."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"num_hidden_layers": 4, "hidden_size": 48, "head_dim": 12}
    create_seeded_model(root / "moe", SeededModelConfig(num_experts=NUM_EXPERTS, **sizes))
    create_seeded_model(root / "dense", SeededModelConfig(num_experts=0, **sizes))
    create_seeded_model(root / "tied", SeededModelConfig(num_experts=0, **sizes), is_tied=True)
    for file in root.glob("*/model.safetensors"):
        generator = torch.Generator().manual_seed(1)
        weights = {n: torch.randn(w.shape, generator=generator) for n, w in sorted(load_file(file).items())}
        save_file(weights, file, metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def seen_in(models: Path) -> dict[str, list[Seen]]:
    """Returns the records of the ranks, for the layouts that were asked for so far."""
    return _SeenIn(models)


class _SeenIn(dict[str, list[Seen]]):
    def __init__(self, models: Path) -> None:
        self.models = models

    def __missing__(self, name: str) -> list[Seen]:
        with served_store() as address:
            self[name] = values(run_ranks(see, SIZE, address, self.models, LAYOUTS[name]))
        return self[name]


def _sent(ranks: list[Seen], prints: list[Prints]) -> Prints:
    """Returns the weights that the sources send, each from its own."""
    return {spec.name: prints[spec.source][spec.name] for spec in ranks[0].specs}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_weight_has_one_source_and_all_ranks_agree_on_it(name: str, seen_in: dict[str, list[Seen]]) -> None:
    ranks = seen_in[name]
    names = [spec.name for spec in ranks[0].specs]
    assert len(set(names)) == len(names)
    assert all(rank.specs == ranks[0].specs for rank in ranks)
    announced = {spec.name: (spec.dtype, spec.shape) for spec in ranks[0].specs}
    assert announced == {name: print_[:2] for name, print_ in ranks[0].exported.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_weights_come_to_every_rank_bit_for_bit_and_those_of_a_source_together(
    name: str, seen_in: dict[str, list[Seen]]
) -> None:
    for rank in seen_in[name]:
        assert rank.packed == rank.exported
        assert rank.packed_sources == sorted(rank.packed_sources)
        assert set(rank.packed_sources) == {spec.source for spec in rank.specs}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_sources_together_send_what_the_export_yields_bit_for_bit(
    name: str, seen_in: dict[str, list[Seen]]
) -> None:
    ranks = seen_in[name]
    assert all(rank.made.keys() == rank.mine for rank in ranks)
    assert _sent(ranks, [rank.made for rank in ranks]) == ranks[0].exported


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_that_help_to_make_a_weight_make_the_same(name: str, seen_in: dict[str, list[Seen]]) -> None:
    for rank in seen_in[name]:
        assert rank.made == {weight: rank.exported[weight] for weight in rank.mine}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_that_changed_in_place_are_sent_as_they_are_now(name: str, seen_in: dict[str, list[Seen]]) -> None:
    ranks = seen_in[name]
    moved = ranks[0].moved_exported
    assert _sent(ranks, [rank.moved_made for rank in ranks]) == moved
    assert all(moved[weight] != before for weight, before in ranks[0].exported.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_that_were_offloaded_are_sent_once_they_are_back(name: str, seen_in: dict[str, list[Seen]]) -> None:
    assert all(rank.onloaded_made == rank.moved_made for rank in seen_in[name])


@pytest.mark.parametrize("name", LAYOUTS)
def test_small_buckets_bring_every_weight_to_every_rank_bit_for_bit(name: str, seen_in: dict[str, list[Seen]]) -> None:
    ranks = seen_in[name]
    assert all(rank.received == ranks[0].exported for rank in ranks)
    assert [rank.left_over for rank in ranks] == [0] * SIZE
    # Else it was no test of cutting, or of packing several together.
    assert len({spec.source for spec in ranks[0].specs}) < len(ranks[0].buckets) < len(ranks[0].specs)


@pytest.mark.parametrize("name", WITHOUT_TENSOR_PARALLELISM)
def test_without_tensor_parallelism_only_fused_projections_are_copied(
    name: str, seen_in: dict[str, list[Seen]]
) -> None:
    for rank in seen_in[name]:
        assert rank.mine - rank.views == {weight for weight in rank.mine if any(part in weight for part in QKV)}


@pytest.mark.parametrize("name", WITHOUT_TENSOR_PARALLELISM)
def test_all_experts_of_a_layer_are_taken_together(name: str, seen_in: dict[str, list[Seen]]) -> None:
    assert any(rank.together for rank in seen_in[name])
    for rank in seen_in[name]:
        item_of = {weight: item for item in rank.together for weight in item}
        gates = {weight for weight in rank.mine if "gate_proj" in weight}
        for gate in gates:
            assert (gate, gate.replace("gate_proj", "up_proj")) in pairwise(item_of[gate])
        for kind in ("gate_proj", "down_proj"):
            experts = [weight for weight in rank.mine if kind in weight and ".experts." in weight]
            layers = {weight.partition(".experts.")[0] for weight in experts}
            assert len({item_of[weight] for weight in experts}) == len(layers)


def test_tensor_parallelism_gathers_nothing_that_it_does_not_split(seen_in: dict[str, list[Seen]]) -> None:
    for rank in seen_in["tp2_ep2"]:
        split = {weight for weight in rank.mine if any(part in weight for part in (*QKV, *SPLIT))}
        assert rank.mine - rank.views == split


@pytest.mark.parametrize("name", WITH_EXPERTS_SPREAD)
def test_a_source_sends_only_experts_that_it_holds(name: str, seen_in: dict[str, list[Seen]]) -> None:
    ranks, per_rank = seen_in[name], NUM_EXPERTS // LAYOUTS[name].ep
    held = {(spec.source, int(match[1]) // per_rank) for spec in ranks[0].specs if (match := EXPERT.search(spec.name))}
    assert len(held) == LAYOUTS[name].ep * LAYOUTS[name].pp
    assert all(ranks[source].ep_rank == ep_rank for source, ep_rank in held)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.pp > 1])
def test_every_pipeline_rank_sends_something(name: str, seen_in: dict[str, list[Seen]]) -> None:
    assert len({spec.source // (SIZE // 2) for spec in seen_in[name][0].specs}) == 2


def _kind(spec: WeightSpec) -> str:
    """Name of the Megatron matrix; the first one of an expert makes two HF weights, which stay together."""
    return EXPERT.sub(".experts.", spec.name).replace("up_proj", "gate_proj")


@pytest.mark.parametrize("name", WITH_EXPERTS_SPREAD)
def test_a_matrix_of_all_experts_of_a_layer_is_sent_in_one_run(name: str, seen_in: dict[str, list[Seen]]) -> None:
    runs = [(kind, list(run)) for kind, run in groupby(seen_in[name][0].specs, key=_kind) if ".experts." in kind]
    assert len(runs) == len({kind for kind, _ in runs}) == 4 * 2
    for _, run in runs:
        numbers = [int(match[1]) for spec in run if (match := EXPERT.search(spec.name))]
        assert numbers == sorted(numbers)
        assert set(numbers) == set(range(NUM_EXPERTS))
        assert len(list(groupby(run, key=lambda spec: spec.source))) == LAYOUTS[name].ep


def test_virtual_stages_are_in_use(seen_in: dict[str, list[Seen]]) -> None:
    """Else their layout would be that of the pipeline alone: layers 0 and 2 are on the first rank."""
    sources = {
        int(match[1]): spec.source // 2
        for spec in seen_in["pp2_vpp2_ep2"][0].specs
        if (match := re.search(r"layers\.(\d+)\.input_layernorm", spec.name))
    }
    assert sources == {0: 0, 1: 1, 2: 0, 3: 1}
