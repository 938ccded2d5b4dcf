"""The bundles that a run reserves of its cluster for its actors."""

from __future__ import annotations

import pytest

from rl_safe_workers.config import ClusterConfig
from rl_safe_workers.driver.cluster.cluster import GPU_SHARE
from rl_safe_workers.driver.cluster.reservation import bundles


def cluster(device: str, *, trainers: int = 2, rollouts: int = 3, colocated: bool = False) -> ClusterConfig:
    return ClusterConfig(
        device=device,
        colocated=colocated,
        num_trainers=trainers,
        num_rollouts=rollouts,
        cpus_per_trainer=0.25,
        cpus_per_rollout=0.5,
    )


def test_on_a_cpu_each_trainer_and_then_each_rollout_rank_has_its_share_of_the_cores() -> None:
    assert bundles(cluster("cpu")) == [{"CPU": 0.25}] * 2 + [{"CPU": 0.5}] * 3


def test_on_gpus_each_of_them_has_one_besides() -> None:
    assert bundles(cluster("cuda")) == [{"CPU": 0.25, "GPU": 1.0}] * 2 + [{"CPU": 0.5, "GPU": 1.0}] * 3


def test_a_colocated_pair_has_one_gpu_and_the_cores_of_both() -> None:
    assert bundles(cluster("cuda", trainers=3, colocated=True)) == [{"CPU": 0.75, "GPU": 1.0}] * 3


@pytest.mark.parametrize("trainers", [1, 8])
def test_a_colocated_run_fits_where_a_separate_one_needs_twice_the_gpus(trainers: int) -> None:
    apart, together = (
        sum(bundle["GPU"] for bundle in bundles(cluster("cuda", trainers=trainers, rollouts=trainers, colocated=c)))
        for c in (False, True)
    )
    assert (apart, together) == (2 * trainers, trainers)
    assert together == 2 * trainers * GPU_SHARE
