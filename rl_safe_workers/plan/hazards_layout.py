"""Hazards of a model on a layout: what does not divide, or is trained apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rl_safe_workers.errors import LayoutError
from rl_safe_workers.findings import Severity
from rl_safe_workers.plan.hazard import Hazard, Where
from rl_safe_workers.plan.plan import Plan
from rl_safe_workers.plan.request import in_words_of
from rl_safe_workers.topology.layout import ModelShape, ParallelLayout, check_model, check_trainable

_ONE = {"tensor": 1, "pipeline": 1, "expert": 1, "expert_tensor": 1, "context": 1}


def _complaint(layout: ParallelLayout, shape: ModelShape, *axes: str) -> str | None:
    """Returns what the project's check of a model says, of some axes alone."""
    alone = replace(layout, **{**_ONE, **{axis: layout.size(axis) for axis in axes}})
    # Megatron pads a vocabulary that does not divide.
    padded = replace(shape, vocab_size=alone.tensor * shape.vocab_size)
    try:
        check_model(alone, padded)
    except LayoutError as error:
        return str(error)
    return None


def _found(plan: Plan, *axes: str) -> Iterator[Where]:
    if plan.model is None:
        return
    complaint = _complaint(plan.request.layout, plan.model.shape, *axes)
    if complaint is not None:
        yield Where(ranks=plan.trainer_ranks, detail=in_words_of(plan.request.source, complaint.partition(": ")[0]))


def _heads(plan: Plan) -> Iterator[Where]:
    yield from _found(plan, "tensor")


def _experts(plan: Plan) -> Iterator[Where]:
    yield from _found(plan, "expert")


def _layers(plan: Plan) -> Iterator[Where]:
    request = plan.request
    if request.first_stage_layers is None and request.last_stage_layers is None:
        yield from _found(plan, "pipeline")
        return
    layers = plan.layers
    middle = layers[request.first_stage_layers is not None : len(layers) - (request.last_stage_layers is not None)]
    if len(set(middle)) > 1:
        yield Where(ranks=plan.trainer_ranks, detail=f"{sum(middle)} layers on {len(middle)} stages between")


def _apart(plan: Plan) -> Iterator[Where]:
    if plan.model is None:
        return
    try:
        check_trainable(plan.request.layout, plan.model.shape)
    except LayoutError:
        yield Where(groups=("DATA_PARALLEL_GROUP_WITH_CP",), ranks=plan.trainer_ranks)


HAZARDS = (
    Hazard(
        code="heads-indivisible", severity=Severity.STOPS,
        text="attention cannot be cut over the tensor-parallel ranks", since="every version of megatron-core",
        evidence=("megatron-core transformer/attention.py",), avoid="{tp} that divides the heads", find=_heads,
    ),
    Hazard(
        code="experts-indivisible", severity=Severity.STOPS,
        text="experts cannot be cut over the expert-parallel ranks", since="every version of megatron-core",
        evidence=("megatron-core transformer/moe/moe_layer.py",), avoid="{ep} that divides the experts",
        find=_experts,
    ),
    Hazard(
        code="layers-indivisible", severity=Severity.STOPS,
        text="layers cannot be cut evenly into pipeline stages", since="every version of megatron-core",
        evidence=("megatron-core transformer/transformer_block.py",),
        avoid="{pp} that divides the layers, or {first_stage_layers} and {last_stage_layers}", find=_layers,
    ),
    Hazard(
        code="experts-apart", severity=Severity.STOPS,
        text="Megatron trains the copies of an expert apart: without expert parallelism their gradients are reduced "
        "over groups that do not hold all copies",
        since="every version of megatron-core", evidence=("megatron-core tensor_parallel/layers.py:829",),
        avoid="{etp} equal to {tp}, or {ep} of more than 1", find=_apart,
    ),
)  # fmt: skip
"""About the model on the layout."""
