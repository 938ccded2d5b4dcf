"""Packed updates into a model: through its loaders first, directly once that is proven, and never in part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count

import pytest
import torch

from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.rollout.packed_updates import PackedUpdates, bucket_tensor, plan_tensor
from rl_safe_workers.rollout.packing import NamedTensor
from rl_safe_workers.rollout.protocol import ALIGNMENT_BYTES
from tests.unit.loading_models import BUCKETS, CPU, SPECS, Model, Part, Scales, sent
from tests.unpacking import unpack


class _Module(torch.nn.Module):
    """A module with the tensors of a model of `loading_models`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        yield from self._model.tensors()  # type: ignore[misc]


class _Loads:
    """A model of `loading_models` with the calls of its loaders counted."""

    def __init__(self, model: Model) -> None:
        self.model, self.module, self.calls = model, _Module(model), 0

    def load(self, weights: object) -> None:
        self.calls += 1
        self.model.load_weights(weights)  # type: ignore[arg-type]


def _tensors(seed: int) -> list[NamedTensor]:
    return [plan_tensor(BUCKETS, device=CPU), *map(bucket_tensor, count(), sent(seed))]


def _update(updates: PackedUpdates, loads: _Loads, tensors: Sequence[NamedTensor]) -> None:
    # A host may divide the tensors among several calls.
    for part in (tensors[:2], tensors[2:]):
        updates.load(part, [loads.module], loads.load)
    updates.end(loads.model.tensors())


def _by_loaders(model: Model, seed: int) -> Model:
    for bucket, buffer in zip(BUCKETS, sent(seed), strict=True):
        model.load_weights(unpack(bucket, buffer))
    return model


@pytest.mark.parametrize(("kind", "parts"), [(Model, 1), (Part, 2)])
def test_updates_are_copied_straight_into_the_model_after_the_first(kind: type[Model], parts: int) -> None:
    loads, updates = _Loads(kind()), PackedUpdates(parts=parts)
    _update(updates, loads, _tensors(0))
    assert updates.obstacle is None
    calls = loads.calls
    assert calls == 2 * len(BUCKETS), "once to learn the plan, and once to load"
    _update(updates, loads, _tensors(1))
    assert loads.calls == calls
    expected = _by_loaders(kind(), 1).tensors()
    assert all(torch.equal(a, b) for a, b in zip(loads.model.tensors(), expected, strict=True))
    assert updates.specs == tuple(SPECS)


def test_a_model_that_computes_from_its_weights_is_loaded_by_its_loaders_each_time() -> None:
    loads, updates = _Loads(Scales()), PackedUpdates(parts=1)
    for seed in range(3):
        _update(updates, loads, _tensors(seed))
    assert "do more than copy" in str(updates.obstacle)
    expected = _by_loaders(Scales(), 2).tensors()
    assert all(torch.equal(a, b) for a, b in zip(loads.model.tensors(), expected, strict=True))


def test_every_tensor_starts_at_an_aligned_place_behind_the_ones_before_it() -> None:
    assert [tensor.nbytes % ALIGNMENT_BYTES for _, tensor in _tensors(0)] == [0] * (1 + len(BUCKETS))


def test_hf_weights_are_not_taken_for_a_packed_update() -> None:
    assert PackedUpdates.is_packed(_tensors(0)[1:])
    assert not PackedUpdates.is_packed([("model.norm.weight", torch.zeros(2))])
    PackedUpdates(parts=1).end(())


def test_an_update_that_lacks_a_bucket_is_refused() -> None:
    loads, updates = _Loads(Model()), PackedUpdates(parts=1)
    updates.load(_tensors(0)[:-1], [loads.module], loads.load)
    with pytest.raises(WeightSyncError, match=rf"^1 of {len(BUCKETS)} buckets of a weight update did not come$"):
        updates.end(loads.model.tensors())


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("rl_safe.bucket.0", sent(0)[0]), "'rl_safe.bucket.0' came twice"),
        (("rl_safe.bucket.-1", sent(0)[0]), "'rl_safe.bucket.-1' came twice in a weight update, or its plan"),
        (("rl_safe.bucket.99", sent(0)[0]), "or its plan has no such bucket"),
        (("model.norm.weight", sent(0)[0]), "'model.norm.weight' came twice in a weight update, or its plan"),
        (("rl_safe.bucket.1", sent(0)[1][:16]), "bucket 1 of a weight update has 16 bytes, and its plan says"),
    ],
)
def test_a_tensor_that_is_not_the_plans_is_refused(tensor: NamedTensor, message: str) -> None:
    loads, updates = _Loads(Model()), PackedUpdates(parts=1)
    updates.load(_tensors(0)[:2], [loads.module], loads.load)
    with pytest.raises(WeightSyncError, match=message):
        updates.load([tensor], [loads.module], loads.load)


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "7",
        "[[[1, 2]]]",
        json.dumps([[["norm", "object", [4]]]]),
        json.dumps([[["norm", "float32", [-4]]]]),
        json.dumps([[["norm", "float32", ["4"]]]]),
        json.dumps([[[["norm"], "float32", [4]]]]),
        json.dumps([[["norm", ["float32"], [4]]]]),
    ],
)
def test_a_plan_that_is_none_is_refused_and_the_next_one_is_taken(text: str) -> None:
    loads, updates = _Loads(Model()), PackedUpdates(parts=1)
    plan = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    with pytest.raises(WeightSyncError, match="^the plan of a weight update cannot be read: "):
        updates.load([("rl_safe.plan", plan)], [loads.module], loads.load)
    updates.abandon()
    _update(updates, loads, _tensors(0))
    assert updates.obstacle is None


def test_an_update_that_broke_off_is_forgotten_and_the_next_one_is_whole() -> None:
    loads, updates = _Loads(Model()), PackedUpdates(parts=1)
    updates.load(_tensors(0)[:3], [loads.module], loads.load)
    updates.abandon()
    _update(updates, loads, _tensors(1))
    assert updates.obstacle is None
    _update(updates, loads, _tensors(2))
    expected = _by_loaders(Model(), 2).tensors()
    assert all(torch.equal(a, b) for a, b in zip(loads.model.tensors(), expected, strict=True))


def test_another_plan_is_learned_anew() -> None:
    loads, updates = _Loads(Model()), PackedUpdates(parts=1)
    _update(updates, loads, _tensors(0))
    fewer = BUCKETS[1:]
    tensors = [plan_tensor(fewer, device=CPU), *map(bucket_tensor, count(), sent(1)[1:])]
    calls = loads.calls
    _update(updates, loads, tensors)
    assert loads.calls == calls + 2 * len(fewer)
    assert [spec.name for spec in updates.specs] == [spec.name for bucket in fewer for spec in bucket.specs]


def test_a_model_that_moves_its_weights_after_a_direct_update_is_learned_anew() -> None:
    loads, updates = _Loads(Model()), PackedUpdates(parts=1)
    for seed in range(2):
        _update(updates, loads, _tensors(seed))
    updates.load(_tensors(2), [loads.module], loads.load)
    loads.model.joined = loads.model.joined.clone()
    updates.end(loads.model.tensors())
    assert updates.obstacle == "the model's weights have moved"
    calls = loads.calls
    _update(updates, loads, _tensors(3))
    assert loads.calls > calls
    assert updates.obstacle is None
    loads.model.norm = loads.model.norm.clone()  # between two updates
    _update(updates, loads, _tensors(3))
    expected = _by_loaders(Model(), 3).tensors()
    assert all(torch.equal(a, b) for a, b in zip(loads.model.tensors(), expected, strict=True))
