"""Computes the digests of `digest` on a GPU, for many tensors in one launch. Needs Triton and a C compiler.

torch's CUDA builds include Triton. The kernel reads each word once. torch's own operations make some 15 passes over
the memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, chain
from operator import or_
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from rl_safe_workers.rollout.digest import FIRST, PLACE, SECOND, WORD_BYTES, Sizes, Span, split_bytes, words_of

_BLOCK, _CHUNK = 2**11, 2**15
"""Words that a program of the kernel reads at a time, and words in a chunk."""
_PROGRAMS = 4
"""Number of the kernel's programs on each multiprocessor. So few are enough to read at full speed. With one program for
each chunk, the kernels of other streams would wait until all chunks are read."""
_VECTOR_BYTES = 16
"""Bytes that a thread loads at once, if the address allows it."""
_COPIED_BYTES = 2**28
"""Bytes of copies after which a launch begins. Only a tensor whose memory is not a row of words needs a copy."""
_FIELDS = 5
"""Number of fields that the kernel's table has for each tensor: its address, its number of words, the place of its
first word, the words in a run, and the words of the larger tensor between two runs."""


class _Batch(NamedTuple):
    """The memory of some tensors or of their parts. Copies stand in for some of them."""

    addresses: list[int]
    sizes: list[int]
    """Bytes of each."""
    copies: list[torch.Tensor]


def digests_of(
    tensors: Sequence[torch.Tensor], spans: Sequence[Span] | None = None, sizes: Sizes | None = None
) -> torch.Tensor:
    """Returns what `digest.digests_of` returns. Does not wait for the GPU.

    Args:
        tensors: As for `digest.digests_of`; at least one.
        spans: As for `digest.digests_of`.
        sizes: As for `digest.digests_of`.
    """
    device, first = tensors[0].device, 0
    found: list[torch.Tensor] = []
    for batch in _batches(tensors, sizes):
        end = first + len(batch.addresses)
        found.append(Table(batch, None if spans is None else spans[first:end], device).digests())
        first = end
    return found[0] if len(found) == 1 else torch.cat(found)


def table_of(
    tensors: Sequence[torch.Tensor], spans: Sequence[Span] | None = None, sizes: Sizes | None = None
) -> Table | None:
    """Returns the table of tensors whose digests are taken again and again; None if one of them must be copied.

    Args:
        tensors: As for `digests_of`. They must stay where they are as long as the table is used.
        spans: As for `digests_of`.
        sizes: As for `digests_of`.
    """
    batch = _in_place(tensors, sizes)
    return None if batch is None else Table(batch, spans, tensors[0].device)


def _in_place(tensors: Sequence[torch.Tensor], sizes: Sizes | None) -> _Batch | None:
    """Returns the memory of all tensors, or of their parts; None if one of them must be copied.

    The loops run in C, because a model has thousands of weights.
    """
    starts = [*map(torch.Tensor.data_ptr, tensors)]
    lengths = [tensor.nbytes for tensor in tensors] if sizes is None else [*chain.from_iterable(sizes)]
    if functools.reduce(or_, chain(starts, lengths)) % WORD_BYTES or not all(map(torch.Tensor.is_contiguous, tensors)):
        return None
    if sizes is not None:
        starts = [
            at for start, parts in zip(starts, sizes, strict=True) for at in accumulate(parts[:-1], initial=start)
        ]
    return _Batch(starts, lengths, [])


def _must_be_copied(tensor: torch.Tensor, parts: Sequence[int]) -> bool:
    """Returns True unless the memory of each part of a tensor is a row of words."""
    return bool(
        tensor.data_ptr() % WORD_BYTES or any(size % WORD_BYTES for size in parts) or not tensor.is_contiguous()
    )


def _batches(tensors: Sequence[torch.Tensor], sizes: Sizes | None) -> Iterator[_Batch]:
    """Yields the memory that each launch reads."""
    if (whole := _in_place(tensors, sizes)) is not None:
        yield whole
        return
    batch, copied_bytes = _Batch([], [], []), 0
    for tensor, parts in zip(tensors, sizes or [(tensor.nbytes,) for tensor in tensors], strict=True):
        if _must_be_copied(tensor, parts):
            copies = [words_of(part) for part in split_bytes(tensor, parts)]
            batch.copies.extend(copies)
            batch.addresses.extend(copy.data_ptr() for copy in copies)
            batch.sizes.extend(copy.nbytes for copy in copies)
            copied_bytes += sum(copy.nbytes for copy in copies)
        else:
            batch.addresses.extend(accumulate(parts[:-1], initial=tensor.data_ptr()))
            batch.sizes.extend(parts)
        if copied_bytes >= _COPIED_BYTES:
            yield batch
            batch, copied_bytes = _Batch([], [], []), 0
    if batch.addresses:
        yield batch


class Table:
    """Describes the memory of some tensors to the kernel, on their device."""

    def __init__(self, batch: _Batch, spans: Sequence[Span] | None, device: torch.device) -> None:
        """Describes a batch. Does not wait for the GPU.

        Args:
            batch: The memory of the tensors. It must stay where it is as long as the table is used.
            spans: As for `digest.digests_of`.
            device: The tensors' device.
        """
        addresses, words = np.array(batch.addresses), np.array(batch.sizes) // WORD_BYTES
        chunks = -(-words // _CHUNK)
        owners = np.repeat(np.arange(len(words)), chunks)
        firsts = (np.arange(owners.size) - np.repeat(np.cumsum(chunks) - chunks, chunks)) * _CHUNK
        starts = skips = np.zeros_like(words)
        widths = np.maximum(words, 1)
        if spans is not None:
            starts, given, strides = np.array([(span.start, span.width, span.stride) for span in spans]).T
            widths, skips = np.where(given, given, widths), strides - given
        arrays = [addresses, words, starts, widths, skips, owners, firsts]
        # A copy from memory that is not pinned would wait for the GPU. numpy fills the pinned memory with one thread.
        # torch would use all cores for this megabyte, and would wait 20 ms for them on a busy machine.
        with _current(device):
            packed = torch.empty(sum(map(len, arrays)), dtype=torch.int64, pin_memory=device.type == "cuda")
            np.concatenate(arrays, out=packed.numpy())
            self._packed = packed.to(device, non_blocking=True)
        self._tensors, self._chunks = len(words), int(owners.size)
        self._programs = min(self._chunks, _most_programs(device))
        self._constants = constants(
            in_runs=bool((widths < words).any()), is_aligned=not (addresses % _VECTOR_BYTES).any()
        )

    def digests(self) -> torch.Tensor:
        """Returns the digest of each tensor of the batch, from its current values: int64, ``[number of tensors]``.

        Does not wait for the GPU.
        """
        packed, owners = self._packed, _FIELDS * self._tensors
        found = torch.zeros(self._tensors, dtype=torch.int64, device=packed.device)
        if self._programs:
            with _current(packed.device):
                firsts = owners + self._chunks
                digest_chunks[(self._programs,)](
                    found, packed, packed[owners:], packed[firsts:], self._tensors, self._chunks, **self._constants
                )
        return found


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current device in the body. CUDA pins memory and launches kernels on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def _most_programs(device: torch.device) -> int:
    # Triton's interpreter runs on a CPU.
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return _PROGRAMS * int(processors)


def constants(*, in_runs: bool, is_aligned: bool) -> dict[str, int]:
    """Returns the constants of `digest_chunks`. The kernel is compiled for each combination of them.

    Args:
        in_runs: True if the words of a tensor are not one run; see `digest.Span`.
        is_aligned: True if a thread may load 16 bytes at once.
    """
    found = {"IN_RUNS": in_runs, "IS_ALIGNED": is_aligned, "BLOCK": _BLOCK, "CHUNK": _CHUNK}
    return {**found, "PLACE": PLACE, "FIRST": FIRST, "SECOND": SECOND}


# These arguments differ from batch to batch. Triton would compile the kernel anew each time if it specialised on them.
@triton.jit(
    do_not_specialize=["tensors", "chunks"], do_not_specialize_on_alignment=["found", "table", "owners", "firsts"]
)
def digest_chunks(  # type: ignore[no-untyped-def]  # Triton reads the annotations of constants alone
    found,
    table,
    owners,
    firsts,
    tensors,
    chunks,
    IN_RUNS: tl.constexpr,  # noqa: N803
    IS_ALIGNED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    PLACE: tl.constexpr,  # noqa: N803
    FIRST: tl.constexpr,  # noqa: N803
    SECOND: tl.constexpr,  # noqa: N803
):
    """Adds the digest of each chunk to the digest of its tensor. The programs take the chunks in turns.

    Args:
        found: The digest of each tensor, int64.
        table: The `_FIELDS` of all tensors, int64, ``[_FIELDS, tensors]``.
        owners: The number of each chunk's tensor, int64.
        firsts: The place of each chunk's first word in its tensor, int64.
        tensors: Number of tensors.
        chunks: Number of chunks.
        IN_RUNS: The constants; see `constants`.
        IS_ALIGNED: A constant.
        BLOCK: A constant.
        CHUNK: A constant.
        PLACE: A constant.
        FIRST: A constant.
        SECOND: A constant.
    """
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        owner = tl.load(owners + chunk)
        first = tl.load(firsts + chunk)
        field = table + owner
        words = (tl.load(field) + first * 4).to(tl.pointer_type(tl.int32))
        if IS_ALIGNED:
            words = tl.multiple_of(words, 16)
        count = tl.minimum(tl.load(field + tensors) - first, CHUNK).to(tl.int32)
        start = tl.load(field + 2 * tensors).to(tl.uint32)
        width = tl.load(field + 3 * tensors).to(tl.uint32)
        skip = tl.load(field + 4 * tensors).to(tl.uint32)
        place = first.to(tl.uint32)
        offsets = tl.arange(0, BLOCK)
        sums = tl.zeros((BLOCK,), dtype=tl.int64)
        # A load with a mask is not wide, so only the last block has a mask.
        whole = count // BLOCK * BLOCK
        for at in range(0, whole, BLOCK):
            loaded = tl.load(words + at + offsets)
            places = place + (at + offsets).to(tl.uint32)
            sums += _mixed(loaded, places, start, width, skip, IN_RUNS, PLACE, FIRST, SECOND)
        if whole < count:
            is_left = whole + offsets < count
            loaded = tl.load(words + whole + offsets, mask=is_left, other=0)
            places = place + (whole + offsets).to(tl.uint32)
            sums += tl.where(is_left, _mixed(loaded, places, start, width, skip, IN_RUNS, PLACE, FIRST, SECOND), 0)
        tl.atomic_add(found + owner, tl.sum(sums), sem="relaxed")


@triton.jit
def _mixed(  # type: ignore[no-untyped-def]
    loaded,
    places,
    start,
    width,
    skip,
    IN_RUNS: tl.constexpr,  # noqa: N803
    PLACE: tl.constexpr,  # noqa: N803
    FIRST: tl.constexpr,  # noqa: N803
    SECOND: tl.constexpr,  # noqa: N803
):
    """Returns what `digest._mixed` returns, as int64. The numbers are unsigned, so shifts fill with zeros."""
    if IN_RUNS:
        places += places // width * skip
    mixed = (places + start) * PLACE ^ loaded.to(tl.uint32, bitcast=True)
    mixed = (mixed ^ (mixed >> 16)) * FIRST
    mixed = (mixed ^ (mixed >> 13)) * SECOND
    return (mixed ^ (mixed >> 16)).to(tl.int32, bitcast=True).to(tl.int64)
