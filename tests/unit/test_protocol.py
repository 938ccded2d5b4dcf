"""Buckets: every weight travels once, in order, aligned, and within the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_safe_workers.rollout.protocol import (
    ALIGNMENT_BYTES,
    FIRST_BUCKET_BYTES,
    ITEM_BYTES,
    Bucket,
    WeightSpec,
    plan_buckets,
)


def weight(name: str, *shape: int, dtype: str = "float32") -> WeightSpec:
    return WeightSpec(name=name, dtype=dtype, shape=shape)


def names(buckets: list[Bucket]) -> list[list[str]]:
    return [[spec.name for spec in bucket.specs] for bucket in buckets]


@pytest.mark.parametrize(
    ("spec", "size", "slot"),
    [
        (weight("matrix", 3, 5), 60, 64),
        (weight("exact", 4, 4), 64, 64),
        (weight("half", 7, dtype="bfloat16"), 14, 16),
        (weight("scalar"), 4, 16),
        (weight("empty", 0, 5), 0, 0),
    ],
)
def test_the_bytes_of_a_weight_and_of_its_place(spec: WeightSpec, size: int, slot: int) -> None:
    assert (spec.size_bytes, spec.slot_bytes) == (size, slot)


def test_weights_fill_a_bucket_to_the_brim() -> None:
    weights = [weight("a", 16), weight("b", 16), weight("c", 16)]
    assert names(plan_buckets(weights, bucket_bytes=128)) == [["a", "b"], ["c"]]
    assert names(plan_buckets(weights, bucket_bytes=127)) == [["a"], ["b"], ["c"]]


def test_padding_counts_towards_the_limit() -> None:
    weights = [weight("a", 1), weight("b", 1)]
    assert names(plan_buckets(weights, bucket_bytes=31)) == [["a"], ["b"]]
    assert names(plan_buckets(weights, bucket_bytes=32)) == [["a", "b"]]


def test_a_weight_beyond_the_limit_travels_alone_and_whole() -> None:
    weights = [weight("small", 4), weight("large", 1000), weight("next", 4)]
    buckets = plan_buckets(weights, bucket_bytes=64)
    assert names(buckets) == [["small"], ["large"], ["next"]]
    assert buckets[1].size_bytes == 4000


def test_offsets_are_aligned_for_every_dtype_and_do_not_overlap() -> None:
    weights = [weight(f"{dtype}{n}", n, dtype=dtype) for dtype in ITEM_BYTES for n in (1, 3, 7)]
    for bucket in plan_buckets(weights, bucket_bytes=100):
        end = 0
        for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
            assert offset % ALIGNMENT_BYTES == 0
            assert offset >= end
            end = offset + spec.size_bytes
        assert end <= bucket.size_bytes


def test_every_weight_travels_once_and_in_order() -> None:
    weights = [weight(f"layer.{n}", n + 1, 3) for n in range(50)]
    buckets = plan_buckets(weights, bucket_bytes=500)
    assert [spec for bucket in buckets for spec in bucket.specs] == weights
    assert all(bucket.specs for bucket in buckets)


def test_the_first_bucket_is_small() -> None:
    weights = [weight(name, 2**20) for name in map(str, range(80))]
    sizes = [bucket.size_bytes for bucket in plan_buckets(weights, bucket_bytes=4 * FIRST_BUCKET_BYTES)]
    assert sizes == [FIRST_BUCKET_BYTES, 4 * FIRST_BUCKET_BYTES]


def test_a_bucket_has_one_source() -> None:
    weights = [replace(weight(name, 4), source=source) for name, source in zip("abcd", (0, 0, 1, 0), strict=True)]
    buckets = plan_buckets(weights, bucket_bytes=1000)
    assert names(buckets) == [["a", "b"], ["c"], ["d"]]
    assert [bucket.source for bucket in buckets] == [0, 1, 0]


def test_no_weights_make_no_buckets() -> None:
    assert plan_buckets([], bucket_bytes=100) == []


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(KeyError, match="float8"):
        plan_buckets([weight("a", 1, dtype="float8")], bucket_bytes=100)
