"""The tensors of a model chunk as rectangles of global tensors, each a view of the live tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from rl_safe_workers.checkpoint.format.flat_ranges import row_major
from rl_safe_workers.checkpoint.format.rectangles import Index
from rl_safe_workers.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Window:
    """A strided view of a tensor, and its rectangle in a global tensor."""

    start: int
    """Offset of the first element from the tensor's first element."""
    shape: Index
    strides: Index
    place: ShardedTensor
    """The sharded tensor without data. Prepended axes are explicit, of size 1, so ``prepend_axis_num`` is 0."""

    @property
    def is_contiguous(self) -> bool:
        """True if the elements follow each other in memory, row-major."""
        wanted = row_major(self.shape)
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, wanted, strict=True))

    def of(self, tensor: torch.Tensor) -> ShardedTensor:
        """Returns this window of a detached tensor as a sharded tensor. It shares the tensor's memory."""
        # dataclasses.replace would repeat the checks, at ten times the cost.
        shard: ShardedTensor = object.__new__(ShardedTensor)
        shard.__dict__.update(self.place.__dict__)
        shard.data = tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.start)
        return shard


def windows_of(tensor: torch.Tensor, sharded: ShardedTensor | ShardedTensorFactory) -> tuple[Window, ...]:
    """Returns a tensor's windows in global tensors: one, or one for each part that a factory splits off.

    Args:
        tensor: A parameter or buffer.
        sharded: Its entry in the model's ``sharded_state_dict``.

    Raises:
        CheckpointError: If a factory makes copies: values loaded into them would not reach the tensor.
    """
    built = sharded.build() if isinstance(sharded, ShardedTensorFactory) else [sharded]
    parts: list[ShardedTensor] = list(built.values()) if isinstance(built, dict) else built
    for part in parts:
        if part.data.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            raise CheckpointError(
                f"{sharded.key}: its sharded form is a copy and not a view of the parameter {tuple(tensor.shape)}, "
                "so it cannot be saved or loaded in place: use layers whose weights are stored as they are sharded"
            )
    return tuple(_window(tensor, part) for part in parts)


def _window(tensor: torch.Tensor, part: ShardedTensor) -> Window:
    ones = (1,) * part.prepend_axis_num
    shape = ones + tuple(part.local_shape)
    # Do not claim a regular grid: the optimizer's rectangles of the same tensor do not lie on one.
    place = replace(part, data=None, local_shape=shape, prepend_axis_num=0, axis_fragmentations=None)
    strides = tuple(part.data.numel() for _ in ones) + part.data.stride()
    return Window(part.data.storage_offset() - tensor.storage_offset(), shape, strides, place)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor of the model: where its module keeps it, and its windows by name in the state dict."""

    owner: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor
    windows: tuple[tuple[str, Window], ...]


class ChunkLayout:
    """Where the tensors of one model chunk lie in global tensors.

    Args:
        chunk: A model chunk wrapped in DistributedDataParallel.
        stock: The ``sharded_state_dict`` of the wrapped module, in a format like `state.CONTENT_METADATA`.

    Raises:
        CheckpointError: As `windows_of`.
    """

    def __init__(self, chunk: Any, stock: dict[str, Any]) -> None:
        places = _places(chunk.module)
        self._slots: list[_Slot] = []
        self._others: dict[str, Any] = {}
        for name, sharded in stock.items():
            if isinstance(sharded, ShardedTensor | ShardedTensorFactory):
                self._slots.append(_slot(name, sharded, places))
            else:
                self._others[name] = sharded
        # The extra state of 8-bit and 4-bit layers holds their scales, and changes with every step.
        is_scaled = getattr(chunk.config, "fp8", None) or getattr(chunk.config, "fp4", None)
        self._is_constant = not self._others or not is_scaled

    def is_current(self) -> bool:
        """Returns True if the module still has the tensors from which this layout was built."""
        return self._is_constant and all(slot.owner.get(slot.name) is slot.tensor for slot in self._slots)

    def windows(self) -> dict[int, tuple[Window, ...]]:
        """Windows of each tensor, by its ``id``."""
        return {id(slot.tensor): tuple(window for _, window in slot.windows) for slot in self._slots}

    def shards(self) -> dict[str, Any]:
        """Returns the chunk's entries of a state dict, without a copy. Windows of one tensor get numbered names."""
        found = dict(self._others)
        for slot in self._slots:
            tensor = slot.tensor.detach()
            for name, window in slot.windows:
                found[name] = window.of(tensor)
        return found


def _places(module: torch.nn.Module) -> dict[int, tuple[dict[str, torch.Tensor | None], str]]:
    """Returns the registry and name under which a module keeps each parameter and buffer, by the tensor's ``id``."""
    registries: list[dict[str, Any]] = [r for m in module.modules() for r in (m._buffers, m._parameters)]
    return {id(t): (registry, name) for registry in registries for name, t in registry.items() if t is not None}


def _slot(name: str, sharded: ShardedTensor | ShardedTensorFactory, places: dict[int, Any]) -> _Slot:
    owner, attribute = places.get(id(sharded.data), ({}, ""))
    windows = windows_of(sharded.data, sharded)
    names = [name] if len(windows) == 1 else [f"{name}.{i}" for i in range(len(windows))]
    return _Slot(owner, attribute, sharded.data, tuple(zip(names, windows, strict=True)))
