"""A job of NeMo RL's own worker groups, policy, generation and refit, on CPU, with workers that need no Bridge.

``nemo_rl_job.py FOLDER PHASE SECONDS``: the deadline of one phase.
"""

from __future__ import annotations

import os
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray

from rl_safe_workers import env
from rl_safe_workers.adapters.job_processes import ending_all_processes, folder_of
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from tests.nemo_rl.source import SOURCE
from tests.nemo_rl.test_lost_workers import job
from tests.nemo_rl.test_ray_worker_group import ENGINE, SIZE, WORKER

GENEROUS_S = 60.0
PHASES = ("bootstrap", "convert", "train", "logprob", "save", "sync", "rollout", "teardown")


def main(folder: Path, phase: str, timeout_s: float) -> None:
    create_seeded_model(folder / "model", SeededModelConfig())
    run_id = uuid.uuid4().hex[:12]
    env.mark_run(run_id, hang_dir=folder_of(run_id))
    timeouts = {each: timeout_s if each in (phase, "teardown") else GENEROUS_S for each in PHASES}
    with ending_all_processes(run_id) as processes, ExitStack() as ends:
        ray.init(address="local", num_cpus=SIZE + 6, include_dashboard=False, _node_ip_address="127.0.0.1")
        processes.watch_nodes(timeout_s)
        made = ends.enter_context(job(_clusters(), folder / "model", folder, timeouts=timeouts))
        _life(made, folder)


def _clusters() -> tuple[Any, Any]:
    sys.path.insert(0, SOURCE)
    from nemo_rl.distributed import ray_actor_environment_registry as registry
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster

    for name in (WORKER, ENGINE):
        registry.ACTOR_ENVIRONMENT_REGISTRY[name] = sys.executable
    trainers = RayVirtualCluster([SIZE], use_gpus=False, num_gpus_per_node=SIZE)
    return trainers, RayVirtualCluster([1], use_gpus=False, num_gpus_per_node=1, name="engines")


def _life(made: Any, folder: Path) -> None:
    """One step of a script, a save, and the end."""
    with made.driver.ending():
        made.generate()
        made.logprob()
        made.train()
        made.refit()
        made.save(folder)


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
