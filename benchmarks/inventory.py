"""Makes the tensors that the benchmark ``save`` writes, in Megatron's form of sharded tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

STATES = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
"""Prefixes of the weights and of the two moments of Adam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeInventory:
    """Weights and moments of an MoE model. Each expert's matrix is a sharded tensor, as in Megatron's SequentialMLP.

    With the sizes below, on four ranks at EP2, each rank has 18,720 sharded tensors. That is the inventory of
    Qwen3-30B-A3B at hidden size 16.
    """

    layers: int = 48
    experts: int = 128
    hidden: int = 16

    def shards(self, rank: int, *, ep: int, expert_dp: int) -> dict[str, ShardedTensor]:
        """Returns one rank's state dict. Every replica of a tensor has the same values.

        Args:
            rank: The rank, one of ``ep * expert_dp``.
            ep: Expert-parallel size. The rank's place in it is ``rank % ep``.
            expert_dp: Size of the expert data-parallel group.
        """
        place, replica = rank % ep, rank // ep
        found: dict[str, ShardedTensor] = {}
        for number, state in enumerate(STATES):
            for layer in range(self.layers):
                prefix = f"{state}decoder.layers.{layer}."
                found |= self._experts(f"{prefix}mlp.experts.experts.", number, layer, place, replica, ep)
                found |= self._dense(prefix, number, layer, rank)
        return found

    def _experts(
        self, prefix: str, number: int, layer: int, place: int, replica: int, ep: int
    ) -> dict[str, ShardedTensor]:
        local = self.experts // ep
        found = {}
        for matrix, shape in {"linear_fc1": (2 * self.hidden, self.hidden), "linear_fc2": (self.hidden,) * 2}.items():
            values = _values((self.experts, *shape), number, layer, matrix)
            for expert in range(place * local, (place + 1) * local):
                found[f"{prefix}{expert}.{matrix}.weight"] = ShardedTensor.from_rank_offsets(
                    f"{prefix}{matrix}.weight",
                    values[expert].clone(),
                    (0, expert, self.experts),
                    replica_id=(0, 0, replica),
                    prepend_axis_num=1,
                )
        return found

    def _dense(self, prefix: str, number: int, layer: int, rank: int) -> dict[str, ShardedTensor]:
        shapes = {
            f"{prefix}self_attention.linear_qkv.weight": (2 * self.hidden, self.hidden),
            f"{prefix}mlp.router.weight": (self.experts, self.hidden),
        }
        return {
            key: ShardedTensor.from_rank_offsets(key, _values(shape, number, layer, key), replica_id=(0, 0, rank))
            for key, shape in shapes.items()
        }


def _values(shape: tuple[int, ...], number: int, layer: int, name: str) -> torch.Tensor:
    """Returns values that distinguish every tensor and element from every other."""
    seed = sum(name.encode()) * 1_000_003 + layer * 101 + number
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def large_tensors(rank: int, *, ranks: int, count: int, mib: int) -> dict[str, ShardedTensor]:
    """Returns one rank's part of ``count`` matrices. Every rank has ``mib`` MiB of each."""
    rows, columns = mib * 2**20 // 4 // 1024, 1024
    return {
        f"layer.{i}.weight": ShardedTensor.from_rank_offsets(
            f"layer.{i}.weight", torch.full((rows, columns), rank + i / count), (0, rank, ranks)
        )
        for i in range(count)
    }
