"""Computes the digests of `digest` on a GPU, those of many tensors in one launch. Needs Triton and a C compiler.

torch brings Triton in its builds for CUDA. A digest reads each word once. In torch's own operations, it takes some
15 passes over the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rl_safe_workers.rollout.digest import FIRST, PLACE, SECOND, WORD_BYTES, Span, words_of

_BLOCK, _CHUNK = 2**11, 2**15
"""Words that a program of the kernel reads at a time, and in all."""
_VECTOR_BYTES = 16
"""Bytes that a thread loads at once, if the address allows it."""
_COPIED_BYTES = 2**28
"""Bytes of copies that are held for a launch. Only a tensor whose memory is not a row of words needs a copy."""


class _Words(NamedTuple):
    """The words of one tensor, and their places: a row of the kernel's table."""

    address: int
    words: int
    start: int
    width: int
    skip: int
    """Words between two runs that do not belong to the tensor."""


def digests_of(tensors: Sequence[torch.Tensor], spans: Sequence[Span]) -> torch.Tensor:
    """Returns what `digest.digests` returns. Does not wait for the GPU.

    Args:
        tensors: As for `digest.digests`; at least one.
        spans: As for `digest.digests`; one for each tensor.
    """
    device = tensors[0].device
    found = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    first = 0
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for rows in _launches(tensors, spans):
            _launch(rows, found[first : first + len(rows)])
            first += len(rows)
    return found


def _launches(tensors: Sequence[torch.Tensor], spans: Sequence[Span]) -> Iterator[list[_Words]]:
    """Yields the rows of each launch. Holds the copies that they point to until the next one is asked for."""
    rows: list[_Words] = []
    copies: list[torch.Tensor] = []
    for tensor, span in zip(tensors, spans, strict=True):
        address, size = tensor.data_ptr(), tensor.nbytes
        if not tensor.is_contiguous() or address % WORD_BYTES or size % WORD_BYTES:
            copies.append(words_of(tensor))
            address, size = copies[-1].data_ptr(), copies[-1].nbytes
        count = size // WORD_BYTES
        rows.append(_Words(address, count, span.start, span.width or max(count, 1), span.stride - span.width))
        if sum(copy.nbytes for copy in copies) >= _COPIED_BYTES:
            yield rows
            rows, copies = [], []
    if rows:
        yield rows


def _launch(rows: Sequence[_Words], found: torch.Tensor) -> None:
    """Adds the digests of ``rows`` to ``found``, int64 ``[len(rows)]``."""
    table = torch.tensor(rows, dtype=torch.int64)
    chunks = (table[:, 1] + _CHUNK - 1).div(_CHUNK, rounding_mode="floor")
    programs = int(chunks.sum())
    if programs == 0:
        return
    owners = torch.arange(len(rows)).repeat_interleave(chunks)
    firsts = (torch.arange(programs) - (chunks.cumsum(0) - chunks)[owners]) * _CHUNK
    packed = torch.cat([table.flatten(), owners, firsts])
    if found.is_cuda:
        packed = packed.pin_memory()  # else the copy would wait for the GPU
    packed = packed.to(found.device, non_blocking=True)
    digest_chunk[(programs,)](
        found,
        packed,
        packed[table.numel() :],
        packed[table.numel() + programs :],
        **constants(
            in_runs=any(row.width < row.words for row in rows),
            is_aligned=not any(row.address % _VECTOR_BYTES for row in rows),
        ),
    )


def constants(*, in_runs: bool, is_aligned: bool) -> dict[str, int]:
    """Returns the constants of `digest_chunk`. The kernel is compiled for each combination of them.

    Args:
        in_runs: True if the words of a tensor are not one run; see `digest.Span`.
        is_aligned: True if a thread may load 16 bytes at once.
    """
    sizes = {"FIELDS": len(_Words._fields), "BLOCK": _BLOCK, "CHUNK": _CHUNK}
    return {"IN_RUNS": in_runs, "IS_ALIGNED": is_aligned, **sizes, "PLACE": PLACE, "FIRST": FIRST, "SECOND": SECOND}


# Their alignment differs from batch to batch, and would make Triton compile the kernel anew.
@triton.jit(do_not_specialize_on_alignment=["found", "table", "owners", "firsts"])
def digest_chunk(  # type: ignore[no-untyped-def]  # Triton reads the annotations of constants alone
    found,
    table,
    owners,
    firsts,
    IN_RUNS: tl.constexpr,  # noqa: N803
    IS_ALIGNED: tl.constexpr,  # noqa: N803
    FIELDS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    PLACE: tl.constexpr,  # noqa: N803
    FIRST: tl.constexpr,  # noqa: N803
    SECOND: tl.constexpr,  # noqa: N803
):
    """Adds the digest of one chunk of a tensor to that of the tensor. All arguments before the constants are int64.

    Args:
        found: The digest of each tensor.
        table: The fields of `_Words` of each tensor.
        owners: The row of each chunk's tensor.
        firsts: The place of each chunk's first word in its tensor.
        IN_RUNS: The constants; see `constants`.
        IS_ALIGNED: A constant.
        FIELDS: A constant.
        BLOCK: A constant.
        CHUNK: A constant.
        PLACE: A constant.
        FIRST: A constant.
        SECOND: A constant.
    """
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    first = tl.load(firsts + program)
    row = table + owner * FIELDS
    words = (tl.load(row) + first * 4).to(tl.pointer_type(tl.int32))
    if IS_ALIGNED:
        words = tl.multiple_of(words, 16)
    count = tl.minimum(tl.load(row + 1) - first, CHUNK).to(tl.int32)
    start = tl.load(row + 2).to(tl.uint32)
    width = tl.load(row + 3).to(tl.uint32)
    skip = tl.load(row + 4).to(tl.uint32)
    place = first.to(tl.uint32)
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.int64)
    # A mask keeps loads from being wide, so only the last block has one.
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
    """Returns what `digest._mixed` returns, as int64. Unsigned numbers shift zeros in."""
    if IN_RUNS:
        places += places // width * skip
    mixed = (places + start) * PLACE ^ loaded.to(tl.uint32, bitcast=True)
    mixed = (mixed ^ (mixed >> 16)) * FIRST
    mixed = (mixed ^ (mixed >> 13)) * SECOND
    return (mixed ^ (mixed >> 16)).to(tl.int32, bitcast=True).to(tl.int64)
