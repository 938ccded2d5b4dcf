"""How many sharded tensors one chunk of a save has."""

from __future__ import annotations

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from rl_safe_workers.checkpoint.save.save_plan import JOINED_BYTES, Replicas, make_plan
from rl_safe_workers.checkpoint.state.pieces import coalesce

EXPERTS = 8


def _experts(rows: int) -> list[ShardedTensor]:
    """Returns experts whose gated matrices are two sharded tensors each, of 4 KiB a row."""
    halves = 2
    return [
        ShardedTensor.from_rank_offsets(
            "experts.linear_fc1.weight",
            torch.full((rows, 1024), float(expert * halves + half)),
            (0, expert, EXPERTS),
            (1, half, halves),
            prepend_axis_num=1,
        )
        for expert in range(EXPERTS)
        for half in range(halves)
    ]


def _chunks(shards: list[ShardedTensor]) -> list[tuple[int, ...]]:
    (entry,) = make_plan(shards, [], Replicas()).holdings.entries
    return [shape for _, shape in entry.chunks]


def test_small_experts_are_one_chunk() -> None:
    assert _chunks(_experts(rows=1)) == [(EXPERTS, 2, 1024)]


def test_larger_experts_are_joined_up_to_the_limit() -> None:
    rows = JOINED_BYTES // 4096 // 4
    assert _chunks(_experts(rows)) == [(2, 2 * rows, 1024)] * (EXPERTS // 2)


def test_each_sharded_tensor_of_large_experts_is_a_chunk() -> None:
    rows = JOINED_BYTES // 4096
    assert _chunks(_experts(rows)) == [(1, rows, 1024)] * (2 * EXPERTS)


@pytest.mark.parametrize("rows", [1, JOINED_BYTES // 4096 // 4, JOINED_BYTES // 4096])
def test_a_plan_writes_every_row_as_it_is(rows: int) -> None:
    shards = _experts(rows)
    plan = make_plan(shards, [], Replicas())
    whole = torch.empty(shards[0].global_shape)
    for piece, taken in plan.writes:
        tensor = piece.tensor([shard.data for shard in shards], taken)
        place = tuple(slice(at, at + n) for at, n in zip(piece.offset, piece.shape, strict=True))
        whole[place][taken] = tensor
    for expert in range(EXPERTS):
        halves = whole[expert].view(2, -1)
        assert halves.amin(1).tolist() == halves.amax(1).tolist() == [2 * expert, 2 * expert + 1]


def test_a_load_joins_without_a_limit() -> None:
    assert [piece.shape for piece in coalesce(_experts(JOINED_BYTES // 4096))] == [(EXPERTS, 512, 1024)]
