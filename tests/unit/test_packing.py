"""Packing: a weight lies at its aligned place in a bucket's memory, bit for bit, and is read there without a copy."""

from __future__ import annotations

import pytest
import torch

from rl_safe_workers.rollout.packing import DTYPES
from rl_safe_workers.rollout.protocol import ALIGNMENT_BYTES, ITEM_BYTES, Bucket, WeightSpec, plan_buckets
from tests.unpacking import unpack

MIXED = (
    WeightSpec(name="bytes", dtype="uint8", shape=(3,)),
    WeightSpec(name="double", dtype="float64", shape=(1, 3)),
    WeightSpec(name="scalar", dtype="float32", shape=()),
    WeightSpec(name="empty", dtype="bfloat16", shape=(0, 5)),
    WeightSpec(name="half", dtype="bfloat16", shape=(7, 1)),
    WeightSpec(name="exact", dtype="int32", shape=(2, 2)),
    WeightSpec(name="long", dtype="int64", shape=(1,)),
    WeightSpec(name="other half", dtype="float16", shape=(2, 3, 4)),
    WeightSpec(name="empty at the end", dtype="float64", shape=(4, 0)),
)


@pytest.fixture
def bucket() -> Bucket:
    (bucket,) = plan_buckets(MIXED, bucket_bytes=10**6)
    return bucket


def random_bytes(size: int) -> torch.Tensor:
    """Every bit at random, so that floats have NaNs with payloads, infinities and denormals among them."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def weight(spec: WeightSpec) -> torch.Tensor:
    return random_bytes(spec.size_bytes).view(DTYPES[spec.dtype]).view(spec.shape)


def places(bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
    return [tensor for _, tensor in unpack(bucket, buffer)]


def test_every_dtype_of_a_spec_has_its_size() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES


def test_places_have_the_shapes_and_dtypes_of_their_specs_in_order(bucket: Bucket) -> None:
    found = [(place.dtype, tuple(place.shape)) for place in places(bucket, random_bytes(bucket.size_bytes))]
    assert found == [(DTYPES[spec.dtype], spec.shape) for spec in MIXED]


def test_places_begin_at_the_offsets_of_the_bucket(bucket: Bucket) -> None:
    buffer = random_bytes(bucket.size_bytes)
    for spec, offset, place in zip(MIXED, bucket.offsets, places(bucket, buffer), strict=True):
        assert place.storage_offset() * place.itemsize == offset
        assert offset % ALIGNMENT_BYTES == 0
        assert as_bytes(place) == as_bytes(buffer[offset : offset + spec.size_bytes])


def test_what_is_written_at_its_place_is_unpacked_bit_for_bit(bucket: Bucket) -> None:
    buffer, weights = random_bytes(bucket.size_bytes), {spec.name: weight(spec) for spec in MIXED}
    for place, tensor in zip(places(bucket, buffer), weights.values(), strict=True):
        place.copy_(tensor)
    received = dict(unpack(bucket, buffer.clone()))
    assert list(received) == list(weights)
    for name, tensor in weights.items():
        assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape)
        assert as_bytes(received[name]) == as_bytes(tensor)


def test_to_write_a_weight_leaves_the_padding_and_the_other_weights_alone(bucket: Bucket) -> None:
    for written, spec in enumerate(MIXED):
        buffer, start = torch.zeros(bucket.size_bytes, dtype=torch.uint8), bucket.offsets[written]
        places(bucket, buffer)[written].view(-1).view(torch.uint8).fill_(255)
        assert buffer[start : start + spec.size_bytes].eq(255).all()
        assert int(buffer.ne(0).sum()) == spec.size_bytes


def test_unpacked_weights_alias_the_buffer(bucket: Bucket) -> None:
    buffer = random_bytes(bucket.size_bytes)
    storage = buffer.untyped_storage().data_ptr()
    for tensor in places(bucket, buffer):
        assert tensor.untyped_storage().data_ptr() == storage
    buffer.zero_()
    assert all(not as_bytes(tensor).strip(b"\0") for tensor in places(bucket, buffer))


def test_equal_neighbours_with_padding_are_cut_at_their_offsets() -> None:
    specs = [WeightSpec(name=name, dtype="float32", shape=(3,)) for name in "abc"]
    (bucket,) = plan_buckets(specs, bucket_bytes=10**6)
    buffer = random_bytes(bucket.size_bytes)
    assert [as_bytes(place) for place in places(bucket, buffer)] == [
        as_bytes(buffer[offset : offset + 12]) for offset in bucket.offsets
    ]


def test_a_buffer_of_another_size_is_refused(bucket: Bucket) -> None:
    for size in (bucket.size_bytes - ALIGNMENT_BYTES, bucket.size_bytes + ALIGNMENT_BYTES):
        with pytest.raises(RuntimeError, match="split_with_sizes"):
            places(bucket, random_bytes(size))


def test_a_bucket_of_nothing_but_empty_weights_needs_no_memory() -> None:
    specs = [WeightSpec(name="empty", dtype="float32", shape=(0, 5))]
    (bucket,) = plan_buckets(specs, bucket_bytes=100)
    assert [(name, tuple(tensor.shape)) for name, tensor in unpack(bucket, random_bytes(0))] == [("empty", (0, 5))]
