"""Hazards of communicators: when they are connected, how much memory that takes, and which memory they keep."""

from __future__ import annotations

from collections.abc import Iterator

from rl_safe_workers.findings import Severity
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.plan.families import ENGINE
from rl_safe_workers.plan.hazard import Hazard, Where
from rl_safe_workers.plan.memory_plan import LAZY, WARMED
from rl_safe_workers.plan.plan import Communicator, Plan
from rl_safe_workers.topology.groups import EXPERT_DATA_PARALLEL, OpClass
from rl_safe_workers.topology.memory import MIB, Links, group_bytes

_OPTIMIZER = (
    EXPERT_DATA_PARALLEL,
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
)
_EXPERT_DATA = "EXPERT_DATA"
_SHOWN = 8


def _is_gpu(plan: Plan) -> bool:
    return "nccl" in plan.request.backend


def _expert_data(plan: Plan) -> Iterator[Where]:
    if plan.request.bootstrap or not _is_gpu(plan):
        return
    # Only with expert parallelism: without it, experts are reduced like all other parameters. A group of one rank never
    # waits.
    used = [c for name in _OPTIMIZER if (c := plan.communicator(name)) is not None and c.classes]
    late = [c for c in used if c.family.size > 1]
    if late and plan.moe and any(_EXPERT_DATA in c.family.description for c in used):
        taken = {group.description: group.by_way[LAZY].likely for group in plan.memory.groups}
        size = sum(taken[c.family.description] for c in late)
        shared = any(_EXPERT_DATA in c.family.description for c in late)
        whose = "expert data parallelism and the optimizer" if shared else "the optimizer; each expert has one copy"
        yield Where(
            groups=tuple(c.family.description for c in late),
            ranks=plan.trainer_ranks,
            detail=f"{size / MIB:.0f} MiB, of {whose}",
        )


def _late(plan: Plan) -> Iterator[Where]:
    if plan.request.bootstrap or not _is_gpu(plan):
        return
    late = plan.memory.late()
    names = [g.description for g in plan.memory.groups if g.first_phase is Phase.TRAIN]
    if names:
        yield Where(
            groups=tuple(names),
            ranks=plan.trainer_ranks,
            detail=f"{late.low / MIB:.0f} to {late.high / MIB:.0f} MiB on each GPU",
        )


def _cumem(plan: Plan) -> Iterator[Where]:
    if not plan.request.cumem and plan.request.release_comms:
        yield Where(ranks=plan.trainer_ranks)


def _kept(plan: Plan) -> Iterator[Where]:
    if plan.request.colocated and not plan.request.release_comms and _is_gpu(plan):
        from_when = LAZY if not plan.request.bootstrap else "rl_safe_workers"
        total = plan.memory.total(from_when)
        yield Where(ranks=plan.trainer_ranks, detail=f"{total.low / MIB:.0f} to {total.high / MIB:.0f} MiB")


def _alone(plan: Plan) -> Iterator[Where]:
    if plan.request.bootstrap or not _is_gpu(plan):
        return
    alone = [c for c in plan.communicators if c.family.size == 1 and c.key and c.family.backend == "nccl"]
    fires = [c for c in alone if c.classes]
    if fires:
        taken = {group.description: group.by_way[WARMED].likely for group in plan.memory.groups}
        size = sum(taken[c.family.description] for c in fires)
        yield Where(groups=tuple(c.family.description for c in fires), detail=f"{size / MIB:.0f} MiB on each GPU")


def _gather(plan: Plan) -> Iterator[Where]:
    request = plan.request
    if request.backend != "nccl" or request.host == "rl-safe":
        return
    size = group_bytes((OpClass.ALL_TO_ALL,), size=request.trainers, max_ctas=None, links=Links(0, 0))
    if size >= 4 * 2**30:
        yield Where(groups=("WORLD",), ranks="0", detail=f"up to {size / 2**30:.1f} GiB")


def _flex(plan: Plan) -> Iterator[Where]:
    if plan.request.dispatcher == "flex" and plan.moe:
        yield Where(groups=(_BOTH_AXES,), detail="the plan does not count these buffers")


_BY_AXIS, _BOTH_AXES = "alltoall", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"
"""The dispatcher that sends tokens over the expert axis and gathers them over the tensor axis, and the group over which
the other dispatchers do both at once (transformer/moe/token_dispatcher.py)."""


def _crossing(plan: Plan, communicator: Communicator) -> Where:
    family, size, nodes = communicator.family, plan.request.gpus_per_node, plan.nodes
    ranks = [r for r in family.all_ranks() if nodes[r[0]] != nodes[r[-1]]] if communicator.crossing <= _SHOWN else []
    shown = "; ".join(",".join(map(str, group[:16])) for group in ranks)
    return Where(
        groups=(family.description,),
        ranks=shown or plan.trainer_ranks,
        detail=f"{communicator.crossing} of {family.count} groups of {family.size} lie on two or more nodes of {size}",
    )


def _straddled(plan: Plan, *names: str) -> Iterator[Where]:
    for name in names:
        communicator = plan.communicator(name)
        if communicator is not None and communicator.crossing and communicator.is_used:
            yield _crossing(plan, communicator)


def _tensor_straddles(plan: Plan) -> Iterator[Where]:
    yield from _straddled(plan, "TENSOR_MODEL_PARALLEL_GROUP")
    if plan.request.dispatcher == _BY_AXIS:
        yield from _straddled(plan, "EXPERT_TENSOR_PARALLEL_GROUP")
    elif plan.request.layout.expert == 1:
        yield from _straddled(plan, _BOTH_AXES)


def _expert_straddles(plan: Plan) -> Iterator[Where]:
    if plan.request.layout.expert > 1:
        yield from _straddled(
            plan, "EXPERT_MODEL_PARALLEL_GROUP" if plan.request.dispatcher == _BY_AXIS else _BOTH_AXES
        )


def _engine_straddles(plan: Plan) -> Iterator[Where]:
    engines = plan.communicator(ENGINE)
    if engines is not None and engines.crossing:
        size, count = engines.family.size, engines.family.count
        yield Where(
            groups=(ENGINE,),
            ranks=plan.rollout_ranks,
            detail=f"{engines.crossing} of {count} engines of {size} ranks lie on two or more nodes",
        )


_BOOTSTRAP = "rl_safe_workers.bootstrap before the model is built; in a run of ours it always happens"
HAZARDS = (
    Hazard(
        code="expert-dp-late",
        severity=Severity.RISKS,
        text="the first optimizer step hangs: communicators that nothing has used before are connected there, when "
        "memory is full, and no NCCL timeout covers that",
        since="every version of megatron-core",
        evidence=("ms-swift 9486", "pytorch 88103"),
        avoid=_BOOTSTRAP,
        find=_expert_data,
    ),
    Hazard(
        code="comms-late",
        severity=Severity.RISKS,
        text="the first training step runs out of memory: NCCL allocates when the activations are there",
        since="every version of NCCL",
        evidence=("ms-swift 9602", "ms-swift 6387", "AReaL 1548", "nccl 1685"),
        avoid=f"{_BOOTSTRAP}; rl_safe.bootstrap.budget=true makes them small",
        find=_late,
    ),
    Hazard(
        code="deepep-late",
        severity=Severity.RISKS,
        text="DeepEP makes its buffers at the first dispatch, outside NCCL: no bootstrap connects them, and no release "
        "gives them back",
        since="megatron-core with moe_token_dispatcher_type=flex",
        evidence=("megatron-core 0.16.1 fused_a2a.py:33",),
        avoid="{dispatcher}=alltoall, or memory that is left free for them",
        find=_flex,
    ),
    Hazard(
        code="cumem-off",
        severity=Severity.STOPS,
        text="NCCL_CUMEM_ENABLE=0: NCCL cannot suspend a communicator, and gives nothing back to the rollout",
        since="NCCL 2.29.7",
        evidence=("slime actor_group.py:67", "verl 6408"),
        avoid="NCCL_CUMEM_ENABLE=1 in trainers and rollouts",
        find=_cumem,
    ),
    Hazard(
        code="comms-kept",
        severity=Severity.COSTS,
        text="communicators keep their memory while vLLM generates on the same GPU",
        since="every version of NCCL",
        evidence=("verl 6266", "slime 153"),
        avoid="rollout.release_comms=auto; under verl actor_rollout_ref.rl_safe.release_comms=true",
        find=_kept,
    ),
    Hazard(
        code="comms-alone",
        severity=Severity.COSTS,
        text="Megatron issues collectives on groups of one rank, and NCCL gives each a communicator of full size",
        since="every version of NCCL",
        evidence=("nccl 2363",),
        avoid="rl_safe.bootstrap.budget=true, which leaves them one channel",
        find=_alone,
    ),
    Hazard(
        code="gather-on-nccl",
        severity=Severity.RISKS,
        text="the plan of a save is gathered over NCCL: rank 0 connects every other rank, and runs out of memory",
        since="every version of torch",
        evidence=("radixark/Megatron-LM 62", "Megatron-LM 1873"),
        avoid="a default group with gloo for CPU tensors (cpu:gloo,cuda:nccl), or saves of rl_safe_workers",
        find=_gather,
    ),
    Hazard(
        code="tp-straddles",
        severity=Severity.COSTS,
        text="tensor parallelism leaves the node: each layer's reductions go over the network",
        since="every version",
        evidence=("megatron-core 0.16.1 parallel_state.py:700",),
        avoid="sizes of {tp} and {etp} that divide {gpus_per_node}",
        find=_tensor_straddles,
    ),
    Hazard(
        code="ep-straddles",
        severity=Severity.COSTS,
        text="expert parallelism leaves the node: tokens go over the network, and NCCL's connections to far peers "
        "need memory of their own",
        since="every version",
        evidence=("NeMo RL 2937",),
        avoid="{ep} times {etp} that divides {gpus_per_node}",
        find=_expert_straddles,
    ),
    Hazard(
        code="engine-straddles",
        severity=Severity.COSTS,
        text="a vLLM engine leaves the node: what its ranks exchange for each token goes over the network",
        since="every version",
        evidence=("NeMo RL grpo.py:855, which gives rollouts whole nodes",),
        find=_engine_straddles,
        avoid="{vllm_tp} times {vllm_pp} and {vllm_dp} that divides {gpus_per_node}, and rollouts that begin a node",
    ),
)
"""The hazards of communicators."""
