"""Checks that a model's loaders read no more of a weight than the cut that was sent to this rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from rl_safe_workers.compat.torch_dispatch import TorchDispatchMode
from rl_safe_workers.rollout.cuts import BucketPart, Cut, View


def view_of(tensor: torch.Tensor) -> View:
    """Returns the place of a tensor in its storage."""
    return View(tuple(tensor.shape), tuple(map(int, tensor.stride())), int(tensor.storage_offset()))


class PartReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records reads outside of the cuts of weights, while this mode is active.

    Attributes:
        outside: Description of the first read outside of a cut; None if there was none.
    """

    def __init__(self) -> None:
        """Starts without watched weights."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched: dict[int, _Watched] = {}
        """The whole weights that have a cut, by their addresses."""
        self.outside: str | None = None

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]], part: BucketPart) -> None:
        """Watches weights until their memory is freed. Keeps no reference that would delay this.

        Args:
            weights: Name and tensor of each whole weight, as `packing.whole_weights` returns them.
            part: The part of the weights that this rank has received.
        """
        for (name, whole), cut in zip(weights, part.cuts, strict=True):
            if cut is not None:
                storage = whole.untyped_storage()
                kept = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._watched[storage.data_ptr()] = _Watched(name, tuple(whole.shape), cut, kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.outside is None and not func.is_view:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, torch.Tensor) and one.device.type != "meta" and one.numel():
                    self._check(func, one)
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, tensor: torch.Tensor) -> None:
        watched = self._watched.get(tensor.untyped_storage().data_ptr())
        # Other memory may now have the address of a freed weight.
        if watched is None or watched.storage.expired():  # type: ignore[no-untyped-call]
            return
        cut = watched.cut
        if cut.within(watched.shape, view_of(tensor)) is None:
            self.outside = (
                f"{func} reads {tuple(tensor.shape)} of {watched.name} outside of the {cut.length} of "
                f"{cut.whole_length} {'columns' if cut.axis else 'rows'} that were sent"
            )


class _Watched(NamedTuple):
    """A whole weight. A loader may read only its cut."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    storage: StorageWeakRef
