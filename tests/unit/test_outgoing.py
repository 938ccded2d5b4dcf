"""Outgoing: every weight once, in one order, as announced; only its source writes it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.models.own_weights import OwnWeight
from rl_safe_workers.rollout.digest import Sizes, digests_of
from rl_safe_workers.rollout.packing import adjacent_in, dtype_name
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec, plan_buckets
from rl_safe_workers.rollout.sent_digests import SentDigests
from rl_safe_workers.workers import outgoing as outgoing_module
from rl_safe_workers.workers.outgoing import Items, Outgoing
from tests.unpacking import unpack

CPU = torch.device("cpu")
MARK = 7
"""Value of each byte of a buffer that nobody has written."""

Weights = dict[str, torch.Tensor]
Tell = Callable[[int, Sequence[OwnWeight]], Outgoing]


def spec(name: str, tensor: torch.Tensor, *, source: int = 0) -> WeightSpec:
    return WeightSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), source=source)


def outgoing(weights: Weights, *, source: int = 0) -> Outgoing:
    specs = tuple(spec(name, tensor, source=source) for name, tensor in weights.items())
    return Outgoing(specs=specs, mine=frozenset(weights), is_collective=False, weights=lambda _: alone(weights))


def alone(weights: Weights) -> Items:
    """Yields each weight as an item of its own."""
    return (((name,), (tensor,)) for name, tensor in weights.items())


def only_bucket(made: Outgoing) -> Bucket:
    (bucket,) = plan_buckets(made.specs, bucket_bytes=10**6)
    return bucket


def own(place: tuple[int, ...], weights: Weights, *, is_source: bool = True) -> OwnWeight:
    tensors = list(weights.values())
    return OwnWeight(
        place=place,
        names=tuple(weights),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(tensor.dtype for tensor in tensors),
        is_split=False,
        is_source=is_source,
        make=lambda: tensors,
    )


def ones(*names: str) -> Weights:
    return {name: torch.ones(2) for name in names}


def packed(made: Outgoing, bucket: Bucket, weights: Any, *, training_rank: int) -> torch.Tensor:
    buffer = torch.full((bucket.size_bytes,), MARK, dtype=torch.uint8)
    made.pack(bucket, weights, buffer, training_rank=training_rank)
    return buffer


def test_the_source_writes_every_weight_bit_for_bit() -> None:
    weights = {
        "nan": torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "half": torch.tensor([1.5, -0.0, 3.0], dtype=torch.bfloat16),
        "empty": torch.ones(0, 4),
        "scalar": torch.tensor(2**53 + 1, dtype=torch.int64),
    }
    made = outgoing(weights)
    buffer = packed(made, only_bucket(made), made.weights(frozenset()), training_rank=0)
    for name, tensor in unpack(only_bucket(made), buffer):
        expected = weights[name].contiguous()
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


def test_buckets_take_the_weights_one_after_the_other() -> None:
    weights = {name: torch.full((4,), float(number)) for number, name in enumerate("abc")}
    made = outgoing(weights)
    left, received = made.weights(frozenset()), {}
    for bucket in plan_buckets(made.specs, bucket_bytes=16):
        received.update(unpack(bucket, packed(made, bucket, left, training_rank=0)))
    assert {name: tensor[0].item() for name, tensor in received.items()} == {"a": 0.0, "b": 1.0, "c": 2.0}
    assert next(left, None) is None


def test_a_rank_that_helps_the_source_takes_its_weights_but_leaves_the_buffer() -> None:
    made = outgoing(ones("a", "b"), source=1)
    left = made.weights(frozenset())
    buffer = packed(made, only_bucket(made), left, training_rank=0)
    assert buffer.eq(MARK).all()
    assert next(left, None) is None


def test_a_rank_without_the_weights_of_a_bucket_makes_room_and_takes_none() -> None:
    made, theirs = outgoing(ones("a")), outgoing(ones("b", "c"), source=1)
    left = made.weights(frozenset())
    buffer = packed(made, only_bucket(theirs), left, training_rank=0)
    assert (buffer.dtype, len(buffer)) == (torch.uint8, 32)
    assert buffer.eq(MARK).all()
    assert next(left)[0] == ("a",)


@pytest.mark.parametrize("training_rank", [0, 1], ids=["source", "helper"])
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"b": torch.ones(2)}, "weight b float32 (2,) was announced as a float32 (2,)"),
        ({"a": torch.ones(1, 2)}, "weight a float32 (1, 2) was announced as a float32 (2,)"),
        ({"a": torch.ones(2).bfloat16()}, "weight a bfloat16 (2,) was announced as a float32 (2,)"),
        ({}, "weight a was announced, but the export has ended"),
    ],
    ids=["name", "shape", "dtype", "too_few"],
)
def test_a_weight_that_is_not_what_was_announced_is_refused(weights: Weights, message: str, training_rank: int) -> None:
    made = outgoing(ones("a"))
    with pytest.raises(WeightSyncError) as caught:
        packed(made, only_bucket(made), alone(weights), training_rank=training_rank)
    assert str(caught.value) == message


def test_the_second_weight_may_be_the_one_that_is_missing() -> None:
    made = outgoing(ones("a", "b"))
    with pytest.raises(WeightSyncError, match="^weight b was announced, but the export has ended$"):
        packed(made, only_bucket(made), alone(ones("a")), training_rank=0)


def test_a_failed_bucket_takes_its_weights_all_the_same() -> None:
    """Peers may wait for this rank in the collectives that make them, and the next bucket begins with its own."""
    weights = {name: torch.full((4,), float(number)) for number, name in enumerate("abcd")}
    made = outgoing(weights)
    first, second = plan_buckets(made.specs, bucket_bytes=32)
    left = alone({**weights, "a": torch.ones(5)})
    with pytest.raises(WeightSyncError, match="weight a float32"):
        packed(made, first, left, training_rank=0)
    received = dict(unpack(second, packed(made, second, left, training_rank=0)))
    assert {name: tensor[0].item() for name, tensor in received.items()} == {"c": 2.0, "d": 3.0}


def test_an_export_that_brings_all_to_all_is_sent_by_rank_0() -> None:
    weights = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    made = Outgoing.of_all(lambda: iter(weights.items()))
    assert made.specs == (spec("a", weights["a"]), spec("b", weights["b"]))
    assert made.mine == {"a", "b"}
    assert [names for _ in range(2) for names, _ in made.weights(frozenset())] == [("a",), ("b",)] * 2


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Returns what makes a rank's `Outgoing`; the ranks are told of each other in the order of the calls."""
    told: list[Any] = []

    def gather(mine: Any, group: Any) -> list[Any]:
        told.append(json.loads(json.dumps(mine)))
        return told

    monkeypatch.setattr("rl_safe_workers.workers.outgoing.gather_json", gather)
    return lambda rank, weights: Outgoing.of_own(weights, training_rank=rank)


def test_each_rank_sends_its_own_in_the_order_of_places_then_of_ranks(tell: Tell) -> None:
    tell(0, [own((0, 0, 5), ones("last")), own((0, 0, 1), ones("gate.0", "up.0"))])
    made = tell(
        1, [own((0, 0, 1), ones("gate.1", "up.1")), own((1, 0, 0), ones("next stage")), own((0, 0, 0), ones("first"))]
    )
    assert [(spec.name, spec.source) for spec in made.specs] == [
        ("first", 1),
        ("gate.0", 0),
        ("up.0", 0),
        ("gate.1", 1),
        ("up.1", 1),
        ("last", 0),
        ("next stage", 1),
    ]
    assert made.mine == {"first", "gate.1", "up.1", "next stage"}


def test_a_rank_yields_its_own_in_the_order_in_which_they_are_sent(tell: Tell) -> None:
    weights = [
        own((0, 1, 0), ones("c")),
        own((0, 0, 3), ones("b.0", "b.1")),
        own((0, 0, 3), ones("b.2")),
        own((0, 0, 2), ones("a")),
    ]
    made = tell(0, weights)
    for _ in range(2):
        assert (
            [name for names, _ in made.weights(frozenset()) for name in names]
            == [spec.name for spec in made.specs]
            == ["a", "b.0", "b.1", "b.2", "c"]
        )


def test_a_helper_makes_a_weight_that_another_sends(tell: Tell) -> None:
    tell(0, [own((0, 0, 0), ones("split"))])
    made = tell(1, [own((0, 0, 0), ones("split"), is_source=False)])
    assert made.specs == (spec("split", torch.ones(2)),)
    assert made.mine == {"split"}


def test_two_sources_of_one_weight_are_refused(tell: Tell) -> None:
    tell(0, [own((0, 0, 0), ones("a", "b"))])
    with pytest.raises(WeightSyncError, match="^two training ranks would send the same weight$"):
        tell(1, [own((1, 0, 0), ones("b"))])


@pytest.fixture
def fused(tell: Tell) -> Outgoing:
    """A rank that has a parameter with gate and up, and one that is a weight."""
    both, down = torch.arange(16.0).view(4, 4), torch.arange(16.0, 24.0).view(4, 2)
    weights = own((0, 0, 0), {"gate": both[:2], "up": both[2:]})
    return tell(
        0,
        [
            dataclasses.replace(weights, parameter=both),
            dataclasses.replace(own((0, 0, 1), {"down": down}), parameter=down),
        ],
    )


@pytest.mark.parametrize(
    ("bucket_bytes", "items"),
    [(10**6, [("gate", "up"), ("down",)]), (32, [("gate",), ("up",), ("down",)])],
    ids=["one bucket", "a cut between gate and up"],
)
def test_weights_of_a_parameter_are_taken_together_unless_a_bucket_ends_between_them(
    fused: Outgoing, bucket_bytes: int, items: list[tuple[str, ...]]
) -> None:
    buckets = plan_buckets(fused.specs, bucket_bytes=bucket_bytes)
    adjacent = adjacent_in(buckets)
    assert [names for names, _ in fused.weights(adjacent)] == items
    left = fused.weights(adjacent)
    received: Weights = {}
    for bucket in buckets:
        received.update(unpack(bucket, packed(fused, bucket, left, training_rank=0)))
    assert torch.equal(torch.cat([received[name].view(-1) for name in ("gate", "up", "down")]), torch.arange(24.0))


def experts(*numbers: int, width: int = 2) -> list[OwnWeight]:
    """Returns experts with gate and up in one parameter each, whose values are the expert's number."""
    found = []
    for number in numbers:
        both = torch.full((4, width), float(number))
        weights = own((0, 0, 0), {f"gate.{number}": both[:2], f"up.{number}": both[2:]})
        found.append(dataclasses.replace(weights, parameter=both))
    return found


def test_all_experts_of_a_layer_are_one_item_and_are_read_anew_in_each_sync(tell: Tell) -> None:
    of_rank = experts(0, 1, 2)
    made = tell(0, of_rank)
    bucket = only_bucket(made)
    for factor in (1.0, 10.0):
        left = made.weights(adjacent_in([bucket]))
        received = dict(unpack(bucket, packed(made, bucket, left, training_rank=0)))
        assert next(left, None) is None
        assert {name: tensor.unique().tolist() for name, tensor in received.items()} == {
            f"{kind}.{number}": [number * factor] for number in range(3) for kind in ("gate", "up")
        }
        for weight in of_rank:
            assert weight.parameter is not None
            weight.parameter.mul_(10)
    assert [len(names) for names, _ in made.weights(adjacent_in([bucket]))] == [6]


def test_only_weights_of_one_form_are_one_item(tell: Tell) -> None:
    made = tell(0, [*experts(0, 1), *experts(2, width=4)])
    bucket = only_bucket(made)
    assert [len(names) for names, _ in made.weights(adjacent_in([bucket]))] == [4, 2]
    received = dict(unpack(bucket, packed(made, bucket, made.weights(adjacent_in([bucket])), training_rank=0)))
    assert [received[f"up.{number}"].unique().item() for number in range(3)] == [0.0, 1.0, 2.0]


class Quantised(torch.Tensor):
    """Stands for a parameter whose memory is not its values."""


@pytest.mark.parametrize(
    ("parameters", "items"),
    [
        ([torch.arange(4.0), torch.arange(4.0, 9.0)], 1),
        ([torch.arange(4.0), torch.tensor(7.0)], 2),
        ([torch.arange(4.0), torch.nn.Parameter(torch.arange(4.0, 8.0)), torch.arange(4).bfloat16()], 2),
        ([torch.arange(4.0), torch.arange(4.0, 8.0).as_subclass(Quantised)], 2),
        ([torch.ones(0, 4), torch.ones(1, 4)], 2),
    ],
    ids=["before padding", "a scalar", "a Parameter and another dtype", "a class of its own", "nothing"],
)
def test_adjacent_weights_are_one_item_if_they_can_be_joined(
    tell: Tell, parameters: Sequence[torch.Tensor], items: int
) -> None:
    made = tell(
        0,
        [
            dataclasses.replace(own((0, 0, number), {str(number): parameter.detach()}), parameter=parameter)
            for number, parameter in enumerate(parameters)
        ],
    )
    bucket = only_bucket(made)
    adjacent = adjacent_in([bucket])
    assert len(adjacent) == len(parameters) - 1
    assert len(list(made.weights(adjacent))) == items
    received = dict(unpack(bucket, packed(made, bucket, made.weights(adjacent), training_rank=0)))
    assert all(torch.equal(received[str(number)], each) for number, each in enumerate(parameters))


def test_a_parameter_without_weights_keeps_adjacent_weights_apart(tell: Tell) -> None:
    nothing = OwnWeight(place=(0, 0, 0), names=(), shapes=(), dtypes=(), is_split=False, is_source=True, make=list)
    made = tell(0, [experts(0)[0], nothing, experts(1)[0]])
    bucket = only_bucket(made)
    assert [len(names) for names, _ in made.weights(adjacent_in([bucket]))] == [2, 2]


def test_each_weight_of_an_item_has_a_digest_of_its_own(tell: Tell) -> None:
    single = torch.arange(3.0)
    made = tell(
        0,
        [
            *experts(0, 1),
            dataclasses.replace(own((0, 0, 1), {"norm": single}), parameter=single),
            own((0, 0, 2), ones("b")),
        ],
    )
    bucket, found = only_bucket(made), SentDigests()
    buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8)
    made.pack(bucket, made.weights(adjacent_in([bucket])), buffer, training_rank=0, digests=found)
    assert found.sent().digests == {name: int(digests_of([weight])) for name, weight in unpack(bucket, buffer)}


def test_the_digests_of_parameters_are_taken_where_they_are_now(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    preparations: list[int] = []

    def prepared(tensors: Sequence[torch.Tensor], *, sizes: Sizes) -> Callable[[], torch.Tensor]:
        preparations.append(len(tensors))
        # It knows the tensors' memory only, as on a GPU.
        return partial(digests_of, [tensor.detach() for tensor in tensors], sizes=sizes)

    monkeypatch.setattr(outgoing_module, "prepared", prepared)
    of_rank = [*experts(0, 1), own((0, 0, 2), ones("built"))]
    made = tell(0, of_rank)
    bucket = only_bucket(made)
    adjacent = adjacent_in([bucket])
    parameters = [one.parameter for one in of_rank if one.parameter is not None]

    def sent() -> dict[str, int]:
        found, buffer = SentDigests(), torch.empty(bucket.size_bytes, dtype=torch.uint8)
        made.digest_in_place(found, adjacent)
        assert [spec.name in found for spec in made.specs] == [spec.name != "built" for spec in made.specs]
        made.pack(bucket, made.weights(adjacent), buffer, training_rank=0, digests=found)
        expected = {name: int(digests_of([weight])) for name, weight in unpack(bucket, buffer)}
        assert found.sent().digests == expected
        return expected

    first = sent()
    parameters[0].add_(1)
    changed = sent()
    assert {name for name in first if first[name] != changed[name]} == set(of_rank[0].names)
    parameters[1].data = parameters[1].data + 1
    moved = sent()
    assert {name for name in first if changed[name] != moved[name]} == set(of_rank[1].names)
    assert preparations == [2, 2]


def test_a_rank_takes_no_digests_of_what_another_rank_sends(tell: Tell) -> None:
    of_rank = experts(0, 1)
    tell(1, of_rank)
    made, found = tell(0, [dataclasses.replace(one, is_source=False) for one in of_rank]), SentDigests()
    adjacent = adjacent_in([only_bucket(made)])
    assert len(list(made.weights(adjacent))) == 1
    made.digest_in_place(found, adjacent)
    assert found.sent().digests == {}


def test_a_parameter_that_is_not_as_announced_is_named_and_not_read(tell: Tell) -> None:
    of_rank = experts(0, 1)
    made, found = tell(0, of_rank), SentDigests()
    bucket = only_bucket(made)
    assert of_rank[1].parameter is not None
    of_rank[1].parameter.data = of_rank[1].parameter.data[:2].clone()
    made.digest_in_place(found, adjacent_in([bucket]))
    assert found.sent().digests == {}
    with pytest.raises(WeightSyncError, match=r"^weight gate\.0 to up\.1 \(4 weights\) .* was announced as"):
        packed(made, bucket, made.weights(adjacent_in([bucket])), training_rank=0)


def test_a_parameter_without_whole_weights_is_refused(tell: Tell) -> None:
    of_rank = experts(0, 1)
    made = tell(0, of_rank)
    for one, rows in zip(of_rank, (3, 5), strict=True):
        assert one.parameter is not None
        one.parameter.data = torch.zeros(rows, 2)
    with pytest.raises(WeightSyncError, match=r"^a parameter \(3, 2\) does not have whole weights"):
        made.digest_in_place(SentDigests(), adjacent_in([only_bucket(made)]))


def test_an_error_about_many_weights_is_short(tell: Tell) -> None:
    of_rank = experts(0, 1)
    made = tell(0, of_rank)
    bucket = only_bucket(made)
    assert of_rank[1].parameter is not None
    of_rank[1].parameter.untyped_storage().resize_(0)
    with pytest.raises(
        WeightSyncError, match=r"^weight gate\.0 to up\.1 \(4 weights\): the memory of a parameter is freed$"
    ):
        packed(made, bucket, made.weights(adjacent_in([bucket])), training_rank=0)


def test_weights_that_this_rank_has_in_a_row_are_apart_if_a_bucket_has_others_between_them(tell: Tell) -> None:
    made = tell(0, experts(0, 1))
    theirs = [spec(name, torch.ones(2, 2)) for name in ("gate.0", "up.0", "another", "gate.1", "up.1")]
    (bucket,) = plan_buckets(theirs, bucket_bytes=10**6)
    assert [len(names) for names, _ in made.weights(adjacent_in([bucket]))] == [2, 2]


def test_weights_with_padding_between_them_are_not_taken_together(tell: Tell) -> None:
    both = torch.arange(6.0)
    weights = own((0, 0, 0), {"a": both[:3], "b": both[3:]})
    made = tell(0, [dataclasses.replace(weights, parameter=both)])
    bucket = only_bucket(made)
    left = made.weights(adjacent_in([bucket]))
    received = dict(unpack(bucket, packed(made, bucket, left, training_rank=0)))
    assert [received[name].tolist() for name in "ab"] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_an_item_must_have_as_many_bytes_as_its_weights() -> None:
    made = outgoing(ones("a", "b"))
    with pytest.raises(WeightSyncError, match=r"^weight a, b float32 \(5,\) was announced as a float32 \(2,\)$"):
        packed(made, only_bucket(made), iter([(("a", "b"), (torch.ones(5),))]), training_rank=0)


def test_a_parameter_whose_memory_is_freed_is_refused(tell: Tell) -> None:
    weight = torch.ones(4)
    made = tell(0, [dataclasses.replace(own((0, 0, 0), {"a": weight}), parameter=weight)])
    weight.untyped_storage().resize_(0)
    with pytest.raises(WeightSyncError, match="^weight a: the memory of a parameter is freed$"):
        packed(made, only_bucket(made), made.weights(frozenset()), training_rank=0)
