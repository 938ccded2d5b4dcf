"""The division of writes: every row once, evenly, and in few parts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rl_safe_workers.checkpoint.save.balance import CUT_BYTES, Load, share_out

MIB = 2**20
LAYERS = {
    f"layer.{layer}.{name}": (rows, row_bytes)
    for layer in range(48)
    for name, rows, row_bytes in [("qkv", 5120, 4096), ("proj", 2048, 8192), ("router", 128, 4096), ("norm", 2048, 2)]
}
"""The dense part of Qwen3-30B-A3B in bf16, about."""


def shares(loads: list[Load], replicas: int) -> list[list[list[slice]]]:
    return [share_out(loads, replicas=replicas, replica=r) for r in range(replicas)]


def loads_of(tensors: dict[str, tuple[int, int]]) -> list[Load]:
    return [Load(key=k, offset=(0, 0), size_bytes=rows * each, rows=rows) for k, (rows, each) in tensors.items()]


def bytes_of(loads: list[Load], share: list[list[slice]]) -> int:
    rows_of = [sum(s.stop - s.start for s in rows) for rows in share]
    return sum(rows * load.size_bytes // load.rows for rows, load in zip(rows_of, loads, strict=True))


@pytest.mark.parametrize("replicas", [1, 2, 3, 8, 64])
def test_every_row_is_written_once(replicas: int) -> None:
    loads = loads_of(LAYERS)
    all_shares = shares(loads, replicas)
    for i, load in enumerate(loads):
        rows = sorted((s.start, s.stop) for share in all_shares for s in share[i])
        assert rows[0][0] == 0
        assert rows[-1][1] == load.rows
        assert all(a[1] == b[0] for a, b in pairwise(rows))


@pytest.mark.parametrize("replicas", [2, 8, 64])
def test_bytes_are_even(replicas: int) -> None:
    loads = loads_of(LAYERS)
    written = [bytes_of(loads, share) for share in shares(loads, replicas)]
    assert max(written) <= 1.1 * sum(written) / replicas


@pytest.mark.parametrize("replicas", [8, 256])
def test_the_number_of_parts_is_bounded_by_the_bytes(replicas: int) -> None:
    loads = loads_of(LAYERS)
    total = sum(load.size_bytes for load in loads)
    parts = sum(len(rows) for share in shares(loads, replicas) for rows in share)
    assert parts <= total / CUT_BYTES + 2 * len(loads)


def test_experts_are_shared_out_one_by_one_where_there_are_more_replicas_than_a_tensor_has_experts() -> None:
    loads = loads_of({f"layer.{i}": (16, 6 * MIB) for i in range(48)})
    counts = [sum(s.stop - s.start for rows in share for s in rows) for share in shares(loads, 128)]
    assert set(counts) == {6}


def test_small_tensors_are_never_cut() -> None:
    loads = loads_of({f"norm.{i}": (2048, 2) for i in range(7)})
    assert all(rows in ([], [slice(0, 2048)]) for share in shares(loads, 4) for rows in share)


def test_the_order_of_the_tensors_does_not_matter() -> None:
    loads = loads_of(LAYERS)
    forwards = share_out(loads, replicas=8, replica=3)
    assert share_out(loads[::-1], replicas=8, replica=3)[::-1] == forwards
