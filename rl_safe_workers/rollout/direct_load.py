"""Copies weights directly into the model's tensors, after a proof that the model's loaders do nothing else.

A vLLM model loads weights one by one through Python loaders, at about 0.2 ms each: seconds for thousands of experts.
The loaders of an unquantised model only copy. This module runs them once with all writes blocked, and records the
copies that they would make as a plan. The first update uses the loaders. If every destination then holds the data that
was sent, later updates follow the plan, with a few kernel launches for each bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_safe_workers.compat.torch_copies import copy_each
from rl_safe_workers.compat.torch_dispatch import TorchDispatchMode
from rl_safe_workers.rollout.cuts import BucketPart
from rl_safe_workers.rollout.digest import digests_of
from rl_safe_workers.rollout.packing import NamedTensor, whole_weights
from rl_safe_workers.rollout.part_reads import view_of
from rl_safe_workers.rollout.protocol import Bucket

logger = logging.getLogger(__name__)

_NOT_TRIED, _NOT_PROVEN = "there was no update so far", "the first update goes through them"
_MOVED = "the model's weights have moved"


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a part of a bucket into the model."""

    target: torch.Tensor
    """A view of one of the model's tensors."""
    stride: tuple[int, ...]
    """Stride of the source, in elements of the target's dtype. The source has the target's shape."""
    offset: int
    """Offset of the source in the bucket, in elements of the target's dtype."""

    def source(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the part of a bucket's buffer that is copied, as a view with the target's shape.

        Args:
            buffer: The buffer, as a flat tensor of the target's dtype.
        """
        return buffer.as_strided(self.target.shape, self.stride, int(buffer.storage_offset()) + self.offset)

    def joined_with(self, following: Copy) -> Copy | None:
        """Returns this copy and the next one as a single copy; None if their sources or targets are not adjacent."""
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


def join_adjacent(copies: Iterable[Copy]) -> list[Copy]:
    """Returns fewer copies with the same effect.

    All experts of a layer are adjacent in a bucket, and vLLM holds them in one tensor.
    """
    found: list[Copy] = []
    for copy in copies:
        both = found[-1].joined_with(copy) if found else None
        if both is None:
            found.append(copy)
        else:
            found[-1] = both
    return found


_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""Operators that fill a tensor with a constant, for example rows that only pad a vocabulary."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the copies that loaders make from the weights of a bucket. Prevents all writes."""

    def __init__(self, bucket: Bucket, part: BucketPart, weights: Sequence[NamedTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bucket, self._part = bucket, part
        self._numbers = {weight.untyped_storage().data_ptr(): number for number, (_, weight) in enumerate(weights)}
        self.copies: list[Copy] = []
        self.fills: list[tuple[torch.Tensor, float]] = []
        """Views of the model's tensors, each with the constant that is written to it."""
        self.other: str | None = None
        """Description of the last write that is neither a constant nor a copy with equal dtype and shape out of this
        rank's part; None if there was no such write."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        target = args[0]
        source = args[1] if func is torch.ops.aten.copy_.default else None
        if isinstance(source, torch.Tensor) and (copy := self._copy(target, source)) is not None:
            self.copies.append(copy)
        elif func in _FILLS:
            self.fills.append((target, args[1] if len(args) > 1 else 0))
        else:
            self.other = f"{func} of {tuple(target.shape)} {target.dtype}"
        return target

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy | None:
        """Returns a write as a copy out of this rank's part of a bucket; None if the write is of another kind."""
        number = self._numbers.get(source.untyped_storage().data_ptr())
        if number is None or (source.dtype, source.shape) != (target.dtype, target.shape):
            return None
        cut, view = self._part.cuts[number], view_of(source)
        if cut is not None and source.numel():
            held = cut.within(self._bucket.specs[number].shape, view)
            if held is None:
                return None
            view = held
        return Copy(target, view.stride, view.offset + self._part.bucket.offsets[number] // source.itemsize)


class DirectLoad:
    """A plan to load a model's weights. It is first learned, then proven, then used."""

    def __init__(
        self,
        buckets: Sequence[tuple[Bucket, BucketPart]],
        load: Callable[[Iterator[NamedTensor]], Any],
        *,
        device: torch.device,
        parts: int = 1,
    ) -> None:
        """Watches the model's loaders, without writing to the model.

        Args:
            buckets: All buckets of an update, each with the part that this rank gets.
            load: The model's ``load_weights``.
            device: Device of the model.
            parts: Number of ranks over which the engine spreads its weights.
        """
        self.copies: list[list[Copy]] = []
        """The copies of each bucket."""
        self._fills: list[list[tuple[torch.Tensor, float]]] = []
        self._sent: list[torch.Tensor] = []
        self.obstacle: str | None = None
        """The reason why the plan cannot be used; None while no reason is known."""
        self._copied_bytes = 0
        for bucket, part in buckets:
            self.obstacle = self.obstacle or self._learn(bucket, part, load, device)
        # A rank may get a whole weight but hold only a share of it. It holds nothing of other ranks' experts.
        copied, sent = self._copied_bytes, sum(sum(part.bucket.sizes) for _, part in buckets)
        if self.obstacle is None and not sent // parts <= copied <= sent:
            self.obstacle = f"the model's loaders copy {copied} of {sent} bytes"

    def _learn(
        self, bucket: Bucket, part: BucketPart, load: Callable[[Iterator[NamedTensor]], Any], device: torch.device
    ) -> str | None:
        """Learns the copies of a bucket. Returns the reason why the plan cannot be used; None if there is none."""
        try:
            weights = whole_weights(bucket, part, None, device=device)
            watch = _Watch(bucket, part, weights)
            with torch.no_grad(), watch:
                load(iter(weights))
        except Exception as error:
            # For example, there is no memory for the weights. Or a layer has packed its weights and emptied its own
            # tensors, and the loaders refuse empty tensors.
            return f"the model's loaders do not work in place: {type(error).__name__}: {error}"
        if watch.other is not None:
            return f"the model's loaders do more than copy: {watch.other}"
        self.copies.append(join_adjacent(watch.copies))
        self._fills.append([(target, value) for target, value in watch.fills if target.numel()])
        self._copied_bytes += sum(copy.target.nbytes for copy in watch.copies)
        return None

    def note(self, number: int, buffer: torch.Tensor) -> None:
        """Records checksums of a bucket that goes through the loaders, for `check`.

        Args:
            number: The bucket's number.
            buffer: ``[part.bucket.size_bytes]``, uint8.
        """
        if self.obstacle is None and self.copies[number]:  # another rank may have all experts of a bucket
            self._sent.append(digests_of(_sources(self.copies[number], buffer)))

    def check(self, parameters: Iterable[torch.Tensor]) -> str | None:
        """Compares the checksums of the sent data with those of every destination, after an update by the loaders.

        Args:
            parameters: The model's current parameters. A destination must still be part of one of them.

        Returns:
            The reason why the plan cannot be used; None if the plan is proven.
        """
        sent, self._sent = self._sent, []
        if self.obstacle is None:
            self.obstacle = self._difference(sent, parameters)
        return self.obstacle

    @property
    def _targets(self) -> list[torch.Tensor]:
        return [copy.target for copies in self.copies for copy in copies]

    def moved(self, parameters: Iterable[torch.Tensor]) -> int:
        """Returns the number of destinations that are not part of the model's parameters any more."""
        alive = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        return sum(target.untyped_storage().data_ptr() not in alive for target in self._targets)

    def _difference(self, sent: list[torch.Tensor], parameters: Iterable[torch.Tensor]) -> str | None:
        targets = self._targets
        parts = sum(map(len, sent))
        if parts != len(targets):
            return f"{parts} parts were sent, of {len(targets)}"
        if moved := self.moved(parameters):
            return f"{moved} of {len(targets)} parts are no longer the model's after an update"
        changed = int(torch.cat(sent).ne(digests_of(targets)).sum()) if sent else 0
        return f"{changed} of {len(targets)} parts are held in another form than sent" if changed else None

    @torch.no_grad()
    def load(self, number: int, buffer: torch.Tensor) -> None:
        """Copies a bucket into the model.

        Args:
            number: The bucket's number.
            buffer: ``[part.bucket.size_bytes]``, uint8.
        """
        # Fills may come first: a fill after a copy to the same elements would have changed the checksums.
        for target, value in self._fills[number]:
            target.fill_(value)
        copies = self.copies[number]
        copy_each([copy.target for copy in copies], _sources(copies, buffer))


class LearnedLoad:
    """Decides how the weights of updates get into a model: through its loaders, or by a proven `DirectLoad`.

    Attributes:
        obstacle: The reason why updates use the model's loaders; None if they are copied directly into the model.
    """

    def __init__(self) -> None:
        """Starts without a plan."""
        self.obstacle: str | None = _NOT_TRIED
        self._plan: DirectLoad | None = None
        self._is_tried = False

    def forget(self, why: str = _NOT_TRIED) -> None:
        """Forgets the plan, for example because an update has failed half-way. The next update learns it anew.

        Args:
            why: The new `obstacle`.
        """
        self.obstacle, self._plan, self._is_tried = why, None, False

    def begin(self, models: Sequence[torch.nn.Module], learn: Callable[[], DirectLoad]) -> None:
        """Prepares an update. Learns the plan if this has not been tried, or if the model's weights have moved.

        Args:
            models: The models into which the loaders write.
            learn: Makes the plan.
        """
        if self.obstacle is None:
            self._forget_if_moved(parameter for model in models for parameter in model.parameters())
        if self._is_tried:
            return
        self._is_tried = True
        self.obstacle = next(filter(None, map(_computes, models)), None)
        if self.obstacle is None:
            self._plan = learn()
            self.obstacle = self._plan.obstacle or _NOT_PROVEN

    def load(self, number: int, buffer: torch.Tensor) -> bool:
        """Copies a bucket into the model if the plan is proven. Returns False if the loaders must load it.

        Args:
            number: The bucket's number.
            buffer: ``[part.bucket.size_bytes]``, uint8.
        """
        if self._plan is None or self.obstacle is not None:
            return False
        self._plan.load(number, buffer)
        return True

    def note(self, number: int, buffer: torch.Tensor) -> None:
        """Records checksums of a bucket that goes through the loaders.

        Args:
            number: The bucket's number.
            buffer: ``[part.bucket.size_bytes]``, uint8.
        """
        if self._plan is not None:
            self._plan.note(number, buffer)

    def end(self, parameters: Iterable[torch.Tensor]) -> None:
        """Ends an update: checks a new plan, and forgets a proven plan if the model's weights have moved.

        Under some hosts, layers convert their weights even after direct copies. Such a conversion may move the weights.

        Args:
            parameters: The model's parameters, after its layers have converted them.
        """
        if self._plan is None:
            return
        if self.obstacle is None:
            self._forget_if_moved(parameters)
            return
        self.obstacle = self._plan.check(parameters)
        if self.obstacle is not None:
            self._plan = None
        logger.info(
            "weight updates go %s",
            "straight into the model" if self.obstacle is None else f"through the model's loaders: {self.obstacle}",
        )

    def _forget_if_moved(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forgets a proven plan if one of its destinations is no longer part of the model's parameters."""
        if self._plan is not None and self._plan.moved(parameters):
            self.forget(_MOVED)


def _computes(model: torch.nn.Module) -> str | None:
    """Looks for a layer that computes other values from its weights, as quantised layers and latent attention do.

    Returns a sentence that names the first such layer. Returns None if the model has no such layer.
    """
    for module in model.modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method != "NoneType" and not method.startswith("Unquantized"):
            return f"{method} computes from the weights"
        if "MLA" in type(module).__name__:
            return f"{type(module).__name__} computes from the weights"
    return None


def _sources(copies: Sequence[Copy], buffer: torch.Tensor) -> list[torch.Tensor]:
    """Returns the part of a bucket's buffer that each copy reads."""
    views = {dtype: buffer.view(dtype) for dtype in {copy.target.dtype for copy in copies}}
    return [copy.source(views[copy.target.dtype]) for copy in copies]
