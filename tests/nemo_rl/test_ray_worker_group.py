"""NeMo RL's own RayVirtualCluster, RayWorkerBuilder and RayWorkerGroup build and end our worker, on CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from rl_safe_workers import env
from rl_safe_workers.adapters.nemo_rl.conversion import is_complete
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import VARIABLE
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from tests.distributed import reference
from tests.nemo_rl.source import SOURCE, needs_source

SIZE = 2
WORKER = "tests.nemo_rl.ray_worker.SafeHostWorker"
ENGINE = "tests.nemo_rl.ray_worker.EngineWorker"
ROOT = str(Path(__file__).resolve().parents[2])

pytestmark = [needs_source, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{SOURCE}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv(env.HANG_DIR, str(tmp_path / "answers"))  # as `launch.main` does
    monkeypatch.syspath_prepend(SOURCE)
    from nemo_rl.distributed import ray_actor_environment_registry, virtual_cluster

    for name in (WORKER, ENGINE):
        monkeypatch.setitem(ray_actor_environment_registry.ACTOR_ENVIRONMENT_REGISTRY, name, sys.executable)
    ray.init(
        address="local", num_cpus=SIZE + 6, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1"
    )
    made = virtual_cluster.RayVirtualCluster([SIZE], use_gpus=False, num_gpus_per_node=SIZE)
    yield made
    made.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe"
    create_seeded_model(path, SeededModelConfig())
    return path


def config_of(model: Path, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model_name": str(model),
        "converted": str(folder / "converted"),
        "megatron_cfg": {"enabled": True, "expert_model_parallel_size": 2},
        **more,
    }


def group_of(
    cluster: Any,
    config: dict[str, Any],
    *,
    worker: str = WORKER,
    size: int = SIZE,
    timeouts: dict[str, float] | None = None,
) -> Any:
    from nemo_rl.distributed.named_sharding import NamedSharding
    from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup

    names = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
    annotations = NamedSharding(layout=np.arange(size).reshape(1, size, 1, 1), names=names)
    builder = RayWorkerBuilder(worker, config, worker_sharding_annotations=annotations)
    # What the driver's `give_settings` writes into policy.megatron_cfg.env_vars.
    variables = {VARIABLE: json.dumps({"timeouts": {"world": 60, **(timeouts or {})}}), "OMP_NUM_THREADS": "1"}
    return RayWorkerGroup(
        cluster,
        builder,
        name_prefix=worker.rpartition(".")[2],
        sharding_annotations=annotations,
        env_vars=variables,
    )


def test_the_hosts_worker_group_drives_a_worker_to_its_end(cluster, tiny_moe, tmp_path) -> None:
    group = group_of(cluster, config_of(tiny_moe, tmp_path))

    def call(method: str, **arguments: Any) -> Any:
        return ray.get(group.run_all_workers_single_data(method, **arguments), timeout=120)

    assert all(report["bootstrap_groups"] > 0 for report in call("rl_safe_report"))
    assert is_complete(tmp_path / "converted")
    call("get_logprobs", data=reference.random_batch(rows=4))
    call("train", data=reference.random_batch(rows=4))
    call("save_checkpoint", weights_path=str(tmp_path / "step_1" / "weights"))
    assert (tmp_path / "step_1" / "weights" / "iter_0000000" / ".metadata").is_file()
    assert group.shutdown(cleanup_method="shutdown")
