"""Computes digests of many tensors at once, on their own device.

The digest mixes each 32-bit word of a tensor's memory, in row-major order, with the word's place. It adds the results
as signed numbers, modulo 2 ** 64. A change of one word always changes the digest, because the mixing is one-to-one. Any
other change stays unnoticed with a probability of about 2 ** -32.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import cast

import torch

from rl_safe_workers.errors import in_one_line

logger = logging.getLogger(__name__)

_AT_ONCE = {"cpu": 2**14, "cuda": 2**22}
"""Number of words that are mixed at a time, by device type. The mixing takes some 30 bytes per word. On a CPU, this
fits the cache, and torch uses one thread. On a busy machine, several threads would take ten times as long."""
WORD_BYTES = 4


PLACE, FIRST, SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
"""Odd factors. The first one spreads the places. The others are those of MurmurHash3's last steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The place of a tensor's words in a larger tensor: runs of equal width, one stride apart.

    Example: ``Span(start=8, width=4, stride=16)`` for the third quarter of the columns of a matrix with 16 words a row
    """

    start: int = 0
    """Place of the first word."""
    width: int = 0
    """Words in a run; 0: all words are one run."""
    stride: int = 0
    """Words from the start of one run to the start of the next."""


Sizes = Sequence[Sequence[int]]
"""For each tensor, the sizes in bytes of the consecutive parts of its memory."""


@torch.no_grad()
def digests_of(
    tensors: Sequence[torch.Tensor], spans: Sequence[Span] | None = None, *, sizes: Sizes | None = None
) -> torch.Tensor:
    """Returns the digest of each tensor, or of each part: int64, ``[number of digests]``, on the tensors' device.

    Does not wait for a GPU. On a GPU, one kernel computes all digests; see `digest_kernel`. Without Triton or a C
    compiler, torch's operations compute them, which takes longer.

    A digest depends on the bytes and their order. It depends on neither the shape, nor the dtype, nor the strides.

    Args:
        tensors: Tensors of any shape and dtype, all on one device. They need not be contiguous.
        spans: The place of each tensor in a larger tensor, if it is a part of one; None: all tensors are whole. The
            digests of all parts add up to the digest of the larger tensor, modulo 2 ** 64.
        sizes: The parts of each tensor that get a digest of their own; None: each tensor gets one digest. Cannot be
            combined with ``spans``.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    device = tensors[0].device
    if device.type == "cuda" and (kernel := _kernel(device)) is not None:
        by_kernel: torch.Tensor = kernel.digests_of(tensors, spans, sizes)
        return by_kernel
    if sizes is not None:
        tensors = [part for tensor, parts in zip(tensors, sizes, strict=True) for part in split_bytes(tensor, parts)]
    spans = [Span()] * len(tensors) if spans is None else spans
    found = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    at_once = _AT_ONCE.get(device.type, _AT_ONCE["cuda"])
    alike: dict[Span, list[int]] = {}
    for number, span in enumerate(spans):
        # With a single run, the places only shift, by a different amount for each tensor.
        alike.setdefault(span if span.width else Span(), []).append(number)
    for span, chosen in alike.items():
        for numbers, parts, starts in _batches([tensors[number] for number in chosen], at_once):
            words = parts[0] if len(parts) == 1 else torch.cat(parts)
            numbers = [chosen[number] for number in numbers]
            counts = [len(part) for part in parts]
            if not span.width:
                starts = [start + spans[number].start for start, number in zip(starts, numbers, strict=True)]
            places = _places(counts, starts, words)
            if span.width:
                places += places.div(span.width, rounding_mode="floor").mul_(span.stride - span.width).add_(span.start)
            found.index_add_(0, torch.tensor(numbers, device=device), _sums(_mixed(words, places), counts))
    return found


def prepared(
    tensors: Sequence[torch.Tensor], spans: Sequence[Span] | None = None, *, sizes: Sizes | None = None
) -> Callable[[], torch.Tensor] | None:
    """Returns a function that takes the digests of the same tensors at each call; see `digests_of`.

    For a model with thousands of weights, describing them to the kernel takes longer than reading them. This function
    describes them once, by their addresses. Before each call of the returned function, the caller must make sure that
    the tensors still have their memory.

    Args:
        tensors: As for `digests_of`.
        spans: As for `digests_of`.
        sizes: As for `digests_of`.

    Returns:
        The function; None without the kernel, or if a tensor must be copied for it.
    """
    kernel = _kernel(tensors[0].device) if tensors and tensors[0].is_cuda else None
    table = None if kernel is None else kernel.table_of(tensors, spans, sizes)
    return None if table is None else cast("Callable[[], torch.Tensor]", table.digests)


@functools.cache
def _kernel(device: torch.device) -> ModuleType | None:
    """Returns the module that takes digests by a kernel; None if the kernel cannot be built on this machine."""
    try:
        from rl_safe_workers.rollout import digest_kernel

        digest_kernel.digests_of([torch.zeros(1, device=device)])
    except Exception as error:  # Triton raises what its compiler raises
        logger.warning("digests of weights take longer, because their kernel cannot be built: %s", in_one_line(error))
        return None
    return digest_kernel


def _batches(
    tensors: Sequence[torch.Tensor], at_once: int
) -> Iterator[tuple[list[int], list[torch.Tensor], list[int]]]:
    """Yields batches of up to ``at_once`` words: for each part its tensor's number, its words, and its first place."""
    numbers: list[int] = []
    parts: list[torch.Tensor] = []
    starts: list[int] = []
    room = at_once
    for number, tensor in enumerate(tensors):
        words = words_of(tensor)
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


def split_bytes(tensor: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Returns the memory of a tensor in row-major order, cut into parts of these numbers of bytes."""
    if len(sizes) == 1:
        return (tensor,)
    return tensor.detach().contiguous().view(-1).view(torch.uint8).split_with_sizes([*sizes])


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor in row-major order as int32 words. Pads the last word with zeros."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(flat) % WORD_BYTES:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % WORD_BYTES))
    elif flat.storage_offset() % WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int32)


def _places(counts: Sequence[int], starts: Sequence[int], words: torch.Tensor) -> torch.Tensor:
    """Returns the place of each word in its tensor, for words of consecutive parts: int32, in the words' shape."""
    places = torch.arange(len(words), dtype=torch.int32, device=words.device)
    if len(counts) == 1:
        return places.add_(starts[0])
    ends = torch.tensor(counts).cumsum(0)
    shifts = torch.tensor(starts) - (ends - torch.tensor(counts))
    sizes = torch.tensor(counts, device=words.device)
    return places.add_(torch.repeat_interleave(shifts.to(words.device, torch.int32), sizes, output_size=len(words)))


def _sums(mixed: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Returns the sum of each part: int64, ``[number of parts]``. The parts are consecutive in ``mixed``."""
    if len(counts) == 1:
        return mixed.sum(dtype=torch.int64).view(1)
    ends = torch.tensor(counts, device=mixed.device).cumsum(0)
    totals = mixed.cumsum(0, dtype=torch.int64)[ends - 1]
    return torch.diff(totals, prepend=totals.new_zeros(1))


def _signed(constant: int) -> int:
    return constant - 2**32 if constant >= 2**31 else constant


def _mixed(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Mixes words with their places: int32, in the words' shape. Overwrites ``places``."""
    mixed = places.mul_(_signed(PLACE)).bitwise_xor_(words)
    # torch shifts in copies of the sign bit. The mask clears them.
    mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF)).mul_(_signed(FIRST))
    mixed.bitwise_xor_((mixed >> 13).bitwise_and_(0x7FFFF)).mul_(_signed(SECOND))
    return mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF))
