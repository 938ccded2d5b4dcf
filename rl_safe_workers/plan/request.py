"""The subject of a plan: checked facts about a run, from any source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rl_safe_workers.errors import ConfigError, LayoutError
from rl_safe_workers.plan.fields import BY_NAME, FIELDS, HOST_DEFAULTS
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.topology.layout import SETTINGS, WORLD_KEY, ParallelLayout, check_layout, divisors

_AXES: Mapping[str, str] = {
    "tensor": "tp",
    "pipeline": "pp",
    "expert": "ep",
    "expert_tensor": "etp",
    "context": "cp",
}
_ENGINE = ("vllm_tp", "vllm_pp", "vllm_dp")
_UNEVEN = ("first_stage_layers", "last_stage_layers")
_AS_LAYERS = ("embedding_as_layer", "loss_as_layer")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Facts as the user gave them, by name.

    Example: ``Source(name="options", values={"tp": "4"}, keys={"tp": "--tp"})``
    """

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    """The key of each fact in its source."""
    max_ctas: Mapping[str, int] = field(default_factory=dict)
    """Limit of channels for each group, by Megatron's name."""
    habits: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that replace those of the host."""

    def key(self, name: str) -> str:
        """Returns the key of a fact in this source, even if the fact was not given."""
        return self.keys.get(name) or BY_NAME[name].option

    def overlaid(self, other: Source) -> Source:
        """Returns these facts, overridden by another source's facts."""
        return Source(
            name=self.name,
            values={**self.values, **other.values},
            keys={**self.keys, **{name: other.key(name) for name in other.values}},
            max_ctas={**self.max_ctas, **other.max_ctas},
            habits={**self.habits, **other.habits},
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run to plan.

    Example: ``make_request(Source(name="options", values={"trainers": 32, "ep": 8}))``
    """

    source: Source
    trainers: int
    rollouts: int
    vllm_tp: int
    vllm_pp: int
    vllm_dp: int
    gpus_per_node: int
    network: str
    colocated: bool
    layout: ParallelLayout
    vpp: int | None
    optimizer_instances: int
    dispatcher: str
    first_stage_layers: int | None
    last_stage_layers: int | None
    embedding_as_layer: bool
    loss_as_layer: bool
    pipeline_layout: str | None
    sends: str
    model: str | None
    dtype_bytes: int
    megatron: str
    torch: float
    cumem: bool
    host: str
    default_group: str
    device_id: bool
    backend: str
    bootstrap: bool
    budget: bool
    release_comms: bool
    world_syncs: bool
    timeout_s: float | None
    unread_timeout_s: float | None
    group_timeout_s: float | None
    gloo: bool
    fully_parallel_save: bool
    validate_access_integrity: bool
    async_save: bool
    finalizes: bool
    optimizer_sharding: str
    teardown: str
    write_gib_s: float

    @property
    def gpus(self) -> int:
        """Number of GPUs that the run takes."""
        return self.trainers if self.colocated else self.trainers + self.rollouts

    @property
    def nodes(self) -> int:
        """Number of nodes that the run takes."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def engine_ranks(self) -> int:
        """Number of ranks of each vLLM engine."""
        return self.vllm_tp * self.vllm_pp * self.vllm_dp

    @property
    def mixed(self) -> bool:
        """True if the trainers' default group contains rollout ranks."""
        return self.default_group == "joint" and self.rollouts > 0

    def setting(self, name: str) -> str:
        """Returns the key or option that sets a fact, in the words of the source."""
        return self.source.key(name)

    def features(self, *, moe: bool | None, tied: bool) -> Features:
        """Returns the features that decide about the collectives.

        Args:
            moe: Whether the model has experts; None if unknown.
            tied: Whether the first and last stage share the embedding.
        """
        return Features(
            moe_dispatcher=self.dispatcher,
            moe=moe,
            tied_embeddings=tied,
            batched_p2p={"batched": True, "one by one": False}.get(self.sends),
            virtual_pipeline=self.vpp is not None,
            # ms-swift replaces Megatron's function that sends in batches (swift/megatron/init.py:23).
            p2p_over_world=self.host == "ms-swift" and self.sends == "batched",
            optimizer_instances=self.optimizer_instances,
            weights_over_world=self.world_syncs or (self.colocated and self.host == "rl-safe"),
        )


def make_request(source: Source, *, host: str = "megatron") -> Request:
    """Checks facts, and fills in missing ones.

    Args:
        source: The facts.
        host: The host whose habits are the defaults, unless the facts name a host.

    Raises:
        ConfigError: If a value cannot be used, or if two values contradict each other.
        LayoutError: If the sizes do not divide the training world.
    """
    given = {
        field.name: field.parse(source.values[field.name], key=source.key(field.name))
        for field in FIELDS
        if source.values.get(field.name) is not None
    }
    habits = {**HOST_DEFAULTS[given.setdefault("host", host)], **source.habits}
    facts = {field.name: given.get(field.name, habits.get(field.name, field.default)) for field in FIELDS}
    if facts["host"] == "ms-swift" and "sends" not in given:
        # batch_p2p_comm is on without virtual stages (swift/megatron/arguments/megatron_args.py:1116).
        facts["sends"] = "batched" if facts["vpp"] is None else "one by one"
    facts |= _rank_counts(given, facts, source)
    layout = _layout(facts, source)
    _check_instances(layout, facts["optimizer_instances"], source)
    _check_pipeline(facts, source)
    names = {field.name for field in fields(Request)}
    kept = {name: value for name, value in facts.items() if name in names}
    return Request(**kept, source=source, layout=layout)


def _rank_counts(given: Mapping[str, Any], facts: Mapping[str, Any], source: Source) -> dict[str, int]:
    """Returns the numbers of trainers and rollout ranks."""
    world, trainers, rollouts = given.get("world"), given.get("trainers"), given.get("rollouts")
    if facts["colocated"]:
        return _colocated(world, trainers, rollouts, facts, source)
    if trainers is None:
        if world is None:
            raise ConfigError(
                f"{source.key('trainers')} is missing: say how many trainers there are, {BY_NAME['trainers'].valid}"
            )
        trainers = world - (rollouts or 0)
        if trainers < 1:
            raise ConfigError(
                f"{source.key('rollouts')}={rollouts} leaves no trainer of {source.key('world')}={world}: it takes a "
                f"whole number below {world}"
            )
    if world is not None and trainers > world:
        raise ConfigError(
            f"{source.key('trainers')}={trainers} is more than {source.key('world')}={world}: it takes 1 to {world}"
        )
    if rollouts is None:
        rollouts = 0 if world is None else world - trainers
    if world is not None and trainers + rollouts != world:
        raise ConfigError(
            f"{source.key('rollouts')}={rollouts} with {source.key('trainers')}={trainers} is not "
            f"{source.key('world')}={world}: set it to {world - trainers}"
        )
    _check_engines(facts, rollouts, source)
    return {"trainers": trainers, "rollouts": rollouts}


def _colocated(
    world: int | None, trainers: int | None, rollouts: int | None, facts: Mapping[str, Any], source: Source
) -> dict[str, int]:
    counts = {
        name: count
        for name, count in {"trainers": trainers, "world": world, "rollouts": rollouts}.items()
        if count is not None
    }
    if not counts:
        raise ConfigError(f"{source.key('trainers')} is missing: say how many trainers there are")
    (first, number), *others = counts.items()
    if number < 1:
        raise ConfigError(
            f"{source.key(first)}={number} with {source.key('colocated')}=true leaves no rank: it takes a whole number "
            "of at least 1"
        )
    for name, count in others:
        if count != number:
            raise ConfigError(
                f"{source.key(name)}={count} with {source.key('colocated')}=true shares the GPUs of "
                f"{source.key(first)}={number}: it takes {number}"
            )
    _check_engines(facts, number, source)
    return {"trainers": number, "rollouts": number}


def _check_engines(facts: Mapping[str, Any], rollouts: int, source: Source) -> None:
    size = math.prod(facts[name] for name in _ENGINE)
    if rollouts % size == 0:
        return
    fitting = ", ".join(map(str, divisors(rollouts)[:12]))
    named = [f"{source.key(name)}={facts[name]}" for name in _ENGINE if facts[name] > 1]
    if len(named) == 1:
        raise ConfigError(f"{named[0]} does not divide {rollouts} rollout ranks: it takes one of {fitting}")
    raise ConfigError(
        f"{' x '.join(named)}, an engine of {size} ranks, does not divide {rollouts} rollout ranks: set them to a "
        f"product of {fitting}"
    )


def _layout(facts: Mapping[str, Any], source: Source) -> ParallelLayout:
    sizes = {axis: facts[name] for axis, name in _AXES.items()}
    sizes["expert_tensor"] = sizes["expert_tensor"] or sizes["tensor"]
    layout = ParallelLayout(world_size=facts["trainers"], **sizes)
    try:
        check_layout(layout)
    except LayoutError as error:
        raise LayoutError(in_words_of(source, str(error))) from error
    return layout


def in_words_of(source: Source, text: str) -> str:
    """Returns a text in which the source's keys replace a recipe's keys."""
    names = {WORLD_KEY: "trainers", **{SETTINGS[axis]: name for axis, name in _AXES.items()}}
    for key, name in names.items():
        text = text.replace(key, source.key(name))
    return text


def _check_instances(layout: ParallelLayout, instances: int, source: Source) -> None:
    copies = layout.data * layout.context
    fitting = [n for n in divisors(copies) if layout.expert_data % n == 0]
    if instances not in fitting:
        raise LayoutError(
            f"{source.key('optimizer_instances')}={instances} must divide {copies} data-parallel and "
            f"{layout.expert_data} expert-data-parallel ranks: it takes one of {', '.join(map(str, fitting[:12]))}"
        )


def _check_pipeline(facts: Mapping[str, Any], source: Source) -> None:
    for name in ("vpp", "first_stage_layers", "last_stage_layers"):
        if facts[name] is not None and facts["pp"] == 1:
            raise ConfigError(
                f"{source.key(name)}={facts[name]} needs two or more pipeline stages: leave it out, or set "
                f"{source.key('pp')} to 2 or more"
            )
    # Megatron accepts only one of the three ways to split layers unevenly (transformer_config.py, __post_init__).
    ways = [[name for name in way if facts[name]] for way in (_UNEVEN, _AS_LAYERS, ("pipeline_layout",))]
    used = [f"{source.key(way[0])}={facts[way[0]]!s:.80}" for way in ways if way]
    if len(used) > 1:
        raise ConfigError(f"{used[0]} does not go with {used[1]}: leave one of them out")


def options_source(options: Mapping[str, Any]) -> Source:
    """Returns the facts from a command's options. An option that is None was not given.

    >>> options_source({"tp": "4", "pp": None}).values
    {'tp': '4'}
    """
    values = {name: value for name, value in options.items() if name in BY_NAME and value is not None}
    return Source(name="options", values=values)
