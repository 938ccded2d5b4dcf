"""Finds the place of each HF weight in a vLLM model, by vLLM's naming rules.

The rules are data here. They are not learned from the model's loaders, because the check must find a loader that puts a
weight in the wrong place. A rank of a tensor-parallel engine holds a cut of each large weight, and the whole of others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from rl_safe_workers.rollout.digest import WORD_BYTES, Span
from rl_safe_workers.rollout.packing import DTYPES
from rl_safe_workers.rollout.protocol import WeightSpec

_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Layers that hold the rows of several HF layers, in this order."""
_JOINED_OF = {part: whole for whole, parts in _JOINED.items() for part in parts}
_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")
_EXPERTS = {
    "w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")),
    "w2_weight": (("down_proj",), ("w2",)),
}
"""Tensors with one matrix per expert. Each matrix holds the rows of these HF layers, in this order, in two namings."""
_EXPERTS_LAYERS = ("{}.routed_experts.{}", "{}.{}")
"""Names of these tensors, from the layer's and the tensor's name: in vLLM 0.32, and in vLLM 0.25."""
_ROWS_CUT = frozenset({"qkv_proj", "gate_up_proj", "w13_weight"})
_COLUMNS_CUT = frozenset({"o_proj", "down_proj", "w2_weight"})
"""Layers and expert tensors that a tensor-parallel engine cuts: ``_ROWS_CUT`` by rows, ``_COLUMNS_CUT`` by columns.
A layer that is cut by columns has a whole bias."""
_OF_KV_HEADS = ("k_proj", "v_proj")
_VOCABULARY, _VOCABULARY_UNIT = frozenset({"embed_tokens", "lm_head"}), 64
"""Layers with a row for each token. vLLM pads their rows to a multiple of this unit before it cuts them."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PADDED = (_HEAD, _EMBEDDING)
"""Parameters that may have more rows than the vocabulary. vLLM never reads the additional rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRank:
    """A rank of a tensor-parallel engine.

    Example: ``EngineRank(rank=1, size=2, kv_heads=4)``
    """

    rank: int = 0
    size: int = 1
    kv_heads: int = 1
    """Number of the model's key-value heads. If there are more ranks than heads, several ranks hold the same head."""

    def cut(self, name: str, layer: str, shape: tuple[int, ...]) -> Cut | None:
        """Returns the cut of a weight that this rank holds; None if it holds the whole.

        Args:
            name: HF name of the weight.
            layer: Name of the layer, or of the expert tensor, that holds it.
            shape: Shape of the whole weight.
        """
        if self.size == 1 or not shape:
            return None
        if layer in _COLUMNS_CUT and len(shape) > 1:
            each = shape[-1] // self.size
            return Cut(axis=len(shape) - 1, first=self.rank * each, length=each, of=shape[-1])
        rows = shape[0]
        if layer in _VOCABULARY:
            each = -(-rows // _VOCABULARY_UNIT) * _VOCABULARY_UNIT // self.size
            first = min(self.rank * each, rows)
            return Cut(axis=0, first=first, length=min(each, rows - first), of=rows)
        if layer in _ROWS_CUT:
            parts = min(self.size, self.kv_heads) if name.split(".")[-2] in _OF_KV_HEADS else self.size
            return Cut(axis=0, first=self.rank * parts // self.size * (rows // parts), length=rows // parts, of=rows)
        return None


ONLY_RANK = EngineRank()
"""The rank of an engine without tensor parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A range of a weight's rows or columns.

    Example: ``Cut(axis=0, first=64, length=64, of=128)``
    """

    axis: int
    first: int
    length: int
    of: int
    """Number of rows or columns of the whole weight."""

    def span(self, shape: tuple[int, ...], itemsize: int) -> Span | None:
        """Returns the words of the whole weight that the cut covers; None if it starts or ends inside a word.

        Args:
            shape: Shape of the whole weight.
            itemsize: Bytes of an element.
        """
        inner = torch.Size(shape[self.axis + 1 :]).numel() * itemsize
        sizes = [self.first * inner, self.length * inner, self.of * inner]
        if any(size % WORD_BYTES for size in sizes):
            return None
        start, width, stride = (size // WORD_BYTES for size in sizes)
        return Span(start=start, width=width, stride=stride) if self.axis else Span(start=start)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one HF weight, or of a rank's cut of it, in the model.

    Example: ``Place(spec=of_k_proj, parameter="model.layers.0.self_attn.qkv_proj.weight", start=128)``
    """

    spec: WeightSpec
    parameter: str
    """Name of the model's parameter that holds it."""
    expert: int | None = None
    """Index of the expert's matrix in the parameter; None if the parameter has no such dimension."""
    start: int = 0
    """First row of the weight in the parameter, or in the expert's matrix."""
    cut: Cut | None = None
    """None: the parameter holds the whole weight."""

    @cached_property
    def span(self) -> Span | None:
        """The words of the whole weight that are in this place; None if the cut starts or ends inside a word."""
        return Span() if self.cut is None else self.cut.span(self.spec.shape, self._dtype.itemsize)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, or of its cut, in this place."""
        cut, shape = self.cut, self.spec.shape
        return shape if cut is None else (*shape[: cut.axis], cut.length, *shape[cut.axis + 1 :])

    @cached_property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.spec.dtype]

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns the weight, or the cut of it, as the model holds it; None if the rule does not fit the parameter.

        A weight that the model holds in a wider dtype is returned in the dtype of the HF weight.
        """
        # The calls are torch's fastest ones, because a model has thousands of weights.
        shape, dtype = self.shape, self._dtype
        if self.expert is not None:
            if parameter.dim() != len(shape) + 1 or self.expert >= parameter.size(0):
                return None
            parameter = parameter.select(0, self.expert)
        held = parameter.shape
        if len(held) != len(shape) or held[1:] != shape[1:] or (shape and held[0] < self.start + shape[0]):
            return None
        if held != shape:
            parameter = parameter.narrow(0, self.start, shape[0])
        return parameter.to(dtype) if parameter.itemsize > dtype.itemsize else parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlaces:
    """The places of all weights of a sync."""

    places: tuple[Place, ...]
    """In the order of the weights. A weight may have several, e.g. an embedding that is the output layer, too."""
    unplaced: tuple[str, ...]
    """HF names of the weights for which no rule finds a parameter, such as those of an MTP layer."""
    faults: tuple[str, ...]
    """A sentence for each parameter that should get a weight, but for which none is sent."""

    @classmethod
    def of(cls, specs: Iterable[WeightSpec], parameters: Collection[str], rank: EngineRank = ONLY_RANK) -> EnginePlaces:
        """Finds the places.

        Args:
            specs: All weights of a sync.
            parameters: Names of the model's parameters. A tied parameter has one name.
            rank: The rank of the engine that has them.
        """
        by_name = {spec.name: spec for spec in specs}
        places: list[Place] = []
        unplaced: list[str] = []
        faults: dict[str, None] = {}
        for spec in by_name.values():
            parameter, expert, before = _rule(spec.name, parameters)
            missing = [name for name in before if name not in by_name]
            faults |= dict.fromkeys(f"{name}: not sent, and {parameter} holds it" for name in missing)
            if parameter is None or missing:
                unplaced.append(spec.name)
                continue
            places.append(
                Place(
                    spec=spec,
                    parameter=parameter,
                    expert=expert,
                    start=sum(_rows(rank, parameter, by_name[name]) for name in before),
                    cut=rank.cut(spec.name, _held_by(parameter), spec.shape),
                )
            )
        if _HEAD in parameters and _HEAD not in by_name and (embedding := by_name.get(_EMBEDDING)) is not None:
            cut = rank.cut(_EMBEDDING, _held_by(_HEAD), embedding.shape)
            places.append(Place(spec=embedding, parameter=_HEAD, cut=cut))
        layers = {_layer(name) for name in unplaced}
        held = {place.parameter for place in places}
        faults |= dict.fromkeys(
            f"{name}: nothing is sent for it" for name in parameters if name not in held and _layer(name) not in layers
        )
        return cls(places=tuple(places), unplaced=tuple(unplaced), faults=tuple(faults))

    def gaps(self, sizes: Mapping[str, int]) -> list[str]:
        """Returns a sentence for each parameter that gets no data for some of its elements.

        Args:
            sizes: Number of elements of each parameter whose layout follows the rules, by name.
        """
        sent: Counter[str] = Counter()
        for place in self.places:
            sent[place.parameter] += torch.Size(place.shape).numel()
        return [
            f"{name}: {sent[name]} of its {size} elements are sent"
            for name, size in sizes.items()
            if sent[name] != size and name not in _PADDED
        ]


def _rows(rank: EngineRank, parameter: str, spec: WeightSpec) -> int:
    cut = rank.cut(spec.name, _held_by(parameter), spec.shape)
    return spec.shape[0] if cut is None or cut.axis else cut.length


def _held_by(parameter: str) -> str:
    """Returns the name of the layer, or of the expert tensor, that a parameter is or belongs to."""
    module, _, leaf = parameter.rpartition(".")
    return leaf if leaf in _EXPERTS else module.rpartition(".")[2]


def _layer(name: str) -> str:
    return ".".join(name.split(".")[:3]) if ".layers." in name else ""


def _rule(name: str, parameters: Collection[str]) -> tuple[str | None, int | None, list[str]]:
    """Returns the parameter that holds a weight, the expert's index, and the weights whose rows come first."""
    if match := _EXPERT.fullmatch(name):
        layer, expert, part = match["layer"], int(match["expert"]), match["part"]
        for tensor, namings in _EXPERTS.items():
            for parts in namings:
                if part in parts:
                    names = (form.format(layer, tensor) for form in _EXPERTS_LAYERS)
                    before = [f"{layer}.{expert}.{other}.weight" for other in parts[: parts.index(part)]]
                    return next((one for one in names if one in parameters), None), expert, before
    module, _, leaf = name.rpartition(".")
    layer, _, part = module.rpartition(".")
    whole = _JOINED_OF.get(part)
    if whole is not None and f"{layer}.{whole}.{leaf}" in parameters:
        parts = _JOINED[whole]
        return f"{layer}.{whole}.{leaf}", None, [f"{layer}.{one}.{leaf}" for one in parts[: parts.index(part)]]
    return name if name in parameters else None, None, []
