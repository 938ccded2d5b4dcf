"""Where Ray puts the ranks of a run, on up to eight nodes of this machine with GPUs that are only counted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rl_safe_workers.plan.plan import nodes_by_rank
from rl_safe_workers.plan.request import Source, make_request
from rl_safe_workers.topology.layout import ParallelLayout
from tests.nodes.local_cluster import local_cluster
from tests.nodes.place_layouts import random_cases

NODES, GPUS, LAYOUTS = 8, 8, 50


def planned(gpus: int, rollouts: int, layout: ParallelLayout) -> list[int]:
    values = {
        "trainers": layout.world_size,
        "rollouts": rollouts,
        "gpus_per_node": gpus,
        "tp": layout.tensor,
        "pp": layout.pipeline,
        "ep": layout.expert,
        "etp": layout.expert_tensor,
    }
    return list(nodes_by_rank(make_request(Source(name="a test", values=values), host="rl-safe")))


@pytest.mark.timeout(300)
def test_ranks_are_where_the_plan_says_and_groups_that_fit_into_a_node_are_in_one() -> None:
    with local_cluster(NODES, gpus=GPUS) as cluster:
        command = ["-m", "tests.nodes.place_layouts", cluster.ray_address, *map(str, (NODES, GPUS, LAYOUTS))]
        done = subprocess.run(
            [sys.executable, *command],
            env=cluster.environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    whole = 0
    for (nodes, gpus, rollouts, layout), of_ray in zip(
        random_cases(LAYOUTS, nodes=NODES, gpus=GPUS), found, strict=True
    ):
        by_rank = of_ray["by_rank"]
        assert by_rank == planned(gpus, rollouts, layout), (nodes, gpus, rollouts, layout)
        block = max(layout.tensor, layout.expert * layout.expert_tensor)
        if gpus % block == 0:
            whole += 1
            assert all(len({*by_rank[at : at + block]}) == 1 for at in range(0, layout.world_size, block))
    assert whole > LAYOUTS // 4
