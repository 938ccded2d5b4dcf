"""What a weight sync sends: every HF weight once, from a training rank that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.models.own_weights import OwnWeight
from rl_safe_workers.rollout.packing import DTYPES, places
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec

Weights = Iterator[tuple[str, torch.Tensor]]


_NOTHING = ("nothing", torch.empty(0))


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a dtype without the prefix, e.g. ``"float32"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """All weights in the order in which they are sent, and those among them that this rank takes part in making."""

    specs: tuple[WeightSpec, ...]
    mine: frozenset[str]
    weights: Callable[[], Weights]
    """Starts over: yields those of this rank, in the order of ``specs``. May be collective at each item."""

    @classmethod
    def of_all(cls, export: Callable[[], Weights]) -> Outgoing:
        """Of an export that brings every weight to every rank; rank 0 sends. Collective over: the training world."""
        specs = tuple(
            WeightSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
            for name, tensor in export()
        )
        return cls(specs=specs, mine=frozenset(spec.name for spec in specs), weights=export)

    @classmethod
    def of_own(cls, own: Sequence[OwnWeight], *, training_rank: int, training_size: int) -> Outgoing:
        """Of what each rank makes of its own parameters. Collective over: the training world.

        A weight goes with the others of its kind, such as the same matrix of all experts of a layer, in the order of
        the ranks that send them: vLLM holds those in one tensor, and a layer waits for all.

        Raises:
            WeightSyncError: If two ranks would send the same weight.
        """
        mine = [
            (weight.place, training_rank, number, name, shape, dtype_name(weight.dtype))
            for number, weight in enumerate(own)
            if weight.is_source
            for name, shape in zip(weight.names, weight.shapes, strict=True)
        ]
        everyone: list[list[Any]] = [[]] * training_size
        dist.all_gather_object(everyone, mine, group=dist.group.WORLD)
        # Stable: the weights of one parameter stay in their order.
        entries = sorted(chain.from_iterable(everyone), key=lambda entry: entry[:3])
        specs = tuple(
            WeightSpec(name=name, dtype=dtype, shape=shape, source=source)
            for _, source, _, name, shape, dtype in entries
        )
        if len({spec.name for spec in specs}) < len(specs):
            raise WeightSyncError("two training ranks would send the same weight")
        in_order = sorted(own, key=lambda weight: weight.place)

        def weights() -> Weights:
            for weight in in_order:
                yield from zip(weight.names, weight.make(), strict=True)

        return cls(specs=specs, mine=frozenset(name for weight in own for name in weight.names), weights=weights)

    def pack(self, bucket: Bucket, weights: Weights, *, training_rank: int, device: torch.device) -> torch.Tensor:
        """Returns room for a bucket, ``[bucket.size_bytes]`` of uint8; with the weights in it on its source.

        Args:
            bucket: The next one.
            weights: Of this rank, as `weights` yields them; those of the bucket are taken.
            training_rank: This rank.
            device: Where the room is.

        Raises:
            WeightSyncError: If a weight is not what was announced.
        """
        buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8, device=device)
        tensors = [self._take(spec, weights) for spec in bucket.specs if spec.name in self.mine]
        if bucket.source == training_rank and tensors:
            # One launch for all; a copy_ for each expert costs more than the transfer.
            torch._foreach_copy_(list(places(bucket, buffer)), tensors)
        return buffer

    @staticmethod
    def _take(spec: WeightSpec, weights: Weights) -> torch.Tensor:
        name, tensor = next(weights, _NOTHING)
        if name != spec.name or tensor.shape != spec.shape or tensor.dtype != DTYPES[spec.dtype]:
            raise WeightSyncError(
                f"weight {name} {dtype_name(tensor.dtype)} {tuple(tensor.shape)} was announced as "
                f"{spec.name} {spec.dtype} {spec.shape}"
            )
        return tensor
