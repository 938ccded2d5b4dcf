"""Plans a run before it exists: the place of each rank, every communicator, its memory, and the saves."""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rl_safe_workers.errors import ModelError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.plan.families import (
    ENGINE,
    JOINT,
    RULES,
    GroupFamily,
    engine_family,
    host_families,
    joint_family,
    megatron_families,
    world_family,
)
from rl_safe_workers.plan.memory_plan import MemoryPlan, plan_memory
from rl_safe_workers.plan.model import ModelSize, split_layers
from rl_safe_workers.plan.request import Request
from rl_safe_workers.plan.saves import GIB, RAISES_SINCE, SaveWay, plan_saves
from rl_safe_workers.ranks import Role, format_ranks
from rl_safe_workers.topology.budget import check_overrides
from rl_safe_workers.topology.groups import (
    UNUSED,
    WORLD,
    Classes,
    Features,
    OpClass,
    connected_classes,
    kinds_of,
    sends_over_world,
)
from rl_safe_workers.topology.placement import place


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """All groups of one kind.

    Example: ``Communicator(family=…, key="ep_dp", classes=(OpClass.REDUCE,), first_phase=Phase.TRAIN, crossing=0)``
    """

    family: GroupFamily
    key: str
    """Megatron's name for the groups in ``nccl_communicator_config_path``; empty if they have none."""
    classes: Classes
    """Op classes that the groups carry; empty if they are made but not used."""
    first_phase: Phase | None
    """The first phase that uses the groups; None if no phase uses them."""
    crossing: int
    """Number of groups with members on more than one node."""

    @property
    def is_used(self) -> bool:
        """True if the groups carry any data."""
        return bool(self.classes) or self.family.description in (JOINT, ENGINE)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is known about a run before it starts.

    Example: ``make_plan(make_request(Source(name="options", values={"trainers": 32, "ep": 8})))``
    """

    request: Request
    model: ModelSize | None
    features: Features
    communicators: tuple[Communicator, ...]
    """The default group, Megatron's groups in their order of creation, the host's, the joint group, and vLLM's."""
    memory: MemoryPlan
    saves: tuple[SaveWay, ...]
    """The ways of saving; empty without a model."""
    nodes: tuple[int, ...]
    """The node of each process, by joint rank."""

    def roles_by_node(self) -> Iterator[tuple[int, dict[Role, range]]]:
        """Yields each node and the joint ranks on it, by role."""
        trainers = self.request.trainers
        for node in range(self.request.nodes):
            # On each node, the ranks of a role are consecutive.
            found = {
                Role.TRAINER: range(bisect_left(self.nodes, node, 0, trainers), bisect(self.nodes, node, 0, trainers)),
                Role.ROLLOUT: range(bisect_left(self.nodes, node, trainers), bisect(self.nodes, node, trainers)),
            }
            yield node, {role: ranks for role, ranks in found.items() if ranks}

    def communicator(self, description: str) -> Communicator | None:
        """Returns the communicators of a kind; None if there are none."""
        return self._by_description.get(description)

    @cached_property
    def _by_description(self) -> dict[str, Communicator]:
        return {communicator.family.description: communicator for communicator in self.communicators}

    @property
    def moe(self) -> bool:
        """True if the model is known or assumed to have experts."""
        return bool(self.features.moe) or (self.features.moe is None and self.request.layout.expert > 1)

    @property
    def trainer_ranks(self) -> str:
        """The training ranks as short text."""
        return format_ranks(range(self.request.trainers))

    @property
    def rollout_ranks(self) -> str:
        """The joint ranks of rollouts as short text."""
        return format_ranks(range(self.request.trainers, self.request.trainers + self.request.rollouts))

    @property
    def layers(self) -> list[int]:
        """Number of layers of each pipeline stage, as even as possible; empty without a model.

        With a ``pipeline_layout``, which is not read, this is an estimate.
        """
        request = self.request
        if self.model is None:
            return []
        return split_layers(
            self.model.shape.num_layers,
            request.layout.pipeline,
            first=request.first_stage_layers,
            last=request.last_stage_layers,
            embedding=request.embedding_as_layer,
            loss=request.loss_as_layer,
        )


def make_plan(request: Request) -> Plan:
    """Plans a run.

    Raises:
        ModelError: If the model's ``config.json`` cannot be read or lacks a size.
        ConfigError: If a limit of channels names no group.
    """
    model = None if request.model is None else ModelSize.read(request.model, key=request.setting("model"))
    features = request.features(
        moe=None if model is None else model.shape.num_experts > 0,
        tied=model is None or model.shape.tie_word_embeddings,
    )
    layout = request.layout
    node = request.setting("budget").removesuffix("budget")  # the limits are in the same node
    keys = [kind.key for kind in kinds_of(layout, features).values()]
    check_overrides(request.source.max_ctas, keys=keys, named=lambda key: f"{node}{key}")
    of_megatron = megatron_families(
        layout, instances=request.optimizer_instances, rules=request.megatron, gloo=request.gloo
    )
    families = [world_family(layout.world_size), *of_megatron, *host_families(layout, request.host)]
    nodes = nodes_by_rank(request)
    memory = plan_memory(
        layout,
        features,
        families,
        limits=request.source.max_ctas,
        budget=request.host != "rl-safe" or request.budget,
        limits_world=request.host != "ms-swift",
        nodes=nodes if request.network == "sockets" else None,
    )
    plan = Plan(
        request=request,
        model=model,
        features=features,
        memory=memory,
        saves=(),
        nodes=nodes,
        communicators=tuple(_communicators(request, families, features, nodes)),
    )
    if model is None:
        return plan
    return replace(plan, saves=tuple(_saves(request, model, plan.layers, nodes)))


def nodes_by_rank(request: Request) -> tuple[int, ...]:
    """Returns the node of each process, by joint rank: trainers, then rollout ranks.

    Our own driver keeps groups inside nodes, by `topology.placement.place`. Other hosts fill nodes in order of ranks.
    """
    size = request.gpus_per_node
    if request.host != "rl-safe":
        gpus = [*range(request.trainers), *range(0 if request.colocated else request.trainers, request.gpus)]
        return tuple(gpu // size for gpu in gpus)
    gpu = {"GPU": 1.0}
    placement = place(
        request.layout,
        [{"GPU": float(size)}] * request.nodes,
        trainer=gpu,
        rollout=gpu,
        rollouts=0 if request.colocated else request.rollouts,
    )
    return (*placement.trainers, *(placement.trainers if request.colocated else placement.rollouts))


def _communicators(
    request: Request, families: list[GroupFamily], features: Features, nodes: Sequence[int]
) -> Iterator[Communicator]:
    for family in families:
        kind = family.kind
        classes = () if kind is None else connected_classes(kind, family.size, request.layout, features)
        if family.description == WORLD and sends_over_world(request.layout, features):
            classes = (*classes, OpClass.BATCHED_P2P)
        yield Communicator(
            family=family,
            key="" if kind is None else kind.key,
            classes=classes,
            first_phase=kind.first_phase if kind and classes else None,
            crossing=family.crossing(nodes),
        )
    if not request.rollouts:
        return
    joint = joint_family(request.trainers + request.rollouts)
    engines = engine_family(rollouts=request.rollouts, size=request.engine_ranks, first=request.trainers)
    crossing = int(len({*nodes}) > 1)
    yield Communicator(family=joint, key="", classes=(), first_phase=Phase.SYNC, crossing=crossing)
    yield Communicator(family=engines, key="", classes=(), first_phase=Phase.ROLLOUT, crossing=engines.crossing(nodes))


def _saves(request: Request, model: ModelSize, layers: list[int], nodes: Sequence[int]) -> list[SaveWay]:
    if sum(layers) != model.shape.num_layers or min(layers) < 0:
        raise ModelError(
            f"{request.setting('first_stage_layers')}={request.first_stage_layers} and "
            f"{request.setting('last_stage_layers')}={request.last_stage_layers} do not fit "
            f"{model.shape.num_layers} layers on {request.layout.pipeline} stages: leave them out, or lower them so "
            "that every other stage gets a layer"
        )
    return plan_saves(
        request.layout,
        model.stages(layers),
        instances=request.optimizer_instances,
        weight_bytes=request.dtype_bytes,
        nodes=nodes,
        node_bytes_s=request.write_gib_s * GIB,
        raises=RULES.index(request.megatron) >= RULES.index(RAISES_SINCE),
    )


def is_spare(communicator: Communicator) -> bool:
    """Returns True if Megatron makes these groups but nothing uses them, whatever their size."""
    return not communicator.is_used or communicator.family.description in UNUSED
