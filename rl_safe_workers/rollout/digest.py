"""Digests of tensors, of many at once, on the device where they are.

Each 32-bit word of a tensor's memory, in row-major order, is mixed with its place. The results are added as signed
numbers modulo 2 ** 64. One changed word always changes the digest, because the mixing is one-to-one. Any other change
goes unnoticed with a chance of about 2 ** -32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_AT_ONCE = {"cpu": 2**14, "cuda": 2**22}
"""Number of words that are mixed at a time. Each takes some 30 bytes meanwhile. On a CPU they stay in its cache, and
torch takes one thread for so few. On a busy machine several wait for each other, for ten times as long."""
_WORD_BYTES = 4


def _signed(constant: int) -> int:
    return constant - 2**32 if constant >= 2**31 else constant


_PLACE, _FIRST, _SECOND = map(_signed, (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
"""Odd factors: one spreads the places, the others are those of MurmurHash3's last steps."""


@torch.no_grad()
def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the digest of each tensor: int64, ``[len(tensors)]``, on their device. Does not wait for a GPU.

    A digest depends on the bytes and their order. It depends on neither the shape, nor the dtype, nor the strides.

    Args:
        tensors: Tensors of any shape and dtype, all on one device. They need not be contiguous.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    device = tensors[0].device
    found = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    at_once = _AT_ONCE.get(device.type, _AT_ONCE["cuda"])
    for numbers, parts, starts in _batches(tensors, at_once):
        words = parts[0] if len(parts) == 1 else torch.cat(parts)
        found.index_add_(0, torch.tensor(numbers, device=device), _sums(words, [len(part) for part in parts], starts))
    return found


def _batches(
    tensors: Sequence[torch.Tensor], at_once: int
) -> Iterator[tuple[list[int], list[torch.Tensor], list[int]]]:
    """Yields parts of tensors, ``at_once`` words together: the tensors' numbers, the words, the place of the first."""
    numbers: list[int] = []
    parts: list[torch.Tensor] = []
    starts: list[int] = []
    room = at_once
    for number, tensor in enumerate(tensors):
        words = _words(tensor)
        start = 0
        while start < len(words):
            part = words[start : start + room]
            numbers.append(number)
            parts.append(part)
            starts.append(start)
            start, room = start + len(part), room - len(part)
            if room == 0:
                yield numbers, parts, starts
                numbers, parts, starts, room = [], [], [], at_once
    if parts:
        yield numbers, parts, starts


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(flat) % _WORD_BYTES:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % _WORD_BYTES))
    elif flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int32)


def _sums(words: torch.Tensor, counts: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
    """Returns the sum of the mixed words of each of the consecutive parts."""
    places = torch.arange(len(words), dtype=torch.int32, device=words.device)
    if len(counts) == 1:
        return _mixed(words, places.add_(starts[0])).sum(dtype=torch.int64).view(1)
    ends = torch.tensor(counts).cumsum(0)
    shifts = torch.tensor(starts) - (ends - torch.tensor(counts))
    sizes = torch.tensor(counts, device=words.device)
    places += torch.repeat_interleave(shifts.to(words.device, torch.int32), sizes, output_size=len(words))
    totals = _mixed(words, places).cumsum(0, dtype=torch.int64)[ends.to(words.device) - 1]
    return torch.diff(totals, prepend=totals.new_zeros(1))


def _mixed(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    mixed = places.mul_(_PLACE).bitwise_xor_(words)
    # torch shifts the sign in: the mask takes it out again.
    mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    mixed.bitwise_xor_((mixed >> 13).bitwise_and_(0x7FFFF)).mul_(_SECOND)
    return mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF))
