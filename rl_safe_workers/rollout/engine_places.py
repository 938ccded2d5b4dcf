"""The place of each HF weight in a vLLM model, by vLLM's naming rules.

The rules are data, and are not learned from the model's loaders: a loader that puts a weight in a wrong place must not
say where the right one is. They hold for an engine on one device, without tensor parallelism.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

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
"""Tensors with one matrix for each expert, and the HF layers whose rows that holds, in this order, by two namings."""
_EXPERTS_LAYERS = ("{}.routed_experts.{}", "{}.{}")
"""Names of these tensors, from the layer's: in vLLM 0.32, and in vLLM 0.25."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PADDED = (_HEAD, _EMBEDDING)
"""Parameters with more rows than the vocabulary. vLLM never reads those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of one HF weight.

    Example: ``Place(spec=of_k_proj, parameter="model.layers.0.self_attn.qkv_proj.weight", start=128)``
    """

    spec: WeightSpec
    parameter: str
    """Name of the model's parameter that holds it."""
    expert: int | None = None
    """Index of the expert's matrix in the parameter; None if the parameter has no such dimension."""
    start: int = 0
    """First row of the weight in the parameter, or in the expert's matrix."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns the weight as the model holds it; None if the parameter has another layout than the rule says.

        A weight that the model holds in a wider dtype is returned in the dtype of the HF weight.
        """
        shape, dtype = self.spec.shape, DTYPES[self.spec.dtype]
        if self.expert is not None:
            if parameter.dim() != len(shape) + 1 or self.expert >= len(parameter):
                return None
            parameter = parameter[self.expert]
        if parameter.dim() != len(shape) or tuple(parameter.shape[1:]) != shape[1:]:
            return None
        if shape:
            if len(parameter) < self.start + shape[0]:
                return None
            parameter = parameter[self.start : self.start + shape[0]]
        return parameter.to(dtype) if parameter.itemsize > dtype.itemsize else parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlaces:
    """The places of all weights of a sync."""

    places: tuple[Place, ...]
    """In the order of the weights. A weight may have several, e.g. an embedding that is the output layer, too."""
    unplaced: tuple[str, ...]
    """HF names of the weights for which no rule finds a parameter, such as those of an MTP layer."""
    faults: tuple[str, ...]
    """Parameters for which no weight is sent, each with the reason why one should be."""

    @classmethod
    def of(cls, specs: Iterable[WeightSpec], parameters: Collection[str]) -> EnginePlaces:
        """Finds the places.

        Args:
            specs: All weights of a sync.
            parameters: Names of the model's parameters. A tied one has one name.
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
            start = sum(by_name[name].shape[0] for name in before)
            places.append(Place(spec=spec, parameter=parameter, expert=expert, start=start))
        if _HEAD in parameters and _HEAD not in by_name and _EMBEDDING in by_name:
            places.append(Place(spec=by_name[_EMBEDDING], parameter=_HEAD))
        layers = {_layer(name) for name in unplaced}
        held = {place.parameter for place in places}
        faults |= dict.fromkeys(
            f"{name}: nothing is sent for it" for name in parameters if name not in held and _layer(name) not in layers
        )
        return cls(places=tuple(places), unplaced=tuple(unplaced), faults=tuple(faults))

    def gaps(self, sizes: Mapping[str, int]) -> list[str]:
        """Returns a sentence for each parameter that has elements for which nothing is sent.

        Args:
            sizes: Number of elements of the parameters that have the layout of the rules, by name.
        """
        sent: Counter[str] = Counter()
        for place in self.places:
            sent[place.parameter] += torch.Size(place.spec.shape).numel()
        return [
            f"{name}: {sent[name]} of its {size} elements are sent"
            for name, size in sizes.items()
            if sent[name] != size and name not in _PADDED
        ]


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
