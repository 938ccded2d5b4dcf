"""Finds the place of each HF weight in a vLLM model, by vLLM's naming rules.

The rules are data here. They are not learned from the model's loaders, because the check must find a loader that puts a
weight in the wrong place. A rank of a tensor-parallel engine holds a cut of each large weight, and the whole of the
others. With expert parallelism, it holds some experts whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from rl_safe_workers.rollout.cuts import EXPERT, EXPERTS, JOINED, JOINED_OF, ONLY_RANK, Cut, EngineRank, experts_of
from rl_safe_workers.rollout.digest import WORD_BYTES, Span
from rl_safe_workers.rollout.packing import DTYPES
from rl_safe_workers.rollout.protocol import WeightSpec

_EXPERTS_LAYERS = ("{}.routed_experts.{}", "{}.{}")
"""Name of an expert tensor, made from the layer's and the tensor's name: in vLLM 0.32, and in vLLM 0.25."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PADDED = (_HEAD, _EMBEDDING)
"""Parameters that may have more rows than the vocabulary. vLLM never reads the additional rows."""


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
    rows: int | None = None
    """Rows that the parameter, or the expert's matrix, must have for the rule to fit; None: at least those of the
    weight."""

    @cached_property
    def span(self) -> Span | None:
        """The words of the whole weight that are in this place; None if the cut starts or ends inside a word."""
        cut = self.cut
        if cut is None:
            return Span()
        inner = torch.Size(self.spec.shape[cut.axis + 1 :]).numel() * self._dtype.itemsize
        sizes = [cut.first * inner, cut.length * inner, cut.whole_length * inner]
        if any(size % WORD_BYTES for size in sizes):
            return None
        start, width, stride = (size // WORD_BYTES for size in sizes)
        return Span(start=start, width=width, stride=stride) if cut.axis else Span(start=start)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, or of its cut, in this place."""
        return self.spec.shape if self.cut is None else self.cut.shape(self.spec.shape)

    @cached_property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.spec.dtype]

    def view_in(self, parameter: torch.Tensor) -> torch.Tensor | None:
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
        if self.rows is not None and held[:1] != (self.rows,):
            return None
        if len(held) != len(shape) or held[1:] != shape[1:] or (shape and held[0] < self.start + shape[0]):
            return None
        if held != shape:
            parameter = parameter.narrow(0, self.start, shape[0])
        return parameter.to(dtype) if parameter.itemsize > dtype.itemsize else parameter


@dataclass(frozen=True, kw_only=True)
class EnginePlaces:
    """The places of all weights of a sync, without the experts that only other ranks of the engine hold."""

    places: tuple[Place, ...]
    """In the order of the weights. A weight may have several, e.g. an embedding that is the output layer, too."""
    unplaced: tuple[str, ...]
    """HF names of the weights for which no rule finds a parameter, such as those of an MTP layer."""
    faults: tuple[str, ...]
    """A sentence for each parameter that should get a weight, but for which none is sent."""

    @classmethod
    def of(cls, specs: Iterable[WeightSpec], parameters: Collection[str], rank: EngineRank = ONLY_RANK) -> EnginePlaces:
        """Finds the places of all weights in the parameters of a rank's model.

        Args:
            specs: All weights of a sync.
            parameters: Names of the model's parameters. A tied parameter has one name.
            rank: The rank of the engine that has this model.
        """
        by_name = {spec.name: spec for spec in specs}
        places: list[Place] = []
        unplaced: list[str] = []
        faults: dict[str, None] = {}
        for spec in by_name.values():
            parameter, expert, names = _placement(spec.name, parameters)
            before = names[: names.index(spec.name)]
            missing = [name for name in before if name not in by_name]
            faults |= dict.fromkeys(f"{name}: not sent, and {parameter} holds it" for name in missing)
            if parameter is None or missing or _is_cut_unknown(rank, spec.name, parameter):
                unplaced.append(spec.name)
                continue
            places.append(
                Place(
                    spec=spec,
                    parameter=parameter,
                    expert=expert,
                    start=sum(_rows(rank, parameter, by_name[name]) for name in before),
                    cut=rank.held_cut(spec.name, _layer_of_parameter(parameter), spec.shape),
                    rows=_all_rows(rank, parameter, [by_name.get(name) for name in names]),
                )
            )
        if _HEAD in parameters and _HEAD not in by_name and (embedding := by_name.get(_EMBEDDING)) is not None:
            cut = rank.held_cut(_EMBEDDING, _layer_of_parameter(_HEAD), embedding.shape)
            places.append(Place(spec=embedding, parameter=_HEAD, cut=cut))
        layers = {_decoder_layer(name) for name in unplaced}
        held = {place.parameter for place in places}
        faults |= dict.fromkeys(
            f"{name}: nothing is sent for it"
            for name in parameters
            if name not in held and _decoder_layer(name) not in layers
        )
        if rank.expert_parallel:
            places = [*_with_held_experts(places, rank)]
        return cls(places=tuple(places), unplaced=tuple(unplaced), faults=tuple(faults))

    @cached_property
    def _sent(self) -> Counter[str]:
        """Number of elements that are sent for each parameter. Cached: a model has thousands of places."""
        sent: Counter[str] = Counter()
        for place in self.places:
            sent[place.parameter] += torch.Size(place.shape).numel()
        return sent

    def gaps(self, sizes: Mapping[str, int]) -> list[str]:
        """Returns a sentence for each parameter that gets no data for some of its elements.

        Args:
            sizes: Number of elements of each parameter whose layout follows the rules, by name.
        """
        sent = self._sent
        return [
            f"{name}: {sent[name]} of its {size} elements are sent"
            for name, size in sizes.items()
            if sent[name] != size and name not in _PADDED
        ]


def _with_held_experts(places: Sequence[Place], rank: EngineRank) -> Iterator[Place]:
    """Yields the places, except those of experts that only other ranks hold. Sets each expert's index on this rank."""
    experts = experts_of(place.spec for place in places)
    for place in places:
        match = EXPERT.fullmatch(place.spec.name)
        if place.expert is None or match is None:
            yield place
        elif (expert := rank.local_expert(place.expert, experts=experts[match["layer"]])) is not None:
            yield replace(place, expert=expert)


def _is_cut_unknown(rank: EngineRank, name: str, parameter: str) -> bool:
    """Returns True if a joined layer is sent as one weight to several ranks. A rank's cut is then no range of rows."""
    return rank.size > 1 and name == parameter and _layer_of_parameter(parameter) in JOINED


def _all_rows(rank: EngineRank, parameter: str, specs: Sequence[WeightSpec | None]) -> int | None:
    """Returns the rows of a parameter, or of an expert's matrix, on one of several ranks; None if it may have more.

    A rank may have other rows than the rules say. vLLM pads experts for some kernels, gives layers different numbers of
    key-value heads, and cuts some layers differently for decode context parallelism. Such a parameter cannot be read.

    Args:
        rank: The rank.
        parameter: Name of the parameter.
        specs: The weights that the parameter holds; None for a weight that is not sent.
    """
    sent = [spec for spec in specs if spec is not None and spec.shape]
    if rank.size == 1 or parameter in _PADDED or len(sent) < len(specs):
        return None
    return sum(_rows(rank, parameter, spec) for spec in sent)


def _rows(rank: EngineRank, parameter: str, spec: WeightSpec) -> int:
    cut = rank.held_cut(spec.name, _layer_of_parameter(parameter), spec.shape)
    return spec.shape[0] if cut is None or cut.axis else cut.length


def _layer_of_parameter(parameter: str) -> str:
    """Returns the name of the layer, or of the expert tensor, that a parameter is or belongs to."""
    module, _, leaf = parameter.rpartition(".")
    return leaf if leaf in EXPERTS else module.rpartition(".")[2]


def _decoder_layer(name: str) -> str:
    return ".".join(name.split(".")[:3]) if ".layers." in name else ""


def _placement(name: str, parameters: Collection[str]) -> tuple[str | None, int | None, list[str]]:
    """Returns the parameter that holds a weight, the expert's index, and the names of all weights in it, in order."""
    if match := EXPERT.fullmatch(name):
        layer, expert, part = match["layer"], int(match["expert"]), match["part"]
        for tensor, namings in EXPERTS.items():
            for parts in namings:
                if part in parts:
                    names = (form.format(layer, tensor) for form in _EXPERTS_LAYERS)
                    held = [f"{layer}.{expert}.{one}.weight" for one in parts]
                    return next((one for one in names if one in parameters), None), expert, held
    module, _, leaf = name.rpartition(".")
    layer, _, part = module.rpartition(".")
    whole = JOINED_OF.get(part)
    if whole is not None and f"{layer}.{whole}.{leaf}" in parameters:
        parts = JOINED[whole]
        return f"{layer}.{whole}.{leaf}", None, [f"{layer}.{one}.{leaf}" for one in parts]
    return name if name in parameters else None, None, [name]
