"""A job under Ray whose trainer ends in one way after the other; prints the verdict on each, a line of JSON."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import ray

from rl_safe_workers import env
from rl_safe_workers.adapters.driver_waits import Party
from rl_safe_workers.adapters.job_processes import ending_all_processes, folder_of
from rl_safe_workers.adapters.job_verdict import JobVerdict
from rl_safe_workers.adapters.rank_answers import listen
from rl_safe_workers.errors import JobError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.own_process import end_within
from rl_safe_workers.ranks import trainer_id

GREED_BYTES = 3 * 2**30
LIMIT_S = 400.0
"""Seconds for all ways, which take 40 on an idle machine. After them stderr gets the line of each thread."""


class Rank:
    """A trainer's actor."""

    def __init__(self, how: str) -> None:
        listen()
        if how == "import":
            import no_such_module  # noqa: F401

    def step(self, how: str) -> None:
        """Ends the process, or stays long enough for others to end it."""
        if how == "exit":
            sys.exit(3)
        if how == "asked":
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "crash":
            ctypes.string_at(0)
        if how == "abort":
            os.abort()
        kept = [bytearray(2**28) for _ in range(GREED_BYTES // 2**28)] if how == "greed" else []
        time.sleep(60 + len(kept))


def main(folder: str, *ways: str) -> None:
    """Starts Ray in a folder, and goes through the ways."""
    end_within(LIMIT_S)
    run_id = f"end{os.getpid():x}"
    hang_dir = folder_of(run_id)
    env.mark_run(run_id, hang_dir=hang_dir)
    variables = {
        env.RUN_ID: run_id,
        env.HANG_DIR: str(hang_dir),
        env.GLOBAL_RANK: "1",
        "PYTHONPATH": os.environ["PYTHONPATH"],
    }
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, runtime_env={"env_vars": variables})
    with ending_all_processes(run_id):
        for way in ways:
            actor = ray.remote(Rank).options(num_cpus=0).remote(way)
            party = Party("rank 1", trainer_id(1), actor, actor.step.remote)
            try:
                ray.get(actor.step.remote(way))
            except ray.exceptions.RayError as error:
                verdict = JobVerdict(lambda party=party: [party], Path(folder, f"of_{way}"))
                judged = verdict.on(error, Phase.TRAIN)
                fault = judged.fault if isinstance(judged, JobError) else None
                sys.stdout.write(json.dumps({"way": way, "fault": fault, "said": str(judged)}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
