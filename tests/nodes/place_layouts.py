"""Reserves random layouts on a running Ray cluster, as the driver does; prints where Ray has put each bundle, as JSON.

    python -m tests.nodes.place_layouts HOST:PORT NODES GPUS LAYOUTS

All NODES have GPUS each; for a smaller cluster the rest is reserved by somebody else meanwhile.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from rl_safe_workers.config import ClusterConfig
from rl_safe_workers.driver.cluster.joining import join_ray
from rl_safe_workers.driver.cluster.nodes import living_nodes
from rl_safe_workers.driver.cluster.reservation import NODE_LABEL, reserve
from rl_safe_workers.errors import LayoutError
from rl_safe_workers.topology.layout import ParallelLayout, check_layout

WAIT_S = 30.0


def random_cases(number: int, *, nodes: int, gpus: int) -> Iterator[tuple[int, int, int, ParallelLayout]]:
    """Yields nodes, GPUs of each, rollout ranks, and a layout that needs all of these nodes."""
    chance = random.Random(0)
    while number:
        some, each = chance.randint(2, nodes), chance.randint(2, gpus)
        total = chance.randint((some - 1) * each + 1, some * each)
        rollouts = chance.randint(0, total // 3)
        sizes = {
            "tensor": chance.choice((1, 2, 4, 8)),
            "pipeline": chance.choice((1, 2)),
            "expert": chance.choice((1, 2, 3, 4, 8)),
            "expert_tensor": chance.choice((1, 1, 2)),
            "context": 1,
        }
        layout = ParallelLayout(world_size=total - rollouts, **sizes)
        try:
            check_layout(layout)
        except LayoutError:
            continue
        number -= 1
        yield some, each, rollouts, layout


@contextmanager
def smaller(some: int, each: int, gpus: int) -> Iterator[None]:
    """Leaves ``each`` GPUs free on the first ``some`` nodes, and none elsewhere."""
    there = living_nodes()
    taken = {node.id: gpus - (each if number < some else 0) for number, node in enumerate(there)}
    blocked = [(node, count) for node, count in taken.items() if count]
    if not blocked:
        yield
        return
    group = placement_group(
        [{"GPU": float(count)} for _, count in blocked], bundle_label_selector=[{NODE_LABEL: n} for n, _ in blocked]
    )
    try:
        assert group.wait(WAIT_S)
        await_free({node: gpus - count for node, count in taken.items()})
        yield
    finally:
        remove_placement_group(group)
        await_free(dict.fromkeys(taken, gpus))


def await_free(expected: dict[str, int]) -> None:
    """Waits until Ray's view of its resources has come up with what was reserved."""
    deadline = time.monotonic() + WAIT_S
    while {node.id: round(node.free.get("GPU", 0)) for node in living_nodes()} != expected:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def main(address: str, nodes: int, gpus: int, number: int) -> None:
    join_ray(ClusterConfig(ray_address=address), timeout_s=WAIT_S, check=lambda: None)
    number_of = {node.id: place for place, node in enumerate(living_nodes())}
    found = []
    for some, each, rollouts, layout in random_cases(number, nodes=nodes, gpus=gpus):
        cluster = ClusterConfig(
            device="cuda",
            num_trainers=layout.world_size,
            num_rollouts=rollouts,
            cpus_per_trainer=0.01,
            cpus_per_rollout=0.01,
        )
        with smaller(some, each, gpus):
            group = reserve(cluster, layout, timeout_s=WAIT_S, check=lambda: None).group
            places = placement_group_table(group)["bundles_to_node_id"]
            remove_placement_group(group)
        by_rank = [number_of[places[bundle]] for bundle in range(layout.world_size + rollouts)]
        found.append({"nodes": some, "gpus": each, "rollouts": rollouts, "by_rank": by_rank})
    ray.shutdown()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
