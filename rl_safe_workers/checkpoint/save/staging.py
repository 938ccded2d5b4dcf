"""Copies of a rank's shards in host memory: of all, to write them while training goes on, or of one after another."""

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
        """Returns the host memory that a `copy` of this size takes beyond what is kept from earlier saves."""
        return 0 if self._buffer.nbytes >= size_bytes else _with_spare(size_bytes)

    def copy(self, tensors: Iterable[torch.Tensor], size_bytes: int) -> list[torch.Tensor]:
        """Copies tensors into the buffer. They may change as soon as this returns.

        Args:
            tensors: At most ``size_bytes`` in all, taken one at a time.
            size_bytes: Their size without any alignment.

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
        """Yields a host copy of each tensor that lies on a device, valid until the next one; others as they are."""
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
            # What has been copied so far stays in the buffer before, which lives as long as its views.
            self._buffer = host_buffer(_with_spare(size_bytes), pinned=torch.cuda.is_available())
