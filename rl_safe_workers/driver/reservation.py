"""Reserves a place for every actor of a run at once: a bundle for each, on the node that the layout wants it on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rl_safe_workers.config import ClusterConfig
from rl_safe_workers.driver.interrupts import SLICE_S
from rl_safe_workers.driver.nodes import Node, living_nodes, lost_among
from rl_safe_workers.errors import Awaited, PhaseTimeoutError, ResourceError
from rl_safe_workers.findings import counted
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.topology.placement import DoesNotFitError, Placement, needs, place_run, rollouts_apart

TRY_S = 5.0
"""How long to wait for one choice of nodes before it is made anew: one may be lost, or somebody else was quicker."""
PLACED_IN_S = 200
"""Bundles that Ray surely places in a second."""
AGAIN_S = 1.0
"""Between two looks at what is free."""
NODE_LABEL = "ray.io/node-id"
"""Ray gives it to every node."""
_KINDS = ("CPU", "GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The resources that a run has reserved.

    Example: ``reserve(config.cluster, layout, timeout_s=300, check=interrupts.check)``
    """

    group: PlacementGroup
    nodes: tuple[Node, ...]
    """That of each bundle: of trainers by rank, then of rollout ranks; colocated, of each pair."""

    @property
    def used(self) -> list[Node]:
        """All nodes that have a bundle, each once, in order."""
        return list({node.id: node for node in self.nodes}.values())


def bundles(cluster: ClusterConfig) -> list[dict[str, float]]:
    """Returns the bundles to reserve: one per trainer, then one per rollout rank; colocated, one per pair."""
    trainer, rollout = needs(cluster)
    return [dict(trainer)] * cluster.num_trainers + [dict(rollout)] * rollouts_apart(cluster)


def reserve(
    cluster: ClusterConfig,
    layout: ParallelLayout,
    *,
    timeout_s: float,
    check: Callable[[], None],
    waits_for_nodes: bool = False,
) -> Reservation:
    """Reserves every place at once, or none.

    Args:
        cluster: Processes and what each takes.
        layout: The training world's.
        timeout_s: Seconds until the places must be free.
        check: Called several times a second; what it raises ends the wait.
        waits_for_nodes: Whether to wait, too, when all nodes together are too few: another may be on its way.

    Raises:
        ResourceError: If the nodes that are there would not do even if nobody else used them.
        PhaseTimeoutError: If others have not given enough of them free in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        check()
        is_over = time.monotonic() >= deadline
        nodes = _nodes()
        if (complaint := _too_small(cluster, layout, nodes)) and (is_over or not waits_for_nodes):
            raise ResourceError(complaint)
        chosen = _choose(cluster, layout, nodes, [node.free for node in nodes])
        if isinstance(chosen, Placement):
            places = tuple(nodes[index] for index in (*chosen.trainers, *chosen.rollouts))
            try_s = TRY_S + len(places) / PLACED_IN_S
            group = _take(cluster, places, min(deadline, time.monotonic() + try_s), check)
            if group is not None:
                return Reservation(group=group, nodes=places)
        if is_over:
            raise PhaseTimeoutError(
                phase=Phase.START, awaited=Awaited("the placement group"), waited_s=timeout_s,
                setting="rl_safe.timeouts.start", detail=f"{_wanted(cluster)} are not free",
            )  # fmt: skip
        again_at = time.monotonic() + AGAIN_S
        while time.monotonic() < again_at:
            check()
            time.sleep(SLICE_S)


def _nodes() -> list[Node]:
    nodes = living_nodes()
    if len(nodes) == 1:
        return nodes  # this process has just talked to it
    lost = {node.id for node in lost_among(nodes)}
    return [node for node in nodes if node.id not in lost]


def _take(
    cluster: ClusterConfig, places: Sequence[Node], deadline: float, check: Callable[[], None]
) -> PlacementGroup | None:
    """Asks Ray for these places; None, and nothing is held, if it does not give them in time."""
    selectors = [{NODE_LABEL: node.id} for node in places]
    group = placement_group(bundles(cluster), strategy="PACK", bundle_label_selector=selectors)
    try:
        while not group.wait(SLICE_S):
            check()
            if time.monotonic() >= deadline:
                remove_placement_group(group)
                return None
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _choose(
    cluster: ClusterConfig, layout: ParallelLayout, nodes: Sequence[Node], amounts: Sequence[Mapping[str, float]]
) -> Placement | DoesNotFitError:
    try:
        return place_run(cluster, layout, amounts)
    except DoesNotFitError as error:
        return error


def _too_small(cluster: ClusterConfig, layout: ParallelLayout, nodes: Sequence[Node]) -> str:
    """Says what all nodes together lack, role by role; empty: nothing."""
    outcome = _choose(cluster, layout, nodes, [node.total for node in nodes])
    if isinstance(outcome, Placement):
        return ""
    there = {name: sum(node.total.get(name, 0.0) for node in nodes) for name in _KINDS}
    present = " and ".join(f"{amount:g} {name}s" for name, amount in there.items() if amount or name == "GPU")
    roles = ("pairs of trainer and rollout rank",) if cluster.colocated else ("trainers", "rollout ranks")
    lacking = cluster.num_trainers - outcome.trainers, rollouts_apart(cluster) - outcome.rollouts
    missing = [
        f"{count} {role} ({_words(needed)} each)"
        for count, role, needed in zip(lacking, roles, needs(cluster), strict=False)
        if count
    ]
    advice = "cluster.num_trainers, cluster.num_rollouts, cluster.cpus_per_trainer or cluster.cpus_per_rollout"
    less = "" if cluster.device == "cpu" or cluster.colocated else ", set cluster.colocated=true"
    return (
        f"the run needs {_wanted(cluster)}, the cluster has {present} on {counted(len(nodes), 'node')}: "
        f"no room for {' and '.join(missing)}; lower {advice}{less}, or add nodes"
    )


def _sum(amounts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(of.get(name, 0.0) for of in amounts) for name in _KINDS}


def _wanted(cluster: ClusterConfig) -> str:
    return _words(_sum(bundles(cluster)))


def _words(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}{'s' if amount != 1 else ''}" for name, amount in amounts.items() if amount)
