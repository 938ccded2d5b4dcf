"""Hazards of a model on a layout: sizes that do not divide, and weights that are trained apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rl_safe_workers.errors import LayoutError
from rl_safe_workers.findings import Severity
from rl_safe_workers.plan.hazard import Hazard, Where
from rl_safe_workers.plan.plan import Plan
from rl_safe_workers.plan.request import Request, in_words_of
from rl_safe_workers.topology.layout import ModelShape, ParallelLayout, check_model, check_trainable

_ONE = {"tensor": 1, "pipeline": 1, "expert": 1, "expert_tensor": 1, "context": 1}


_OURS = "rl-safe"


def _complaint(layout: ParallelLayout, shape: ModelShape, *axes: str) -> str | None:
    """Returns the complaint of `check_model` about some axes alone; None if there is none."""
    alone = replace(layout, **{**_ONE, **{axis: layout.size(axis) for axis in axes}})
    # Megatron pads a vocabulary that does not divide.
    padded = replace(shape, vocab_size=alone.tensor * shape.vocab_size)
    try:
        check_model(alone, padded)
    except LayoutError as error:
        return str(error)
    return None


def _found(plan: Plan, shape: ModelShape, axis: str, *, whose: str = "") -> Iterator[Where]:
    complaint = _complaint(plan.request.layout, shape, axis)
    if complaint is not None:
        what = in_words_of(plan.request.source, complaint.partition(": ")[0])
        yield Where(ranks=plan.trainer_ranks, detail=what + whose)


def _heads(plan: Plan) -> Iterator[Where]:
    if plan.model is None:
        return
    shape, tensor, whose = plan.model.shape, plan.request.layout.tensor, ""
    if tensor % shape.num_key_value_heads == 0:
        # Then Megatron gives each rank one key-value head (transformer/attention.py, num_query_groups < world_size).
        repeated = replace(shape, num_key_value_heads=tensor)
        whose = "" if _complaint(plan.request.layout, repeated, "tensor") else ", a rule of rl_safe_workers' conversion"
        shape = shape if plan.request.host == _OURS else repeated
    yield from _found(plan, shape, "tensor", whose=whose)


def _experts(plan: Plan) -> Iterator[Where]:
    if plan.model is not None:
        yield from _found(plan, plan.model.shape, "expert")


def _layers(plan: Plan) -> Iterator[Where]:
    # A pipeline_layout itself says where each layer is.
    if plan.model is not None and plan.request.pipeline_layout is None:
        complaint = _uneven(plan.request, plan.model.shape.num_layers)
        if complaint:
            yield Where(ranks=plan.trainer_ranks, detail=complaint)


def _uneven(request: Request, layers: int) -> str:
    """Returns the reason why Megatron's ``get_num_layers_to_build`` refuses the layers; empty if it accepts them."""
    fixed = [count for count in (request.first_stage_layers, request.last_stage_layers) if count is not None]
    stages = request.layout.pipeline - len(fixed)
    others = {"embedding": request.embedding_as_layer, "loss": request.loss_as_layer}
    counted = layers - sum(fixed) + sum(others.values())
    named = " and ".join(name for name, is_layer in others.items() if is_layer)
    included = f" ({named} counted)" if named else ""
    if stages and not counted:
        return f"no layers are left for {stages} stages between"
    if stages and counted % stages:
        between = f"{stages} stages between" if fixed else f"{request.setting('pp')}={stages}"
        return f"{counted} layers{included} do not divide by {between}"
    for size in [*fixed, *([counted // stages] if stages else [])]:
        if request.vpp is not None and size % request.vpp:
            return f"{size} layers of a stage{included} do not divide by {request.setting('vpp')}={request.vpp}"
    return ""


def _apart(plan: Plan) -> Iterator[Where]:
    if plan.model is None:
        return
    try:
        check_trainable(plan.request.layout, plan.model.shape)
    except LayoutError:
        yield Where(groups=("DATA_PARALLEL_GROUP_WITH_CP",), ranks=plan.trainer_ranks)


HAZARDS = (
    Hazard(
        code="heads-indivisible",
        severity=Severity.STOPS,
        text="attention cannot be cut over the tensor-parallel ranks",
        since="every version of megatron-core",
        evidence=("megatron-core transformer/attention.py",),
        find=_heads,
        avoid="a {tp} that divides the attention heads, and divides the key-value heads or is a multiple of them; the "
        "built-in trainer needs one that divides both",
    ),
    Hazard(
        code="experts-indivisible",
        severity=Severity.STOPS,
        text="experts cannot be cut over the expert-parallel ranks",
        since="every version of megatron-core",
        evidence=("megatron-core transformer/moe/moe_layer.py",),
        avoid="{ep} that divides the experts",
        find=_experts,
    ),
    Hazard(
        code="layers-indivisible",
        severity=Severity.STOPS,
        text="layers cannot be cut evenly into pipeline stages and their virtual stages",
        since="every version of megatron-core",
        evidence=(
            "megatron-core 0.16.1 transformer_block.py:130",
            "megatron-core 0.16.1 transformer_block.py:155",
            "megatron-core 0.16.1 transformer_block.py:174",
        ),
        avoid="{pp} that divides the layers, with {vpp} that divides those of a stage; or {first_stage_layers} and "
        "{last_stage_layers}, or {embedding_as_layer} and {loss_as_layer}",
        find=_layers,
    ),
    Hazard(
        code="experts-apart",
        severity=Severity.STOPS,
        text="Megatron trains the copies of an expert apart: without expert parallelism their gradients are reduced "
        "over groups that do not hold all copies",
        since="every version of megatron-core",
        evidence=("megatron-core tensor_parallel/layers.py:829",),
        avoid="{etp} equal to {tp}, or {ep} of more than 1",
        find=_apart,
    ),
)
"""The hazards of a model on a layout."""
