"""Copies a rank's shards to host memory: all at once, to write them while training goes on, or one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from rl_safe_workers.platforms.pinned import host_buffer

_ALIGNMENT = 64
"""Bytes; more than any dtype needs."""


def _with_spare(size_bytes: int) -> int:
    """Returns the size of a buffer, a little larger than needed, so that small growth needs no new one."""
    return size_bytes + size_bytes // 16 + 2**20


class Staging:
    """Host memory that is kept from save to save, pinned where there is a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def missing_bytes(self, size_bytes: int) -> int:
        """Returns the bytes of host memory that a `copy` of this size needs beyond the buffer of earlier saves."""
        return 0 if self._buffer.nbytes >= size_bytes else _with_spare(size_bytes)

    def copy(self, tensors: Iterable[torch.Tensor], size_bytes: int) -> list[torch.Tensor]:
        """Copies tensors into the buffer. They may change as soon as this returns.

        Args:
            tensors: Tensors, taken one at a time.
            size_bytes: Upper bound of their total size, without alignment.

        Returns:
            Host tensors of the same dtypes and shapes, valid until the next call.
        """
        copies: list[torch.Tensor] = []
        start, on_device = 0, False
        for tensor in tensors:
            on_device = on_device or tensor.is_cuda
            stop = start + tensor.nbytes
            self._reserve(max(stop, size_bytes))
            place = self._buffer[start:stop].view(tensor.dtype).view(tensor.shape)
            copies.append(place.copy_(tensor, non_blocking=True))
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        if on_device:
            torch.cuda.current_stream().synchronize()
        return copies

    def one_by_one(self, tensors: Iterable[torch.Tensor], largest_bytes: int) -> Iterator[torch.Tensor]:
        """Yields a host copy of each tensor on a device, valid until the next one. Yields host tensors as they are."""
        for tensor in tensors:
            if tensor.is_cuda:
                self._reserve(largest_bytes)
                place = self._buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                place.copy_(tensor)
                yield place
            else:
                yield tensor

    def _reserve(self, size_bytes: int) -> None:
        if self._buffer.nbytes < size_bytes:
            # Earlier copies stay in the old buffer, which lives as long as its views.
            self._buffer = host_buffer(_with_spare(size_bytes), pinned=torch.cuda.is_available())
