"""The parts of a bucket: packed by a trainer, and read by the loaders of an engine's ranks as if they were whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rl_safe_workers.rollout.cuts import BucketPart, engine_ranks, parts_of, plan_parts
from rl_safe_workers.rollout.direct_load import DirectLoad
from rl_safe_workers.rollout.packing import spec_of, whole_weights
from rl_safe_workers.rollout.part_reads import PartReads
from rl_safe_workers.rollout.protocol import Bucket, plan_buckets
from rl_safe_workers.workers.outgoing import Items, Outgoing

CPU = torch.device("cpu")
ATTENTION, EXPERT = "model.layers.0.self_attn", "model.layers.0.mlp.experts.0"
SHAPES = {
    "model.embed_tokens.weight": (100, 8),
    f"{ATTENTION}.q_proj.weight": (32, 8),
    f"{ATTENTION}.q_proj.bias": (32,),
    f"{ATTENTION}.o_proj.weight": (8, 32),
    f"{EXPERT}.gate_proj.weight": (24, 8),
    f"{EXPERT}.up_proj.weight": (24, 8),
    f"{EXPERT}.down_proj.weight": (8, 24),
    "model.norm.weight": (8,),
    "model.nothing.weight": (0, 3),
}
WEIGHTS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) for name, shape in SHAPES.items()
}
GATE_UP = (f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight")


def _items() -> Items:
    """Yields two weights out of one tensor, as Megatron holds them, and the others alone."""
    for name, tensor in WEIGHTS.items():
        if name == GATE_UP[0]:
            yield GATE_UP, (torch.cat([WEIGHTS[one] for one in GATE_UP]),)
        elif name not in GATE_UP:
            yield (name,), (tensor,)


def _packed(size: int) -> tuple[Bucket, tuple[BucketPart, ...], list[torch.Tensor]]:
    """Returns a bucket, its parts, and the memory of each part."""
    specs = tuple(spec_of(name, tensor) for name, tensor in WEIGHTS.items())
    (bucket,) = plan_buckets(specs, bucket_bytes=10**6)
    parts = parts_of(bucket, engine_ranks(size, kv_heads=4))
    buffer = torch.full((parts[-1].end,), 7, dtype=torch.uint8)
    outgoing = Outgoing(specs=specs, mine=frozenset(WEIGHTS), is_collective=False, weights=lambda _: _items())
    outgoing.pack(bucket, _items(), buffer, training_rank=0, parts=parts)
    return bucket, parts, [buffer[part.start : part.end] for part in parts]


def _cut_of(name: str, whole: torch.Tensor, rank: int, size: int, *, shift: int = 0) -> torch.Tensor:
    """Cuts a whole weight as vLLM's loaders do; ``shift`` elements too far."""
    if name.startswith("model.embed"):
        each = 128 // size
        return whole[rank * each : (rank + 1) * each]
    if "norm" in name or "nothing" in name:
        return whole
    axis = 1 if "o_proj" in name or "down_proj" in name else 0
    each = whole.shape[axis] // size
    return whole.narrow(axis, rank * each + shift, each)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_reads_its_cut_of_every_weight(size: int) -> None:
    bucket, parts, buffers = _packed(size)
    for rank, (part, buffer) in enumerate(zip(parts, buffers, strict=True)):
        weights = whole_weights(bucket, part, buffer, device=CPU)
        assert {name: whole.shape for name, whole in weights} == SHAPES
        for name, whole in weights:
            assert torch.equal(_cut_of(name, whole, rank, size), _cut_of(name, WEIGHTS[name], rank, size)), name


def test_weights_of_one_shape_and_different_cuts_may_share_an_item() -> None:
    # With Transformer Engine, the first layer's o_proj follows the embedding, and both may be square.
    embedding, output = torch.arange(64.0).view(8, 8), torch.arange(64.0, 128.0).view(8, 8)
    names = ("model.embed_tokens.weight", f"{ATTENTION}.o_proj.weight")
    specs = tuple(spec_of(name, tensor) for name, tensor in zip(names, (embedding, output), strict=True))
    (bucket,) = plan_buckets(specs, bucket_bytes=10**6)
    parts = parts_of(bucket, engine_ranks(2, kv_heads=4))
    buffer = torch.zeros(parts[-1].end, dtype=torch.uint8)
    outgoing = Outgoing(specs=specs, mine=frozenset(names), is_collective=False, weights=lambda _: iter(()))
    outgoing.pack(bucket, iter([(names, (embedding, output))]), buffer, training_rank=0, parts=parts)
    for rank, part in enumerate(parts):
        weights = dict(whole_weights(bucket, part, buffer[part.start : part.end], device=CPU))
        columns = slice(4 * rank, 4 * rank + 4)
        assert torch.equal(weights[names[1]][:, columns], output[:, columns])


class _RankOfTwo:
    """The model of one rank of two, whose loaders copy their cut of a whole weight; ``shift`` elements too far."""

    def __init__(self, rank: int, shift: int = 0) -> None:
        self._rank, self._shift = rank, shift
        self.held = {name: torch.zeros_like(self._cut(name, whole)) for name, whole in WEIGHTS.items()}

    def _cut(self, name: str, whole: torch.Tensor, shift: int = 0) -> torch.Tensor:
        return _cut_of(name, whole, self._rank, 2, shift=shift)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, whole in weights:
            self.held[name].copy_(self._cut(name, whole, self._shift))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_is_loaded_by_a_plan_as_through_the_loaders(rank: int) -> None:
    bucket, parts, buffers = _packed(2)
    model = _RankOfTwo(rank)
    plan = DirectLoad([(bucket, parts[rank])], model.load_weights, device=CPU, parts=2)
    assert plan.obstacle is None
    plan.load(0, buffers[rank])
    for name, held in model.held.items():
        assert torch.equal(held, _cut_of(name, WEIGHTS[name], rank, 2)), name


def test_there_is_no_plan_for_loaders_that_read_more_than_their_cut() -> None:
    bucket, parts, _ = _packed(2)
    plan = DirectLoad([(bucket, parts[1])], _RankOfTwo(1, shift=-1).load_weights, device=CPU, parts=2)
    assert plan.obstacle is not None
    assert plan.obstacle.startswith("the model's loaders do more than copy: ")


@pytest.mark.parametrize(("rank", "shift"), [(0, 0), (1, 0), (0, 1), (1, -1), (1, -2)])
def test_a_read_outside_of_the_cut_is_noted(rank: int, shift: int) -> None:
    bucket, parts, buffers = _packed(2)
    weights = whole_weights(bucket, parts[rank], buffers[rank], device=CPU)
    for name, whole in weights:
        if "proj" not in name:
            continue
        reads = PartReads()
        reads.watch(weights, parts[rank])
        with reads:
            _cut_of(name, whole, rank, 2, shift=shift).clone()
        axis = "columns" if "o_proj" in name or "down_proj" in name else "rows"
        length = max(SHAPES[name]) // 2
        told = None if shift == 0 else f" of {name} outside of the {length} of {2 * length} {axis} that were sent"
        assert reads.outside is told is None or (reads.outside or "").endswith(told or "nothing")


def test_a_watched_weight_is_freed_with_its_last_user() -> None:
    bucket, parts, buffers = _packed(2)
    weights = whole_weights(bucket, parts[0], buffers[0], device=CPU)
    reads = PartReads()
    reads.watch(weights, parts[0])
    storages = [StorageWeakRef(whole.untyped_storage()) for _, whole in weights]
    assert not any(storage.expired() for storage in storages)
    del weights
    assert all(storage.expired() for storage in storages)


def test_another_rank_s_cut_is_outside() -> None:
    bucket, parts, buffers = _packed(2)
    weights = whole_weights(bucket, parts[1], buffers[1], device=CPU)
    reads = PartReads()
    reads.watch(weights, parts[1])
    with reads:
        _cut_of("model.embed_tokens.weight", dict(weights)["model.embed_tokens.weight"], 0, 2).clone()
    assert reads.outside is not None


EXPERTS = torch.randn(5, 24, 8, generator=torch.Generator().manual_seed(0))
OF_EXPERTS = [f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(len(EXPERTS))]
HELD_EXPERTS = {0: [0, 1], 1: [2, 3], 2: [4]}
"""Experts by the rank of three that holds them."""


def _packed_experts() -> tuple[Bucket, list[BucketPart], list[torch.Tensor]]:
    """Returns a bucket of experts and a norm, the parts of three expert-parallel ranks, and each part's memory."""
    norm = torch.arange(8.0)
    specs = [*(spec_of(name, expert) for name, expert in zip(OF_EXPERTS, EXPERTS, strict=True)), spec_of("norm", norm)]
    ((bucket, parts),) = plan_parts(specs, engine_ranks(3, kv_heads=4, expert_parallel=True), bucket_bytes=10**6)
    buffer = torch.full((parts[-1].end,), 7, dtype=torch.uint8)
    outgoing = Outgoing(
        specs=tuple(specs), mine=frozenset([*OF_EXPERTS, "norm"]), is_collective=False, weights=lambda _: iter(())
    )
    items = iter([(tuple(OF_EXPERTS), tuple(EXPERTS.unbind())), (("norm",), (norm,))])
    outgoing.pack(bucket, items, buffer, training_rank=0, parts=parts)
    return bucket, [*parts], [buffer[part.start : part.end] for part in parts]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_loads_its_own_experts_and_gets_no_others(rank: int) -> None:
    bucket, parts, buffers = _packed_experts()
    assert len(buffers[rank]) == 4 * (24 * 8 * len(HELD_EXPERTS[rank]) + 8)
    held, norm = torch.zeros(len(HELD_EXPERTS[rank]), 24, 8), torch.zeros(8)

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, whole in weights:
            if name == "norm":
                norm.copy_(whole)
            elif (expert := OF_EXPERTS.index(name)) in HELD_EXPERTS[rank]:
                held[HELD_EXPERTS[rank].index(expert)].copy_(whole)

    def is_right() -> bool:
        return torch.equal(held, EXPERTS[HELD_EXPERTS[rank]]) and torch.equal(norm, torch.arange(8.0))

    load(iter(whole_weights(bucket, parts[rank], buffers[rank], device=CPU)))
    assert is_right()
    plan = DirectLoad([(bucket, parts[rank])], load, device=CPU, parts=3)
    assert plan.obstacle is None
    held.zero_()
    plan.load(0, buffers[rank])
    assert is_right()


def test_a_read_of_another_ranks_expert_is_noted() -> None:
    bucket, parts, buffers = _packed_experts()
    weights = whole_weights(bucket, parts[2], buffers[2], device=CPU)
    for name, whole in weights:
        reads = PartReads()
        reads.watch(weights, parts[2])
        with reads:
            whole.clone()
        told = f" of {name} outside of the 0 of 24 rows that were sent"
        assert (reads.outside or "").endswith("" if name in ("norm", OF_EXPERTS[4]) else told)
        assert (reads.outside is None) == (name in ("norm", OF_EXPERTS[4]))
