"""Weights straight into a model: only where its loaders do nothing but copy, and only once that is proven."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rl_safe_workers.rollout.direct_load import DirectLoad
from rl_safe_workers.rollout.protocol import plan_buckets
from tests.unit.loading_models import (
    BUCKETS,
    CPU,
    SPECS,
    Blanks,
    Casts,
    Forgets,
    Model,
    Pads,
    Part,
    Refuses,
    Scales,
    Transposes,
    learned,
    sent,
    update,
    whole,
)


def test_the_weights_take_several_buckets() -> None:
    assert len(BUCKETS) > 2


@pytest.mark.parametrize("kind", [Model, Transposes, Scales, Casts, Forgets, Refuses])
def test_watching_the_loaders_writes_nothing(kind: type[Model]) -> None:
    model = kind()
    learned(model)
    assert [int(tensor.count_nonzero()) for tensor in model.tensors()] == [0, 0, 0]


@pytest.mark.parametrize("kind", [Model, Pads])
def test_an_update_by_the_plan_is_bit_for_bit_one_through_the_loaders(kind: type[Model]) -> None:
    model, other = kind(), kind()
    plan = learned(model)
    update(model, plan, seed=0)
    assert plan.check(model.tensors()) is None
    for number, buffer in enumerate(sent(1)):
        plan.load(number, buffer)
    update(other, learned(other), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.tensors(), other.tensors(), strict=True))


def test_a_rank_of_an_engine_takes_its_part_by_the_plan_as_through_the_loaders() -> None:
    model, other = Part(), Part()
    plan = learned(model, parts=2)
    update(model, plan, seed=0)
    assert plan.check(model.tensors()) is None
    for number, buffer in enumerate(sent(1)):
        plan.load(number, buffer)
    update(other, learned(other, parts=2), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.tensors(), other.tensors(), strict=True))
    assert learned(Part()).obstacle is not None, "an engine of one rank takes all"


@pytest.mark.parametrize("kind", [Transposes, Scales, Casts, Blanks, Forgets])
def test_loaders_that_do_more_or_less_than_copy_are_not_replaced(kind: type[Model]) -> None:
    model = kind()
    plan = learned(model)
    update(model, plan, seed=0)
    assert plan.check(model.tensors()) is not None


def _swap_experts(model: Model) -> None:
    model.experts.copy_(model.experts.flip(0))


def _transpose_an_expert(model: Model) -> None:
    model.experts[0].copy_(model.experts[0].t().clone())


def _flip_a_bit(model: Model) -> None:
    model.joined.view(torch.int32)[0, 0] ^= 1


@pytest.mark.parametrize("change", [_swap_experts, _transpose_an_expert, _flip_a_bit])
def test_a_model_that_changes_its_weights_after_loading_is_not_proven(change) -> None:
    model = Model()
    plan = learned(model)
    update(model, plan, seed=0)
    change(model)
    assert plan.check(model.tensors()) is not None


def test_loaders_that_refuse_to_work_in_place_are_not_replaced() -> None:
    model = Refuses()
    plan = learned(model)
    for number, buffer in enumerate(sent(0)):
        plan.note(number, buffer)
    assert plan.check(model.tensors()) is not None


def test_a_destination_that_is_part_of_the_model_no_more_is_not_proven() -> None:
    model = Model()
    plan = learned(model)
    update(model, plan, seed=0)
    model.joined = model.joined.clone()
    assert plan.check(model.tensors()) is not None


def test_what_lies_side_by_side_here_and_there_is_copied_at_once() -> None:
    model = Model()
    (bucket,) = plan_buckets(SPECS, bucket_bytes=2**20)
    plan = DirectLoad(whole([bucket]), model.load_weights, device=CPU)
    copied = [(copy.target.data_ptr(), copy.target.numel()) for copy in plan.copies[0]]
    assert copied == [(tensor.data_ptr(), tensor.numel()) for tensor in model.tensors()]


def test_without_an_update_nothing_is_proven() -> None:
    model = Model()
    assert learned(model).check(model.tensors()) is not None


def test_a_bucket_that_is_not_used_up_is_not_plain() -> None:
    model = Model()
    extra = plan_buckets(SPECS[:1], bucket_bytes=100)
    plan = DirectLoad(whole(extra), lambda weights: None, device=CPU)
    plan.note(0, torch.zeros(SPECS[0].slot_bytes, dtype=torch.uint8))
    assert plan.check(model.tensors()) is not None
    assert int(model.joined.count_nonzero()) == 0


class _FirstExpert(Model):
    """A rank of an expert-parallel engine that holds the first expert only."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name, tensor) for name, tensor in weights if name not in ("expert.1", "expert.2"))


def test_a_bucket_of_which_a_rank_holds_nothing_is_taken_and_has_no_digests() -> None:
    model = _FirstExpert()
    plan = DirectLoad(
        [*whole(plan_buckets(SPECS[:3], bucket_bytes=1000)), *whole(plan_buckets(SPECS[3:5], bucket_bytes=1000))],
        model.load_weights,
        device=CPU,
        parts=2,
    )
    assert plan.obstacle is None
    assert [len(copies) for copies in plan.copies][-1] == 0
    buffer = torch.zeros(2**10, dtype=torch.uint8)
    for number in range(2):
        plan.note(number, buffer)
    assert [len(of_bucket) > 0 for of_bucket in plan._sent] == [True], "an empty tensor would be on the CPU"
    assert plan.check(model.tensors()) is None
