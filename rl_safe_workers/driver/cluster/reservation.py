"""Reserves the places of all actors of a run at once: one bundle for each, on the node that the layout chooses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rl_safe_workers.config import ClusterConfig
from rl_safe_workers.driver.cluster.interrupts import SLICE_S
from rl_safe_workers.driver.cluster.nodes import Node, living_nodes
from rl_safe_workers.errors import Awaited, PhaseTimeoutError, ResourceError
from rl_safe_workers.findings import counted
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.topology.placement import DoesNotFitError, Placement, needs, place_run, rollouts_apart

TRY_S = 5.0
"""Seconds to wait for one choice of nodes before a new choice: a node may be lost, or another job may have taken it."""
PLACED_IN_S = 200
"""Number of bundles that Ray places in one second even when it is slow."""
AGAIN_S = 1.0
"""Seconds between two queries of the free resources."""
NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives to every node."""
_KINDS = ("CPU", "GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The places that a run has reserved.

    Example: ``reserve(config.cluster, layout, timeout_s=300, check=interrupts.check)``
    """

    group: PlacementGroup
    nodes: tuple[Node, ...]
    """The node of each bundle: first the trainers by rank, then the rollout ranks that have their own bundles."""

    @property
    def used(self) -> list[Node]:
        """The nodes that have a bundle, each once, in order."""
        return list({node.id: node for node in self.nodes}.values())


def bundles(cluster: ClusterConfig) -> list[dict[str, float]]:
    """Returns the bundles to reserve: one for each trainer, then one for each rollout rank.

    If trainers and rollout ranks are colocated, a pair shares the trainer's bundle.
    """
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
    """Reserves all places at once, or none.

    Args:
        cluster: The numbers of processes, and the resources of each.
        layout: Layout of the training world.
        timeout_s: Seconds until the places must be free.
        check: Called several times a second. An exception that it raises ends the wait.
        waits_for_nodes: True to wait also if the whole cluster is too small, because another node may join.

    Raises:
        ResourceError: If the present nodes would be too few even if nobody else used them.
        PhaseTimeoutError: If other jobs do not free enough resources in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        check()
        is_over = time.monotonic() >= deadline
        nodes = living_nodes()
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
                phase=Phase.START,
                awaited=Awaited("the placement group"),
                waited_s=timeout_s,
                setting="rl_safe.timeouts.start",
                detail=f"{_wanted(cluster)} are not free",
            )
        again_at = time.monotonic() + AGAIN_S
        while time.monotonic() < again_at:
            check()
            time.sleep(SLICE_S)


def _take(
    cluster: ClusterConfig, places: Sequence[Node], deadline: float, check: Callable[[], None]
) -> PlacementGroup | None:
    """Asks Ray for these places. Returns None, and reserves nothing, if Ray does not give them in time."""
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
    """Returns the resources that all nodes together lack, role by role, in words; empty if they suffice."""
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
