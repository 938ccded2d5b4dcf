"""Weights straight into a model: only where its loaders do nothing but copy, and only once that is proven."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rl_safe_workers.rollout.direct_load import DirectLoad
from rl_safe_workers.rollout.packing import unpack
from rl_safe_workers.rollout.protocol import WeightSpec, plan_buckets

HIDDEN, EXPERTS = 4, 3
CPU = torch.device("cpu")


class Model:
    """Loads as vLLM's models do: halves of a projection side by side, experts in one tensor."""

    def __init__(self) -> None:
        self.joined = torch.zeros(2 * HIDDEN, HIDDEN)
        self.experts = torch.zeros(EXPERTS, HIDDEN, HIDDEN, dtype=torch.bfloat16)
        self.norm = torch.zeros(HIDDEN)

    def tensors(self) -> list[torch.Tensor]:
        return [self.joined, self.experts, self.norm]

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.place(name).copy_(tensor)

    def place(self, name: str) -> torch.Tensor:
        if name in ("first", "second"):
            return self.joined.narrow(0, HIDDEN * (name == "second"), HIDDEN)
        return self.norm if name == "norm" else self.experts[int(name.removeprefix("expert."))]


class Transposes(Model):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.place(name).copy_(tensor.t().contiguous() if tensor.dim() == 2 else tensor)


class Scales(Model):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.place(name).copy_(tensor).mul_(2)


class Casts(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = self.norm.bfloat16()


class Pads(Model):
    """As vLLM's embeddings do: the rows beyond the vocabulary become zero."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.place(name).copy_(tensor)
            self.experts[EXPERTS:].fill_(0)


class Blanks(Model):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.place(name).copy_(tensor).zero_()


class Forgets(Model):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name, tensor) for name, tensor in weights if name != "norm")


class Refuses(Model):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        raise AssertionError("Attempted to load weight into parameter (torch.Size([0]))")


SPECS = [
    WeightSpec(name="first", dtype="float32", shape=(HIDDEN, HIDDEN)),
    WeightSpec(name="second", dtype="float32", shape=(HIDDEN, HIDDEN)),
    *(WeightSpec(name=f"expert.{i}", dtype="bfloat16", shape=(HIDDEN, HIDDEN)) for i in range(EXPERTS)),
    WeightSpec(name="norm", dtype="float32", shape=(HIDDEN,)),
]
BUCKETS = plan_buckets(SPECS, bucket_bytes=100)


def sent(seed: int) -> list[torch.Tensor]:
    """The buffers of an update."""
    generator = torch.Generator().manual_seed(seed)
    buffers = []
    for bucket in BUCKETS:
        buffer = torch.zeros(bucket.size_bytes, dtype=torch.uint8)
        for _, weight in unpack(bucket, buffer):
            weight.copy_(torch.randn(weight.shape, generator=generator))
        buffers.append(buffer)
    return buffers


def update(model: Model, plan: DirectLoad, seed: int) -> None:
    """An update through the loaders."""
    for number, (bucket, buffer) in enumerate(zip(BUCKETS, sent(seed), strict=True)):
        plan.note(number, buffer)
        model.load_weights(unpack(bucket, buffer))


def learned(model: Model) -> DirectLoad:
    return DirectLoad(BUCKETS, model.load_weights, device=CPU)


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
    plan = DirectLoad([bucket], model.load_weights, device=CPU)
    copied = [(copy.target.data_ptr(), copy.target.numel()) for copy in plan.copies[0]]
    assert copied == [(tensor.data_ptr(), tensor.numel()) for tensor in model.tensors()]


def test_without_an_update_nothing_is_proven() -> None:
    model = Model()
    assert learned(model).check(model.tensors()) is not None


def test_a_bucket_that_is_not_used_up_is_not_plain() -> None:
    model = Model()
    extra = plan_buckets(SPECS[:1], bucket_bytes=100)
    plan = DirectLoad(extra, lambda weights: None, device=CPU)
    plan.note(0, torch.zeros(SPECS[0].slot_bytes, dtype=torch.uint8))
    assert plan.check(model.tensors()) is not None
    assert int(model.joined.count_nonzero()) == 0
