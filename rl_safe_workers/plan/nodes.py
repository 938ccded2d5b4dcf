"""Which node each process of a plan is on."""

from __future__ import annotations

from rl_safe_workers.plan.request import Request
from rl_safe_workers.topology.placement import Placement, place

_GPU = {"GPU": 1.0}


def nodes_by_rank(request: Request) -> tuple[int, ...]:
    """Returns the node of each process, by joint rank: trainers, then rollout ranks.

    Our own driver keeps groups inside nodes, with `topology.placement.place`; others fill nodes in the order of ranks.
    """
    size = request.gpus_per_node
    if request.host != "rl-safe":
        gpus = [*range(request.trainers), *range(0 if request.colocated else request.trainers, request.gpus)]
        return tuple(gpu // size for gpu in gpus)
    placement = _placement(request)
    rollouts = placement.trainers if request.colocated else placement.rollouts
    return (*placement.trainers, *rollouts)


def _placement(request: Request) -> Placement:
    return place(
        request.layout, [{"GPU": float(request.gpus_per_node)}] * request.nodes,
        trainer=_GPU, rollout=_GPU, rollouts=0 if request.colocated else request.rollouts,
    )  # fmt: skip
