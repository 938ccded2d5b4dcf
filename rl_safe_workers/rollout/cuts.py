"""Plans which part of each weight a rank of an engine gets in a weight sync: a cut, the whole, or nothing.

The rules are vLLM's, written as data. Imports neither torch nor vLLM, so that a plan can be made and shown anywhere.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from rl_safe_workers.findings import counted
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec, bucket_of, plan_buckets

JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Layers that hold the rows of several HF layers, in this order."""
JOINED_OF = {part: whole for whole, parts in JOINED.items() for part in parts}
EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")
EXPERTS = {
    "w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")),
    "w2_weight": (("down_proj",), ("w2",)),
}
"""Tensors with one matrix per expert. Each matrix holds the rows of these HF layers, in this order. The HF layers have
one of two sets of names."""
_ROWS_CUT = frozenset({"qkv_proj", "q_proj", "q_b_proj", "kv_b_proj", "gate_up_proj", "w13_weight"})
_COLUMNS_CUT = frozenset({"o_proj", "down_proj", "w2_weight"})
"""Layers and expert tensors that a tensor-parallel engine cuts: ``_ROWS_CUT`` by rows, ``_COLUMNS_CUT`` by columns.
The bias of a layer that is cut by columns stays whole."""
_OF_KV_HEADS = ("k_proj", "v_proj")
_VOCABULARY, _VOCABULARY_UNIT = frozenset({"embed_tokens", "lm_head"}), 64
"""Layers with a row for each token. vLLM pads their rows to a multiple of this unit before it cuts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRank:
    """A rank of a tensor-parallel engine.

    Example: ``EngineRank(rank=1, size=2, kv_heads=4)``
    """

    rank: int = 0
    size: int = 1
    kv_heads: int = 1
    """Number of the model's key-value heads. If there are more ranks than heads, several ranks hold the same head."""
    expert_parallel: bool = False
    """True if each rank holds some experts whole; False if it holds a cut of each expert."""

    def local_expert(self, number: int, *, experts: int) -> int | None:
        """Returns an expert's index on this rank; None if another rank holds it.

        Each rank holds consecutive experts. If the experts cannot be divided equally, the first ranks hold one more.

        Args:
            number: Number of the expert in its layer.
            experts: Number of experts of the layer.
        """
        if not self.expert_parallel:
            return number
        each, more = divmod(experts, self.size)
        first = self.rank * each + min(self.rank, more)
        return number - first if first <= number < first + each + (self.rank < more) else None

    def held_cut(self, name: str, layer: str, shape: tuple[int, ...]) -> Cut | None:
        """Returns the cut of a weight that this rank holds; None if it holds the whole.

        Args:
            name: HF name of the weight.
            layer: Name of the layer, or of the expert tensor, that holds it.
            shape: Shape of the whole weight.
        """
        if self.size == 1 or not shape or (self.expert_parallel and layer in EXPERTS):
            return None
        if layer in _COLUMNS_CUT and len(shape) > 1:
            each = shape[-1] // self.size
            return Cut(axis=len(shape) - 1, first=self.rank * each, length=each, whole_length=shape[-1])
        rows = shape[0]
        if layer in _VOCABULARY:
            each = -(-rows // _VOCABULARY_UNIT) * _VOCABULARY_UNIT // self.size
            first = min(self.rank * each, rows)
            return Cut(axis=0, first=first, length=min(each, rows - first), whole_length=rows)
        if layer in _ROWS_CUT:
            parts = min(self.size, self.kv_heads) if name.split(".")[-2] in _OF_KV_HEADS else self.size
            first = self.rank * parts // self.size * (rows // parts)
            return Cut(axis=0, first=first, length=rows // parts, whole_length=rows)
        return None

    def sent_cut(self, name: str, layer: str, shape: tuple[int, ...], *, experts: Mapping[str, int]) -> Cut | None:
        """Returns the cut of a weight that is sent to this rank; None if the whole is sent.

        This is the cut that the rank holds. For an expert that only other ranks hold, it is a cut without rows.

        Args:
            name: HF name of the weight.
            layer: Name of the layer, or of the expert tensor, that holds it.
            shape: Shape of the whole weight.
            experts: Number of experts of each layer; see `experts_of`.
        """
        match = EXPERT.fullmatch(name) if self.expert_parallel and layer in EXPERTS else None
        if match is not None and self.local_expert(int(match["expert"]), experts=experts[match["layer"]]) is None:
            return Cut(axis=0, first=0, length=0, whole_length=shape[0])
        return self.held_cut(name, layer, shape)


ONLY_RANK = EngineRank()
"""The rank of an engine without tensor parallelism."""


class View(NamedTuple):
    """A part of a tensor's memory, in elements, e.g. ``View((2, 3), (4, 1), 0)`` for three columns of four."""

    shape: tuple[int, ...]
    """All sizes are positive."""
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A range of a weight's rows or columns.

    Example: ``Cut(axis=0, first=64, length=64, whole_length=128)``
    """

    axis: int
    first: int
    length: int
    whole_length: int
    """Number of rows or columns of the whole weight."""

    def within(self, shape: Sequence[int], view: View) -> View | None:
        """Converts a view of the whole weight into a view of the cut; None if the view reaches outside of the cut.

        Args:
            shape: Shape of the whole weight, whose memory is contiguous.
            view: The view.
        """
        # Elements from one index of the cut's axis to the next.
        step_of_axis = math.prod(shape[self.axis + 1 :])
        # Elements in all indices of that axis.
        axis_elements = step_of_axis * self.whole_length
        steps = zip(view.shape, view.stride, strict=True)
        reach = sum((size - 1) * step for size, step in steps if step < axis_elements)
        begin = view.offset % axis_elements
        if begin < self.first * step_of_axis or begin + reach >= (self.first + self.length) * step_of_axis:
            return None
        if any(step % axis_elements for step in view.stride if step >= axis_elements):
            return None
        width = step_of_axis * self.length
        stride = tuple(step // axis_elements * width if step >= axis_elements else step for step in view.stride)
        return View(view.shape, stride, view.offset // axis_elements * width + begin - self.first * step_of_axis)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the cut.

        Args:
            whole: Shape of the whole weight.
        """
        return (*whole[: self.axis], self.length, *whole[self.axis + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPart:
    """The part of a bucket that one rank of each engine gets: a cut of each large weight, and all of the others."""

    bucket: Bucket
    """The weights, with the shapes of their cuts."""
    cuts: tuple[Cut | None, ...]
    """The cut of each weight; None for a whole weight. If a cut has no rows, this rank gets nothing of the weight."""
    start: int
    """Offset in bytes of the part in the memory of the bucket. The parts lie one after another."""

    @property
    def end(self) -> int:
        """Offset in bytes of the part's end in the memory of the bucket."""
        return self.start + self.bucket.size_bytes


def engine_ranks(size: int, kv_heads: int, *, expert_parallel: bool = False) -> tuple[EngineRank, ...]:
    """Returns the ranks of an engine.

    Args:
        size: Number of ranks over which vLLM's tensor parallelism cuts weights.
        kv_heads: Number of the model's key-value heads.
        expert_parallel: True if each rank holds some experts whole.
    """
    return tuple(
        EngineRank(rank=rank, size=size, kv_heads=kv_heads, expert_parallel=expert_parallel) for rank in range(size)
    )


def experts_of(specs: Iterable[WeightSpec]) -> dict[str, int]:
    """Returns the number of experts of each layer that has some, e.g. ``{"model.layers.0.mlp.experts": 128}``."""
    found: dict[str, int] = {}
    for match in filter(None, (EXPERT.fullmatch(spec.name) for spec in specs)):
        found[match["layer"]] = max(found.get(match["layer"], 0), int(match["expert"]) + 1)
    return found


def parts_of(
    bucket: Bucket, ranks: Sequence[EngineRank], *, experts: Mapping[str, int] = MappingProxyType({})
) -> tuple[BucketPart, ...]:
    """Divides a bucket among the ranks of an engine; returns each rank's part.

    A weight that is not cut goes to every rank. An expert goes only to the ranks that hold it.

    Args:
        bucket: Whole weights.
        ranks: All ranks of an engine.
        experts: Number of experts of each layer; see `experts_of`. Expert-parallel ranks need it.
    """
    if len(ranks) == 1:
        return (BucketPart(bucket=bucket, cuts=(None,) * len(bucket.specs), start=0),)
    layers = [layer_of(spec.name) for spec in bucket.specs]
    named = [*zip(bucket.specs, layers, strict=True)]
    cuts = [
        tuple(rank.sent_cut(spec.name, layer, spec.shape, experts=experts) for spec, layer in named) for rank in ranks
    ]
    buckets = [
        bucket_of(
            [
                spec if cut is None else replace(spec, shape=cut.shape(spec.shape))
                for spec, cut in zip(bucket.specs, of_rank, strict=True)
            ]
        )
        for of_rank in cuts
    ]
    starts = accumulate((one.size_bytes for one in buckets[:-1]), initial=0)
    parts = zip(buckets, cuts, starts, strict=True)
    return tuple(BucketPart(bucket=one, cuts=of_rank, start=start) for one, of_rank, start in parts)


def plan_parts(
    specs: Sequence[WeightSpec], ranks: Sequence[EngineRank], *, bucket_bytes: int
) -> list[tuple[Bucket, Sequence[BucketPart]]]:
    """Returns all buckets of a sync, each with the parts of an engine's ranks.

    Args:
        specs: All weights, in the order of sending.
        ranks: The ranks of each engine.
        bucket_bytes: Largest size of a bucket of whole weights, in bytes. A larger weight gets its own bucket.
    """
    experts = experts_of(specs)
    return [
        (bucket, parts_of(bucket, ranks, experts=experts)) for bucket in plan_buckets(specs, bucket_bytes=bucket_bytes)
    ]


def plan_in_words(buckets: Sequence[tuple[Bucket, Sequence[BucketPart]]]) -> str:
    """Describes a plan in one line: the weights, and how much of them each rank of an engine gets.

    Args:
        buckets: All buckets of a sync, each with its parts.
    """
    weights = sum(len(bucket.specs) for bucket, _ in buckets)
    whole = sum(sum(bucket.sizes) for bucket, _ in buckets)
    told = f"{counted(weights, 'weight')}, {whole / 2**20:.1f} MiB, in {counted(len(buckets), 'bucket')}"
    by_rank = [[parts[rank] for _, parts in buckets] for rank in range(len(buckets[0][1]) if buckets else 0)]
    if len(by_rank) < 2:
        return told
    kinds = Counter(_kind(cut) for part in by_rank[0] for cut in part.cuts)
    sizes = ", ".join(f"{sum(sum(part.bucket.sizes) for part in of_rank) / 2**20:.1f}" for of_rank in by_rank)
    return (
        f"{told}; the ranks of an engine get {sizes} MiB: {kinds['rows']} weights cut by rows, "
        f"{kinds['columns']} by columns, {kinds['whole']} whole"
        + (f", and not the {kinds['elsewhere']} of experts that other ranks hold" if kinds["elsewhere"] else "")
    )


def _kind(cut: Cut | None) -> str:
    if cut is None:
        return "whole"
    if not cut.length:
        return "elsewhere"
    return "columns" if cut.axis else "rows"


def layer_of(name: str) -> str:
    """Returns the name of vLLM's layer, or of its expert tensor, that holds a weight, e.g. ``"qkv_proj"``.

    Args:
        name: HF name of the weight.
    """
    if match := EXPERT.fullmatch(name):
        return next((tensor for tensor, namings in EXPERTS.items() if any(match["part"] in one for one in namings)), "")
    module = name.rpartition(".")[0].rpartition(".")[2]
    return JOINED_OF.get(module, module)
