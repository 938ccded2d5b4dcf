"""Hazards of worlds and ends: the members of default groups, how long ranks wait, and how groups are destroyed."""

from __future__ import annotations

from collections.abc import Iterator

from rl_safe_workers.findings import Severity
from rl_safe_workers.plan.families import JOINT
from rl_safe_workers.plan.hazard import Hazard, Where
from rl_safe_workers.plan.plan import Plan
from rl_safe_workers.topology.groups import WORLD

_EAGER_TORCH = 2.15
_NAMES_AGREE_TORCH = 2.14
_FEW_STAGES = 2
_ALL = "every version of megatron-core"


def _mixed(plan: Plan) -> Iterator[Where]:
    if plan.request.mixed:
        yield Where(
            groups=(WORLD,),
            ranks=plan.rollout_ranks,
            detail=f"{plan.request.rollouts} of its {plan.request.trainers + plan.request.rollouts} ranks generate",
        )


def _mixed_flags(plan: Plan) -> Iterator[Where]:
    request = plan.request
    flags = [name for name in ("fully_parallel_save", "validate_access_integrity") if getattr(request, name)]
    if request.mixed and flags:
        yield Where(groups=(WORLD,), ranks=plan.rollout_ranks, detail=" and ".join(flags))


def _device_id(plan: Plan) -> Iterator[Where]:
    if plan.request.device_id and plan.request.rollouts:
        ranks = plan.rollout_ranks if plan.request.mixed else plan.trainer_ranks
        yield Where(groups=(WORLD, JOINT), ranks=ranks)


def _timeout(plan: Plan) -> Iterator[Where]:
    request = plan.request
    default, groups = request.timeout_s, request.group_timeout_s
    if default is None or groups is None or default == groups:
        return
    names = tuple(c.family.description for c in plan.communicators if c.is_used and c.key and c.key != "world")
    yield Where(
        groups=names, ranks=plan.trainer_ranks, detail=f"the default group waits {default:g} s and they {groups:g} s"
    )


def _timeout_twins(plan: Plan) -> Iterator[Where]:
    twin = plan.communicator("EXPERT_DATA_PARALLEL_GROUP_GLOO")
    if twin is not None and plan.moe and plan.request.group_timeout_s not in (None, 1800.0):
        yield Where(groups=(twin.family.description,), ranks=plan.trainer_ranks)


def _timeout_unread(plan: Plan) -> Iterator[Where]:
    request = plan.request
    if request.unread_timeout_s is not None:
        name = request.setting("unread_timeout_s")
        yield Where(ranks=plan.trainer_ranks, detail=f"{name}={request.unread_timeout_s:g}")


def _short_timeout(plan: Plan) -> Iterator[Where]:
    request = plan.request
    collective = request.fully_parallel_save or request.validate_access_integrity
    if request.timeout_s is not None and request.timeout_s <= 600 and collective and request.nodes > 1:
        yield Where(groups=(WORLD,), ranks=plan.trainer_ranks, detail=f"it waits {request.timeout_s:g} s")


def _no_timeout(plan: Plan) -> Iterator[Where]:
    if plan.request.timeout_s is not None and plan.request.timeout_s > 24 * 3600:
        yield Where(groups=(WORLD,), ranks=plan.trainer_ranks, detail=f"{plan.request.timeout_s:g} s")


def _eager(plan: Plan) -> Iterator[Where]:
    request = plan.request
    if request.torch >= _EAGER_TORCH and "nccl" in request.backend and not request.bootstrap:
        made = [c for c in plan.communicators if c.family.backend == "nccl" and c.key]
        yield Where(
            groups=tuple(c.family.description for c in made),
            ranks=plan.trainer_ranks,
            detail=f"all {len(made)} of each rank, used or not",
        )


def _destroy_order(plan: Plan) -> Iterator[Where]:
    request = plan.request
    one_by_one = request.teardown == "one by one" or (request.release_comms and request.teardown != "ordered")
    if request.layout.pipeline > _FEW_STAGES and one_by_one and request.torch < _NAMES_AGREE_TORCH:
        yield Where(
            groups=("PIPELINE_MODEL_PARALLEL_GROUP", "EMBEDDING_GROUP", "POSITION_EMBEDDING_GROUP"),
            ranks=plan.trainer_ranks,
            detail=f"{request.layout.pipeline} stages hold different groups",
        )


def _exit(plan: Plan) -> Iterator[Where]:
    if plan.request.teardown == "one by one" and plan.moe and plan.request.trainers > 1:
        used = [c for c in plan.communicators if c.classes and "EXPERT" in c.family.description]
        yield Where(groups=tuple(c.family.description for c in used), ranks=plan.trainer_ranks)


HAZARDS = (
    Hazard(
        code="world-mixed",
        severity=Severity.STOPS,
        text="conversions and saves hang in barriers, gathers and broadcasts on the default group, which rollout ranks "
        "never enter, even with every flag of the save off",
        since=f"{_ALL}; since 0.14 the end of a save broadcasts, too",
        evidence=("NeMo RL 2225", "Megatron-LM 1707"),
        avoid="make the default group of trainers alone (isolated mode), or carve it before Megatron's groups "
        "(rl_safe_workers.worlds.training_world)",
        find=_mixed,
    ),
    Hazard(
        code="world-mixed-flags",
        severity=Severity.STOPS,
        text="each save gathers the metadata of every rank of the default group, rollout ranks included",
        since=_ALL,
        evidence=("NeMo RL 2225", "NeMo RL 2226", "Megatron-Bridge 3207"),
        avoid="rl_safe.checkpoint.fully_parallel_save=false rl_safe.checkpoint.validate_access_integrity=false",
        find=_mixed_flags,
    ),
    Hazard(
        code="world-device-id",
        severity=Severity.STOPS,
        text="every new group is a split of the default group's communicator, which needs all its ranks: a group that "
        "leaves some out, such as one for weight sync, waits forever",
        since="every torch that takes a device_id",
        evidence=("NeMo RL 3189", "NeMo RL 3073"),
        avoid="init_process_group without device_id; rl_safe_workers refuses it in carved mode",
        find=_device_id,
    ),
    Hazard(
        code="timeout-not-inherited",
        severity=Severity.RISKS,
        text="a hang in a sub-group is detected earlier or later than the timeout that you set: new groups do not "
        "inherit the default group's timeout",
        since="every version of torch",
        evidence=("Megatron-Bridge 4011", "miles 3131"),
        avoid="distributed_timeout_minutes of initialize_model_parallel; rl_safe.timeouts sets both for each phase",
        find=_timeout,
    ),
    Hazard(
        code="timeout-expert-twin",
        severity=Severity.RISKS,
        text="the gloo twin of expert data parallelism waits gloo's 30 minutes, whatever is set",
        since=_ALL,
        evidence=("megatron-core 0.16.1 parallel_state.py:1278",),
        avoid="rl_safe.timeouts.save, which bounds what goes over it",
        find=_timeout_twins,
    ),
    Hazard(
        code="timeout-unread",
        severity=Severity.RISKS,
        text="a timeout is set that nothing reads; collectives wait 30 minutes",
        since="verl 0.8",
        evidence=("verl 7815", "verl 7820"),
        avoid="rl_safe.timeouts, which the adapter puts on every group",
        find=_timeout_unread,
    ),
    Hazard(
        code="timeout-short",
        severity=Severity.RISKS,
        text="a conversion or a save fails if a rank arrives late: its collectives are on the default group",
        since="torch's default for NCCL",
        evidence=("NeMo RL 2225", "NeMo RL 2229", "NeMo RL 2391"),
        avoid="rl_safe.timeouts.convert and rl_safe.timeouts.save (1800), with both flags of the save off",
        find=_short_timeout,
    ),
    Hazard(
        code="timeout-none",
        severity=Severity.RISKS,
        text="the other ranks wait for a missing rank for months (timeout 18,000,000 s)",
        since="ms-swift as of August 2026",
        evidence=("ms-swift 6312",),
        avoid="rl_safe.timeouts, one for each phase",
        find=_no_timeout,
    ),
    Hazard(
        code="torch-eager-nccl",
        severity=Severity.RISKS,
        text="new_group connects its communicator at once, on the device that LOCAL_RANK names",
        since="torch 2.15",
        evidence=("torchrec 4666",),
        avoid="TORCH_DIST_USE_NCCL2=0, or rl_safe.bootstrap.budget=true, which limits what each takes",
        find=_eager,
    ),
    Hazard(
        code="destroy-order",
        severity=Severity.STOPS,
        text="groups that are destroyed one by one wait for each other in a circle",
        since="every torch before 2.14",
        evidence=("slime reloadable_process_group.py:83", "pytorch 190396"),
        avoid="rl_safe_workers.teardown, or rollout.release_comms, which drop all groups at once",
        find=_destroy_order,
    ),
    Hazard(
        code="exit-hang",
        severity=Severity.RISKS,
        text="processes hang at exit until a watchdog ends them after 480 s: expert communicators are torn down "
        "without agreement",
        since=_ALL,
        evidence=("ms-swift 7992", "ms-swift 8385", "ms-swift 9188"),
        avoid="rl_safe_workers.teardown, within rl_safe.timeouts.teardown",
        find=_exit,
    ),
)
"""The hazards of default groups, timeouts and ends."""
