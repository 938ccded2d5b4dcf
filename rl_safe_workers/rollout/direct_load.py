"""Weights straight into the model's own tensors, once it is proven that this is what its loaders do.

A model of vLLM takes weights one by one through Python loaders, some 0.2 ms each: seconds for thousands of experts. All
that the loaders of an unquantised model do is copy. So they are watched once, without being let to write anything, and
what they would have copied where becomes a plan. The first update goes through the loaders; if afterwards every
destination holds what was sent, later updates follow the plan, some launches for each bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_safe_workers.compat.torch_copies import copy_each
from rl_safe_workers.rollout.packing import unpack
from rl_safe_workers.rollout.protocol import Bucket

Weights = Iterator[tuple[str, torch.Tensor]]

_AT_ONCE = 2**24
"""Elements whose bits are widened to 64 at a time."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a part of a bucket into the model."""

    target: torch.Tensor
    """A view of one of the model's tensors."""
    stride: tuple[int, ...]
    """Stride of the source, in elements of the target's dtype; its shape is the target's."""
    offset: int
    """Offset of the source in the bucket, in such elements."""

    def source(self, buffer: torch.Tensor) -> torch.Tensor:
        """The part of a bucket's buffer that it copies."""
        return buffer.view(self.target.dtype).as_strided(self.target.shape, self.stride, self.offset)

    def joined(self, following: Copy) -> Copy | None:
        """This copy and the one after it as one, if what they read and what they write lies side by side."""
        target, other = self.target, following.target
        if not (
            target.dtype == other.dtype
            and target.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            and other.storage_offset() == target.storage_offset() + target.numel()
            and following.offset == self.offset + target.numel()
            and self.stride == target.stride()
            and following.stride == other.stride()
            and target.is_contiguous()
            and other.is_contiguous()
        ):
            return None
        both = target.as_strided((target.numel() + other.numel(),), (1,), target.storage_offset())
        return Copy(both, (1,), self.offset)


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """Fewer copies that do the same: all experts of a layer come side by side, and vLLM holds them in one tensor."""
    found: list[Copy] = []
    for copy in copies:
        both = found[-1].joined(copy) if found else None
        if both is None:
            found.append(copy)
        else:
            found[-1] = both
    return found


_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""Such as of rows that only pad a vocabulary."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is copied out of a buffer, and lets nothing be written."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = buffer.untyped_storage().data_ptr()
        self.copies: list[Copy] = []
        self.fills: list[tuple[torch.Tensor, float]] = []
        """Views of the model's tensors and the constants that they get."""
        self.other: str | None = None
        """Other writes than copies of the same dtype and shape, and constants; None if there were none."""

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
        elif func in _FILLS:
            self.fills.append((target, args[1] if len(args) > 1 else 0))
        else:
            self.other = f"{func} of {tuple(target.shape)} {target.dtype}"
        return target


class DirectLoad:
    """The plan for a model's weights: first learned, then proven, then followed."""

    def __init__(self, buckets: Sequence[Bucket], load: Callable[[Weights], Any], *, device: torch.device) -> None:
        """Watches the model's loaders. Nothing is written.

        Args:
            buckets: What an update consists of.
            load: The model's ``load_weights``.
            device: Of the model.
        """
        self.copies: list[list[Copy]] = []
        """Copies of each bucket."""
        self._fills: list[list[tuple[torch.Tensor, float]]] = []
        self._sent: list[torch.Tensor] = []
        self.obstacle: str | None = None
        """Why the plan is of no use; None while it may be."""
        for bucket in buckets:
            self.obstacle = self.obstacle or self._learn(bucket, load, device)

    def _learn(self, bucket: Bucket, load: Callable[[Weights], Any], device: torch.device) -> str | None:
        """Learns what to copy out of a bucket; returns what stands in the way."""
        buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8, device=device)
        weights = list(unpack(bucket, buffer))
        watch = _Watch(buffer)
        try:
            with torch.no_grad(), watch:
                load(iter(weights))
        except Exception as error:
            # As where weights were packed and their own tensors are empty since: loaders refuse those.
            return f"the model's loaders do not work in place: {type(error).__name__}: {error}"
        if watch.other is not None:
            return f"the model's loaders do more than copy: {watch.other}"
        self.copies.append(joined(watch.copies))
        self._fills.append([(target, value) for target, value in watch.fills if target.numel()])
        copied, sent = sum(copy.target.nbytes for copy in watch.copies), sum(spec.size_bytes for spec in bucket.specs)
        return None if copied == sent else f"the model's loaders copy {copied} of {sent} bytes"

    def note(self, number: int, buffer: torch.Tensor) -> None:
        """Remembers what a bucket held that goes through the loaders; for `check`."""
        if self.obstacle is None:
            self._sent += [_digest(copy.source(buffer)) for copy in self.copies[number]]

    def check(self, parameters: Iterable[torch.Tensor]) -> str | None:
        """Compares checksums of what was sent with those of every destination, after an update through the loaders.

        Args:
            parameters: Of the model, as they are now: a destination must still be part of one.

        Returns:
            Why the plan is of no use; None if it is proven.
        """
        sent, self._sent = self._sent, []
        if self.obstacle is None:
            self.obstacle = self._difference(sent, {p.untyped_storage().data_ptr() for p in parameters})
        return self.obstacle

    def _difference(self, sent: list[torch.Tensor], alive: set[int]) -> str | None:
        targets = [copy.target for copies in self.copies for copy in copies]
        if len(sent) != len(targets):
            return f"{len(sent)} parts were sent, of {len(targets)}"
        moved = sum(target.untyped_storage().data_ptr() not in alive for target in targets)
        if moved:
            return f"{moved} of {len(targets)} parts are no longer the model's after an update"
        changed = sum(int(before.ne(_digest(target))) for before, target in zip(sent, targets, strict=True))
        return f"{changed} of {len(targets)} parts are held in another form than sent" if changed else None

    @torch.no_grad()
    def load(self, number: int, buffer: torch.Tensor) -> None:
        """Copies a bucket into the model."""
        # A fill after a copy of the same elements would have shown in the checksums, so these may come first.
        for target, value in self._fills[number]:
            target.fill_(value)
        copies = self.copies[number]
        copy_each([c.target for c in copies], [c.source(buffer) for c in copies])


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number that depends on every bit and its place: sum of ``bits * (2 * place + 1)``, modulo 2 ** 64."""
    bits = tensor.contiguous().view(-1).view(_INTEGER[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _AT_ONCE):
        part = bits[start : start + _AT_ONCE].to(torch.int64)
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=bits.device)
        total += (part * (2 * places + 1)).sum()
    return total
