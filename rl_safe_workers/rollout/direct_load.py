"""Weights straight into the model's own tensors, once it is proven that this is what its loaders do.

A model of vLLM takes weights one by one through Python loaders, some 0.2 ms each: seconds for thousands of experts. All
that the loaders of an unquantised model do is copy. So they are watched once, without being let to write anything, and
what they would have copied where becomes a plan. The first update goes through the loaders; if afterwards every
destination holds what was sent, later updates follow the plan, some launches for each bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_safe_workers.rollout.protocol import Bucket

Weights = Iterator[tuple[str, torch.Tensor]]
logger = logging.getLogger(__name__)

_AT_ONCE = 2**24
"""Elements whose bits are widened to 64 at a time."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unpack(bucket: Bucket, buffer: torch.Tensor) -> Weights:
    """Yields the weights that lie in a bucket's buffer, ``[bucket.size_bytes]`` of uint8, as views."""
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        flat = buffer[offset : offset + spec.size_bytes].view(getattr(torch, spec.dtype))
        yield spec.name, flat.view(spec.shape)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a part of a bucket into the model."""

    target: torch.Tensor
    """A view of one of the model's tensors."""
    stride: tuple[int, ...]
    """Of the source, in elements of the target's dtype; its shape is the target's."""
    offset: int
    """Of the source in the bucket, in such elements."""

    def source(self, buffer: torch.Tensor) -> torch.Tensor:
        """The part of a bucket's buffer that it copies."""
        return buffer.view(self.target.dtype).as_strided(self.target.shape, self.stride, self.offset)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is copied out of a buffer, and lets nothing be written."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = buffer.untyped_storage().data_ptr()
        self.copies: list[Copy] = []
        self.is_plain = True
        """Whether nothing was written but copies of the same dtype and shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        target = args[0]
        source = args[1] if func is torch.ops.aten.copy_.default else None
        if (
            isinstance(source, torch.Tensor)
            and source.untyped_storage().data_ptr() == self._storage
            and (source.dtype, source.shape) == (target.dtype, target.shape)
        ):
            self.copies.append(Copy(target, tuple(map(int, source.stride())), int(source.storage_offset())))
        else:
            self.is_plain = False
        return target


class DirectLoad:
    """The plan for a model's weights: first learned, then proven, then followed."""

    def __init__(self, buckets: list[Bucket], load: Callable[[Weights], Any], *, device: torch.device) -> None:
        """Watches the model's loaders. Nothing is written.

        Args:
            buckets: What an update consists of.
            load: The model's ``load_weights``.
            device: Of the model.
        """
        self._copies: list[list[Copy]] = []
        self._sent: list[torch.Tensor] = []
        self._is_plain = all(self._learn(bucket, load, device) for bucket in buckets)

    def _learn(self, bucket: Bucket, load: Callable[[Weights], Any], device: torch.device) -> bool:
        buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8, device=device)
        weights = list(unpack(bucket, buffer))
        watch = _Watch(buffer)
        try:
            with torch.no_grad(), watch:
                load(iter(weights))
        except Exception as error:
            # As where weights were packed and their own tensors are empty since: loaders refuse those.
            logger.info("the model's loaders do not work in place: %s: %s", type(error).__name__, error)
            return False
        self._copies.append(watch.copies)
        copied = sum(copy.target.nbytes for copy in watch.copies)
        return bool(watch.is_plain and copied == sum(spec.size_bytes for spec in bucket.specs))

    def note(self, number: int, buffer: torch.Tensor) -> None:
        """Remembers what a bucket held that goes through the loaders; for `is_proven`."""
        if self._is_plain:
            self._sent += [_digest(copy.source(buffer)) for copy in self._copies[number]]

    def is_proven(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether, after an update through the loaders, every destination holds what was sent, by a checksum.

        Args:
            parameters: Of the model, as they are now: a destination must still be part of one.
        """
        sent, self._sent = self._sent, []
        if not self._is_plain or len(sent) != sum(map(len, self._copies)):
            return False
        targets = [copy.target for copies in self._copies for copy in copies]
        alive = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        if any(target.untyped_storage().data_ptr() not in alive for target in targets):
            return False
        held = [_digest(target) for target in targets]
        return not targets or bool(torch.equal(torch.stack(sent), torch.stack(held)))

    @torch.no_grad()
    def load(self, number: int, buffer: torch.Tensor) -> None:
        """Copies a bucket into the model."""
        copies = self._copies[number]
        if copies:
            torch._foreach_copy_([c.target for c in copies], [c.source(buffer) for c in copies])


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number that depends on every bit and its place: sum of ``bits * (2 * place + 1)``, modulo 2 ** 64."""
    bits = tensor.contiguous().view(-1).view(_INTEGER[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _AT_ONCE):
        part = bits[start : start + _AT_ONCE].to(torch.int64)
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=bits.device)
        total += (part * (2 * places + 1)).sum()
    return total
