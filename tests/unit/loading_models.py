"""Small models with loaders that copy, transpose, scale, cast, pad, blank, forget or refuse weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rl_safe_workers.rollout.cuts import BucketPart, engine_ranks, parts_of
from rl_safe_workers.rollout.direct_load import DirectLoad
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec, plan_buckets
from tests.unpacking import unpack

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


class Part(Model):
    """The second rank of two: it takes lower halves of matrices, right halves of experts, and the rest whole."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = torch.zeros(HIDDEN, HIDDEN)
        self.experts = torch.zeros(EXPERTS, HIDDEN, HIDDEN // 2, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        half = HIDDEN // 2
        for name, tensor in weights:
            if name in ("first", "second"):
                self.joined.narrow(0, half * (name == "second"), half).copy_(tensor.narrow(0, half, half))
            else:
                self.place(name).copy_(tensor.narrow(1, half, half) if name.startswith("expert") else tensor)


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


def whole(buckets: Sequence[Bucket]) -> list[tuple[Bucket, BucketPart]]:
    """The buckets, with the part of an engine's only rank."""
    return [(bucket, *parts_of(bucket, engine_ranks(1, kv_heads=1))) for bucket in buckets]


def learned(model: Model, parts: int = 1) -> DirectLoad:
    return DirectLoad(whole(BUCKETS), model.load_weights, device=CPU, parts=parts)
