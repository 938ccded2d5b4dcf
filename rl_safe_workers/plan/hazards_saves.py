"""Hazards of saves."""

from __future__ import annotations

from collections.abc import Iterator

from rl_safe_workers.findings import Severity
from rl_safe_workers.plan.families import RULES
from rl_safe_workers.plan.hazard import Hazard, Where
from rl_safe_workers.plan.plan import Plan
from rl_safe_workers.plan.saves import GIB, OURS, RAISES_SINCE, SaveWay

_MANY_TENSORS = 5000
_UNEVEN = 3.0


def _chosen(plan: Plan) -> SaveWay | None:
    request = plan.request
    if request.host == "rl-safe":
        return next((way for way in plan.saves if way.sharding == OURS), None)
    wanted = (request.optimizer_sharding, request.fully_parallel_save)
    return next((way for way in plan.saves if (way.sharding, way.fully_parallel) == wanted), None)


def _collective(plan: Plan) -> Iterator[Where]:
    request = plan.request
    flags = [name for name in ("fully_parallel_save", "validate_access_integrity") if getattr(request, name)]
    if flags and request.trainers > 1 and (plan.moe or plan.model is None):
        tensors = _tensors(plan)
        many = f", {tensors} tensors of experts in each rank's part" if tensors > _MANY_TENSORS else ""
        yield Where(
            groups=("WORLD", "DATA_PARALLEL_GROUP_WITH_CP"),
            ranks=plan.trainer_ranks,
            detail=f"{' and '.join(flags)}{many}",
        )


def _tensors(plan: Plan) -> int:
    """Returns the number of expert tensors, including the optimizer's, that a rank's metadata names."""
    if plan.model is None:
        return 0
    request = plan.request
    experts = plan.model.shape.num_experts // request.layout.expert
    return experts * max(plan.layers, default=0) * 2 * 4


def _raises(plan: Plan) -> Iterator[Where]:
    request = plan.request
    refuses = RULES.index(request.megatron) >= RULES.index(RAISES_SINCE)
    if request.optimizer_sharding == "fully_sharded_model_space" and refuses:
        yield Where(ranks=plan.trainer_ranks)


def _unfinalised(plan: Plan) -> Iterator[Where]:
    if plan.request.async_save and not plan.request.finalizes:
        yield Where(ranks=plan.trainer_ranks)


def _async_flags(plan: Plan) -> Iterator[Where]:
    request = plan.request
    flags = [name for name in ("fully_parallel_save", "validate_access_integrity") if getattr(request, name)]
    if request.async_save and flags and request.host == "rl-safe":
        yield Where(detail=" and ".join(flags))


def _one_writer(plan: Plan) -> Iterator[Where]:
    request = plan.request
    way = _chosen(plan)
    if way is not None and way.total and way.most * request.trainers > _UNEVEN * way.total:
        heaviest = way.bytes_by_rank.index(way.most)
        mean = way.total / request.trainers
        yield Where(
            ranks=str(heaviest),
            detail=f"rank {heaviest} writes {way.most / GIB:.1f} GiB where {mean / GIB:.1f} would be even, and "
            f"{request.trainers - way.writers} of {request.trainers} ranks write nothing",
        )
        return
    replicas = request.layout.data * request.layout.context
    spreads = request.fully_parallel_save and request.optimizer_sharding != "dp_zero_gather_scatter"
    ours = request.host == "rl-safe" or request.optimizer_sharding == "dp_reshardable"
    if way is None and replicas > 1 and not spreads and not ours:
        yield Where(ranks=f"1 of {replicas}", detail=f"replica 0 of {replicas} writes for all")


def _gathered(plan: Plan) -> Iterator[Where]:
    request = plan.request
    copies = request.layout.data * request.layout.context
    if request.optimizer_sharding == "fully_reshardable" and request.host != "rl-safe" and copies > 1:
        yield Where(groups=("DATA_PARALLEL_GROUP_WITH_CP", "EXPERT_DATA_PARALLEL_GROUP"), ranks=plan.trainer_ranks)


def _no_twins(plan: Plan) -> Iterator[Where]:
    request = plan.request
    if request.gloo:
        return
    twins = ("DATA_PARALLEL_GROUP_WITH_CP_GLOO", "EXPERT_DATA_PARALLEL_GROUP_GLOO")
    if request.optimizer_sharding == "dp_zero_gather_scatter":
        detail = "a checkpoint of dp_zero_gather_scatter is scattered over them, and cannot be loaded"
        yield Where(groups=twins, ranks=plan.trainer_ranks, detail=detail)
    elif request.host != "rl-safe":
        detail = "get_megatron_optimizer needs use_gloo_process_groups=False"
        yield Where(groups=twins, ranks=plan.trainer_ranks, detail=detail, severity=Severity.RISKS)


HAZARDS = (
    Hazard(
        code="save-collective",
        severity=Severity.RISKS,
        text="saves and conversions stall or run out of memory in gathers of all ranks' metadata, which one late rank "
        "holds up",
        since="every version of megatron-core",
        evidence=("verl 2238", "verl 5183", "NeMo RL 2225", "NeMo RL 1208", "Megatron-Bridge 3207"),
        avoid="rl_safe.checkpoint.fully_parallel_save=false rl_safe.checkpoint.validate_access_integrity=false",
        find=_collective,
    ),
    Hazard(
        code="sharding-raises",
        severity=Severity.STOPS,
        text="the first save of the optimizer raises: flattened_range is not supported",
        since=f"megatron-core {RAISES_SINCE}, of which it is the default",
        evidence=("megatron-core 0.16.1 mapping.py:134", "megatron-core 0.16.1 distrib_optimizer.py:1225"),
        avoid="metadata of distrib_optim_sharding_type: fully_reshardable or dp_reshardable, in "
        "optimizer.sharded_state_dict",
        find=_raises,
    ),
    Hazard(
        code="async-unfinalised",
        severity=Severity.STOPS,
        text="an asynchronous save never gets its metadata: nobody finalises it, and no checkpoint can be loaded",
        since="verl 0.8",
        evidence=("verl 7363", "verl 8000"),
        avoid="async_save off, or rl_safe.checkpoint.async_save=true with the saves of rl_safe_workers",
        find=_unfinalised,
    ),
    Hazard(
        code="async-collective",
        severity=Severity.STOPS,
        text="a collective save cannot go on beside training, and the run is refused",
        since="rl_safe_workers 0.1",
        evidence=("rl_safe_workers config.py",),
        avoid="rl_safe.checkpoint.async_save=false, or both flags off",
        find=_async_flags,
    ),
    Hazard(
        code="save-one-writer",
        severity=Severity.COSTS,
        text="replicas leave the writing to one of them, and saves take many times as long",
        since="every version of megatron-core",
        evidence=("verl 2860", "verl 2238"),
        avoid="saves of rl_safe_workers, or dp_reshardable",
        find=_one_writer,
    ),
    Hazard(
        code="save-gathers-optimizer",
        severity=Severity.RISKS,
        text="every rank gathers the whole optimizer state of its replicas to host memory before it writes",
        since="megatron-core 0.16",
        evidence=("megatron-core 0.16.1 distrib_optimizer.py:1030",),
        avoid="dp_reshardable, or saves of rl_safe_workers, which write each rank's part in place",
        find=_gathered,
    ),
    Hazard(
        code="gloo-missing",
        severity=Severity.STOPS,
        text="the optimizer asks for gloo twins that were not made",
        since="megatron-core 0.16",
        evidence=("megatron-core 0.16.1 distrib_optimizer.py:1867", "megatron-core 0.16.1 optimizer/__init__.py:509"),
        avoid="create_gloo_process_groups=True, or another distrib_optim_sharding_type",
        find=_no_twins,
    ),
)
"""The hazards of saves."""
