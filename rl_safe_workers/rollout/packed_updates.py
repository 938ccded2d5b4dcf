"""Packs and loads weight updates as a few large tensors: a plan, then one tensor for each bucket of weights.

It is for hosts whose transfer takes named tensors and passes them on unchanged. Such a host needs some 0.2 ms for each
of thousands of small weights. Imports no vLLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.rollout.cuts import ONLY_RANK, BucketPart, parts_of
from rl_safe_workers.rollout.direct_load import DirectLoad, LearnedLoad
from rl_safe_workers.rollout.packing import NamedTensor, places_in
from rl_safe_workers.rollout.protocol import ALIGNMENT_BYTES, ITEM_BYTES, Bucket, WeightSpec, bucket_of

_PLAN, _BUCKET = "rl_safe.plan", "rl_safe.bucket."
"""Names of the tensors of an update. No HF weight has such a name."""


def plan_tensor(buckets: Sequence[Bucket], *, device: torch.device) -> NamedTensor:
    """Returns the first tensor of an update: it tells which weights each bucket has.

    Its size keeps the tensors after it aligned in a host's memory.

    Returns:
        Name and tensor. The tensor is uint8, ``[multiple of 16]``, on ``device``.
    """
    text = json.dumps([[[spec.name, spec.dtype, spec.shape] for spec in bucket.specs] for bucket in buckets]).encode()
    padded = text.ljust(-(-len(text) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return _PLAN, torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)


def bucket_tensor(number: int, buffer: torch.Tensor) -> NamedTensor:
    """Returns the tensor of a bucket.

    Args:
        number: The bucket's number in the plan.
        buffer: ``[size_bytes of the bucket]`` of uint8.
    """
    return f"{_BUCKET}{number}", buffer


def _read_plan(text: bytes) -> list[Bucket]:
    try:
        return [bucket_of([_spec(*entry) for entry in entries]) for entries in json.loads(text)]
    except (ValueError, TypeError, KeyError) as error:
        raise WeightSyncError(f"the plan of a weight update cannot be read: {error!r}") from None


def _spec(name: Any, dtype: Any, shape: Any) -> WeightSpec:
    if not isinstance(name, str) or dtype not in ITEM_BYTES or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{name!r:.100} has dtype {dtype!r:.20} and shape {shape!r:.100}")
    return WeightSpec(name=name, dtype=dtype, shape=tuple(shape))


class PackedUpdates:
    """Loads packed updates into a vLLM model: through its loaders until a direct way is proven."""

    def __init__(self, *, parts: int) -> None:
        """Stores the number of ranks. The first update brings the plan.

        Args:
            parts: Number of ranks over which the engine spreads its weights. Each gets all weights.
        """
        self._parts = parts
        self._loading = LearnedLoad()
        self._text: bytes | None = None
        self._buckets: Sequence[tuple[Bucket, BucketPart]] = ()
        self._missing: set[int] | None = None
        """Numbers of the buckets that have not arrived yet in this update; None outside of packed updates."""

    @property
    def obstacle(self) -> str | None:
        """The reason why updates use the model's loaders; None if they are copied directly into the model."""
        return self._loading.obstacle

    @property
    def specs(self) -> tuple[WeightSpec, ...]:
        """The weights of the plan."""
        return tuple(spec for bucket, _ in self._buckets for spec in bucket.specs)

    @staticmethod
    def is_packed(weights: Sequence[NamedTensor]) -> bool:
        """Returns True if these tensors are part of a packed update."""
        return any(name == _PLAN or name.startswith(_BUCKET) for name, _ in weights)

    def load(
        self,
        weights: Sequence[NamedTensor],
        models: Sequence[torch.nn.Module],
        load: Callable[[Iterator[NamedTensor]], object],
    ) -> None:
        """Loads some tensors of an update, in their order.

        Args:
            weights: Name and tensor of each. The tensors may be changed after the call.
            models: The models into which ``load`` writes.
            load: Loads whole HF weights.

        Raises:
            WeightSyncError: If a tensor does not belong to the plan.
        """
        for name, tensor in weights:
            if name == _PLAN:
                self._begin(tensor, models, load)
            else:
                self._load_bucket(name, tensor, load)

    def _begin(
        self, text: torch.Tensor, models: Sequence[torch.nn.Module], load: Callable[[Iterator[NamedTensor]], object]
    ) -> None:
        plan = text.cpu().numpy().tobytes()
        if plan != self._text:
            self._buckets = [(bucket, parts_of(bucket, (ONLY_RANK,))[0]) for bucket in _read_plan(plan)]
            self._text = plan
            self._loading.forget()
        self._missing = set(range(len(self._buckets)))
        learn = partial(DirectLoad, self._buckets, load, device=text.device, parts=self._parts)
        self._loading.begin(models, learn)

    def _load_bucket(self, name: str, buffer: torch.Tensor, load: Callable[[Iterator[NamedTensor]], object]) -> None:
        number = int(name.removeprefix(_BUCKET)) if name.removeprefix(_BUCKET).isdecimal() else -1
        if self._missing is None or number not in self._missing:
            raise WeightSyncError(f"tensor {name!r:.100} came twice in a weight update, or its plan has no such bucket")
        bucket, _ = self._buckets[number]
        if buffer.dtype != torch.uint8 or math.prod(buffer.shape) != bucket.size_bytes:
            raise WeightSyncError(
                f"bucket {number} of a weight update has {buffer.nbytes} bytes, and its plan says {bucket.size_bytes}"
            )
        self._missing.remove(number)
        if not self._loading.load(number, buffer):
            self._loading.note(number, buffer)
            load(zip([spec.name for spec in bucket.specs], places_in(bucket, buffer), strict=True))

    def end(self, parameters: Iterable[torch.Tensor]) -> None:
        """Ends an update, after the model's layers have converted their weights. Does nothing after an unpacked update.

        Args:
            parameters: The parameters of all models.

        Raises:
            WeightSyncError: If a bucket has not arrived.
        """
        missing, self._missing = self._missing, None
        if missing is None:
            return
        if missing:
            raise WeightSyncError(f"{len(missing)} of {len(self._buckets)} buckets of a weight update did not come")
        self._loading.end(parameters)

    def abandon(self) -> None:
        """Forgets an update that has failed half-way. The next one learns the direct way anew."""
        self._missing = None
        self._loading.forget()
