"""Describes Megatron's process groups: their names, their sizes, the collectives they carry and their first phase.

Pure Python, because a plan needs it on machines without torch. The table is for ``parallel_state.py`` of megatron-core
0.16 to 0.20. The collectives of each group come from traces of real training steps (``comms.trace``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.layout import ParallelLayout

if TYPE_CHECKING:
    from rl_safe_workers.config import MegatronConfig


class OpClass(StrEnum):
    """The kinds of collective for which a communicator connects and allocates memory separately."""

    REDUCE = "reduce"
    """all_reduce, reduce, broadcast, barrier."""
    GATHER_SCATTER = "gather_scatter"
    """all_gather, reduce_scatter."""
    ALL_TO_ALL = "all_to_all"
    """Channels to every peer."""
    ROOT_EXCHANGE = "root_exchange"
    """gather and scatter, which NCCL implements with sends: channels between the first rank and every other."""
    BATCHED_P2P = "batched_p2p"
    """batch_isend_irecv: channels to the neighbours."""
    UNBATCHED_P2P = "unbatched_p2p"
    """Single send and recv: a separate communicator for each pair of ranks."""


class Traffic(StrEnum):
    """The kind of messages that a group carries."""

    CONTROL = "control"
    """Scalars. The speed of the group does not matter."""
    STAGES = "stages"
    """Activations between two pipeline stages, one message at a time."""
    BANDWIDTH = "bandwidth"
    """Activations, gradients or weights of many ranks."""


DISPATCHERS = ("alltoall", "allgather", "flex")
"""Values of Megatron's ``moe_token_dispatcher_type``. With ``flex``, DeepEP or HybridEP sends tokens through buffers of
its own (``MoEFlexTokenDispatcher`` in transformer/moe/token_dispatcher.py). NCCL's groups carry only the set-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """The features of a run that decide which collectives its groups carry.

    Example: ``Features(moe_dispatcher="alltoall", tied_embeddings=False)``
    """

    moe_dispatcher: str = "alltoall"
    """One of `DISPATCHERS`."""
    moe: bool | None = None
    """True if the model has experts. None if unknown; the model then counts as MoE if there is expert parallelism."""
    tied_embeddings: bool = True
    """True if the first and the last pipeline stage share the embedding, or if unknown."""
    batched_p2p: bool | None = None
    """Megatron's ``batch_p2p_comm``, which mbridge turns off. None if unknown; both op classes are then connected."""
    variable_seq_lengths: bool | None = None
    """Megatron's setting of the same name, which mbridge turns on. If True, stages exchange shapes, always in batches.
    None if unknown; it then counts as True."""
    virtual_pipeline: bool = False
    """True if there are virtual pipeline stages. The last stage then also sends to the first."""
    distributed_optimizer: bool = True
    """Megatron's ``use_distributed_optimizer``."""
    fp8: bool = False
    """True if fp8 scales are reduced."""
    expert_bias: bool = False
    """Megatron's ``moe_router_enable_expert_bias``."""
    aux_loss: bool = False
    """True if the router has a load-balancing loss."""
    optimizer_instances: int = 1
    """Megatron's ``num_distributed_optimizer_instances``."""
    context_exchange: frozenset[str] = frozenset({"p2p"})
    """The exchanges of context-parallel ranks, by the names of Megatron's ``cp_comm_type``; see `context_exchange`."""
    context_collectives: bool = True
    """True if the training code itself reduces or gathers over context-parallel ranks, e.g. losses, or if unknown.
    Megatron's steps do so only with ``cp_comm_type=all_gather``."""
    background_saves: bool = False
    """True if Megatron itself saves in the background (``async_save``): the ranks then gather and scatter the plan over
    the default group (dist_checkpointing/strategies/state_dict_saver.py:141, 152)."""
    p2p_over_world: bool = False
    """True if pipeline stages send batches over the default group, as in ms-swift. Shapes use the pipeline group."""
    weights_over_world: bool = False
    """True if weight syncs use the default group, as with colocated trainers."""

    @classmethod
    def of(cls, config: MegatronConfig, *, colocated: bool = False) -> Features:
        """Returns the features that a configuration sets."""
        return cls(
            moe_dispatcher=config.moe_token_dispatcher_type,
            optimizer_instances=config.num_distributed_optimizer_instances,
            fp8=reduces_scales(config.fp8, config.fp8_recipe),
            virtual_pipeline=config.virtual_pipeline_model_parallel_size is not None,
            weights_over_world=colocated,
        )


def reduces_scales(fp8: str | None, recipe: str | None) -> bool:
    """Returns True if ranks agree on the scales of 8-bit tensors in every step.

    Args:
        fp8: Megatron's setting; None or empty without 8-bit layers.
        recipe: Megatron's ``fp8_recipe``. Only delayed scaling reduces, and is the default, also for None.
    """
    return bool(fp8) and recipe in (None, "delayed")


def dispatcher_of(setting: str | None) -> str:
    """Returns a ``moe_token_dispatcher_type`` if it is one of `DISPATCHERS`, else ``alltoall``."""
    return setting if setting in DISPATCHERS else "alltoall"


def context_exchange(cp_comm_type: str | Sequence[str] | None, *, is_hybrid: bool = False) -> frozenset[str]:
    """Returns the exchanges of context-parallel ranks, by the names of Megatron's ``cp_comm_type``.

    Args:
        cp_comm_type: Megatron's setting: one value for all layers, or one for each layer; None means ``p2p``.
        is_hybrid: True if the model has Mamba layers, which always exchange all to all
            (ssm/mamba_context_parallel.py).

    >>> sorted(context_exchange(["p2p", "a2a"]))
    ['a2a', 'p2p']
    """
    each = [cp_comm_type] if isinstance(cp_comm_type, str) else cp_comm_type or ["p2p"]
    return frozenset(each) | ({"a2a"} if is_hybrid else set())


Classes = tuple[OpClass, ...]
Carries = Callable[[ParallelLayout, Features], "Classes"]
_NOTHING: Classes = ()
_BOTH: Classes = (OpClass.REDUCE, OpClass.GATHER_SCATTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKind:
    """One kind of group.

    Example: ``KINDS["EXPERT_DATA_PARALLEL_GROUP"].size(layout, features)``
    """

    key: str
    """Its name in Megatron's ``nccl_communicator_config_path`` file; ``world`` for the default group."""
    size: Callable[[ParallelLayout, Features], int]
    """Number of members."""
    classes: Callable[[ParallelLayout, Features], Classes] = lambda layout, features: _NOTHING
    """Op classes that it carries; none if Megatron creates the group but does not use it."""
    traffic: Callable[[ParallelLayout, Features], Traffic] = lambda layout, features: Traffic.BANDWIDTH
    """Kind of messages that it carries."""
    fires_alone: Callable[[Features], bool] = lambda features: False
    """Returns True if Megatron issues its collectives even on a group of one rank."""
    first_phase: Phase = Phase.TRAIN
    """The phase that issues the first collective on it."""


def _always(*classes: OpClass) -> Callable[[ParallelLayout, Features], Classes]:
    return lambda layout, features: classes


def _whenever_used(features: Features) -> bool:
    return True


def _control(layout: ParallelLayout, features: Features) -> Traffic:
    return Traffic.CONTROL


def _pipeline(layout: ParallelLayout, features: Features) -> Classes:
    # The reduction is a broadcast of the number of tokens (finalize_model_grads.py). Shapes are always sent in batches
    # (p2p_communication.py, _communicate_shapes).
    batches = features.batched_p2p is not False or features.variable_seq_lengths is not False
    ways = {OpClass.BATCHED_P2P: batches, OpClass.UNBATCHED_P2P: features.batched_p2p is not True}
    return OpClass.REDUCE, *(way for way, used in ways.items() if used)


def _context(layout: ParallelLayout, features: Features) -> Classes:
    # Transformer Engine batches the exchange of two ranks only (context_parallel.py, NVTE_BATCH_MHA_P2P_COMM).
    ways = {
        "a2a": OpClass.ALL_TO_ALL,
        "p2p": OpClass.BATCHED_P2P if layout.context == 2 else OpClass.UNBATCHED_P2P,
    }
    own = _BOTH if features.context_collectives or "all_gather" in features.context_exchange else _NOTHING
    return (*own, *(op_class for way, op_class in ways.items() if way in features.context_exchange))


def sends_over_world(layout: ParallelLayout, features: Features) -> bool:
    """Returns True if pipeline stages send batches over the default group."""
    return features.p2p_over_world and layout.pipeline > 1 and features.batched_p2p is not False


def _world_traffic(layout: ParallelLayout, features: Features) -> Traffic:
    # Between two pipeline stages one direction uses the default group, unless it is batched (p2p_communication.py:67).
    # The bootstrap of the pipeline group connects it.
    if features.weights_over_world:
        return Traffic.BANDWIDTH
    if sends_over_world(layout, features):
        return Traffic.STAGES
    return Traffic.STAGES if layout.pipeline == 2 and features.batched_p2p is not True else Traffic.CONTROL


def _has_experts(layout: ParallelLayout, features: Features) -> bool:
    return layout.expert > 1 if features.moe is None else features.moe


def _with_experts(*classes: OpClass) -> Carries:
    return lambda layout, features: classes if _has_experts(layout, features) else _NOTHING


def _of_expert_parameters(layout: ParallelLayout, features: Features) -> Classes:
    # Without expert parallelism, experts are reduced like all other parameters (tensor_parallel/layers.py:948).
    return _BOTH if layout.expert > 1 else _NOTHING


def _expert_exchange(layout: ParallelLayout, features: Features) -> Classes:
    exchanges = _has_experts(layout, features) and features.moe_dispatcher == "alltoall"
    return (OpClass.ALL_TO_ALL,) if exchanges else _NOTHING


def _whole_data_traffic(layout: ParallelLayout, features: Features) -> Traffic:
    return Traffic.CONTROL if features.optimizer_instances > 1 else Traffic.BANDWIDTH


def _token_dispatch(layout: ParallelLayout, features: Features) -> Traffic:
    return Traffic.BANDWIDTH if features.moe_dispatcher == "allgather" else Traffic.CONTROL


def _if(condition: Callable[[Features], bool], *classes: OpClass) -> Callable[[ParallelLayout, Features], Classes]:
    return lambda layout, features: classes if condition(features) else _NOTHING


WORLD = "WORLD"
PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"
EXPERT_DATA_PARALLEL = "EXPERT_DATA_PARALLEL_GROUP"
KINDS: Mapping[str, GroupKind] = {
    WORLD: GroupKind(
        key="world",
        size=lambda s, f: s.world_size,
        classes=lambda s, f: (*_BOTH, OpClass.ROOT_EXCHANGE) if f.background_saves else _BOTH,
        traffic=_world_traffic,
        first_phase=Phase.CONVERT,
    ),
    "DATA_PARALLEL_GROUP_WITH_CP": GroupKind(
        key="dp_cp",
        size=lambda s, f: s.data * s.context,
        classes=_always(*_BOTH),
        traffic=_whole_data_traffic,
        fires_alone=_whenever_used,
    ),
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": GroupKind(
        key="intra_dp_cp",
        size=lambda s, f: s.data * s.context // f.optimizer_instances,
        classes=_always(*_BOTH),
        fires_alone=_whenever_used,
    ),
    "DATA_PARALLEL_GROUP": GroupKind(key="dp", size=lambda s, f: s.data, traffic=_control),
    "CONTEXT_PARALLEL_GROUP": GroupKind(
        key="cp", size=lambda s, f: s.context, classes=_context, first_phase=Phase.LOGPROB
    ),
    "MODEL_PARALLEL_GROUP": GroupKind(
        key="mp",
        size=lambda s, f: s.tensor * s.pipeline,
        traffic=_control,
        # A plain optimizer reduces its norm and its search for inf without a look at the size (clip_grads.py:130).
        classes=_if(lambda f: not f.distributed_optimizer, OpClass.REDUCE),
        fires_alone=_whenever_used,
    ),
    "TENSOR_MODEL_PARALLEL_GROUP": GroupKind(
        key="tp",
        size=lambda s, f: s.tensor,
        classes=_always(*_BOTH),
        fires_alone=_whenever_used,
        first_phase=Phase.LOGPROB,
    ),
    "PIPELINE_MODEL_PARALLEL_GROUP": GroupKind(
        key="pp",
        size=lambda s, f: s.pipeline,
        classes=_pipeline,
        fires_alone=_whenever_used,
        first_phase=Phase.LOGPROB,
        traffic=lambda s, f: Traffic.STAGES,
    ),
    "EMBEDDING_GROUP": GroupKind(
        key="embd", size=lambda s, f: min(s.pipeline, 2), classes=_if(lambda f: f.tied_embeddings, OpClass.REDUCE)
    ),
    "POSITION_EMBEDDING_GROUP": GroupKind(key="pos_embd", size=lambda s, f: 1, traffic=_control),
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": GroupKind(
        key="tp_dp_cp",
        size=lambda s, f: s.tensor * s.data * s.context,
        traffic=_control,
        classes=_if(lambda f: f.expert_bias or f.aux_loss or f.fp8, OpClass.REDUCE),
        # get_updated_expert_bias (moe_utils.py) does not look at the group's size.
        fires_alone=lambda f: f.expert_bias,
    ),
    "TENSOR_AND_DATA_PARALLEL_GROUP": GroupKind(key="tp_dp", size=lambda s, f: s.tensor * s.data, traffic=_control),
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": GroupKind(
        key="tp_cp",
        size=lambda s, f: s.tensor * s.context,
        traffic=_control,
        classes=_if(lambda f: f.aux_loss or f.fp8, OpClass.REDUCE),
    ),
    "EXPERT_MODEL_PARALLEL_GROUP": GroupKind(
        key="ep",
        size=lambda s, f: s.expert,
        first_phase=Phase.LOGPROB,
        classes=_expert_exchange,
    ),
    "EXPERT_TENSOR_PARALLEL_GROUP": GroupKind(
        key="ep_tp", size=lambda s, f: s.expert_tensor, classes=_with_experts(*_BOTH), first_phase=Phase.LOGPROB
    ),
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": GroupKind(
        key="tp_ep_mp",
        size=lambda s, f: s.expert_tensor * s.expert,
        classes=_with_experts(*_BOTH),
        traffic=_token_dispatch,
        first_phase=Phase.LOGPROB,
    ),
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": GroupKind(
        key="tp_ep_pp",
        size=lambda s, f: s.expert_tensor * s.expert * s.pipeline,
        traffic=_control,
        classes=lambda s, f: (OpClass.REDUCE,) if _has_experts(s, f) and not f.distributed_optimizer else _NOTHING,
    ),
    EXPERT_DATA_PARALLEL: GroupKind(
        key="ep_dp",
        size=lambda s, f: s.expert_data,
        classes=_of_expert_parameters,
        traffic=_whole_data_traffic,
        fires_alone=_whenever_used,
    ),
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": GroupKind(
        key="intra_ep_dp",
        size=lambda s, f: s.expert_data // f.optimizer_instances,
        classes=_of_expert_parameters,
        fires_alone=_whenever_used,
    ),
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": GroupKind(
        key="inter_ep_dp",
        size=lambda s, f: f.optimizer_instances,
        fires_alone=_whenever_used,
        classes=_if(lambda f: f.optimizer_instances > 1, *_BOTH),
    ),
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": GroupKind(
        key="intra_dist_opt_instance",
        size=lambda s, f: s.world_size // f.optimizer_instances,
        traffic=_control,
        classes=_always(OpClass.REDUCE),
        fires_alone=_whenever_used,
    ),
}
"""The kinds of groups, by Megatron's ``group_desc``. A run need not have a group of every kind."""

HOST_KINDS: Mapping[str, GroupKind] = {
    # all_reduce and broadcast of experts' weights in exports and saves (mcore_bridge/bridge/gpt_bridge.py:440-473).
    "EP-PP-GROUP": GroupKind(
        key="ep_pp",
        size=lambda s, f: s.expert * s.pipeline,
        classes=_always(OpClass.REDUCE),
        first_phase=Phase.CONVERT,
    ),
    # all_gather_object of samples (swift/megatron/trainers/grpo_trainer.py:270).
    "ROLLOUT_GROUP": GroupKind(
        key="rollout",
        size=lambda s, f: s.tensor * s.pipeline * s.context,
        classes=_always(OpClass.GATHER_SCATTER),
        first_phase=Phase.ROLLOUT,
    ),
}
"""The kinds of groups that a host framework creates beside Megatron's, by their ``group_desc``: those of ms-swift."""

_ONLY_WITH_INSTANCES = ("intra_dp_cp", "intra_ep_dp", "inter_ep_dp")


def kinds_of(layout: ParallelLayout, features: Features) -> dict[str, GroupKind]:
    """Returns the kinds of groups that every supported version of Megatron creates for these features."""
    return {
        description: kind
        for description, kind in KINDS.items()
        if features.optimizer_instances > 1 or kind.key not in _ONLY_WITH_INSTANCES
    }


def neighbours(size: int) -> int:
    """Returns the number of peers that a rank in the middle of a pipeline, or in a ring, sends to."""
    return min(2, size - 1)


UNUSED = frozenset(
    {
        "GTP_WEIGHT_REMAT_GROUP",
        "EXPERT_GTP_WEIGHT_REMAT_GROUP",
        "DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
        "DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
        "EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
        "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
    }
)
"""Groups for weight rematerialisation, since megatron-core 0.19. Megatron always makes them, and uses them only with
that feature."""


def connected_classes(kind: GroupKind, size: int, layout: ParallelLayout, features: Features) -> Classes:
    """Returns the op classes that a bootstrap must connect on a group of this kind.

    If Megatron issues collectives on a group of one rank, that group has a communicator, which one reduction creates.
    """
    classes = kind.classes(layout, features)
    if size > 1 or not classes:
        return classes
    return (OpClass.REDUCE,) if kind.fires_alone(features) else _NOTHING
