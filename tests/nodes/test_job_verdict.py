"""The verdict on a job whose ranks are on several nodes, which cannot see each other's processes."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from rl_safe_workers import env
from tests.integration.runs import REPOSITORY
from tests.nodes.local_cluster import LocalCluster, SeparateMachines, local_cluster

NODES = 2
JOB = """
import json, os, sys, time
from pathlib import Path
import ray
from rl_safe_workers import env
from rl_safe_workers.adapters.driver_waits import Party
from rl_safe_workers.adapters.job_processes import folder_of, ending_all_processes
from rl_safe_workers.adapters.job_verdict import JobVerdict
from rl_safe_workers.adapters.rank_answers import listen
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id

def stand():
    time.sleep(1000)  # the line that the verdict names

class Rank:
    def __init__(self):
        listen()

    def step(self):
        stand()

    def is_well(self):
        return os.getpid()

run_id, ready, evidence, stop_limit_s = sys.argv[1:]
folder = folder_of(run_id)
env.mark_run(run_id, hang_dir=folder)
variables = {env.RUN_ID: run_id, env.HANG_DIR: str(folder), "PYTHONPATH": os.environ["PYTHONPATH"]}
ray.init(runtime_env={"env_vars": variables})
with ending_all_processes(run_id) as processes:
    processes.watch_nodes(float(stop_limit_s))
    here = ray.get_runtime_context().get_node_id()
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != here)
    place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    ranks = [
        ray.remote(Rank).options(
            num_cpus=0,
            scheduling_strategy=place(node["NodeID"], soft=False),
            runtime_env={"env_vars": {"RANK": str(rank)}},
        ).remote()
        for rank, node in enumerate(nodes)
    ]
    print(json.dumps({"pids": ray.get([rank.is_well.remote() for rank in ranks])}), flush=True)
    step = ranks[1].step.remote()
    time.sleep(2)
    parties = [Party(f"rank {i}", trainer_id(i), rank, rank.is_well.remote) for i, rank in enumerate(ranks)]
    Path(ready).touch()
    try:
        ray.get(step, timeout=15)
    except ray.exceptions.RayError as error:
        verdict = JobVerdict(lambda: parties, Path(evidence)).on(error, Phase.TRAIN)
        print(json.dumps({"node": nodes[1]["NodeManagerAddress"], "verdict": str(verdict)}), flush=True)
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[LocalCluster]:
    with local_cluster(NODES, kind=SeparateMachines) as cluster:
        yield cluster


def _strike(machines: LocalCluster, signum: signal.Signals, run_id: str) -> None:
    victims = []
    for process in machines.processes():
        with suppress(psutil.Error):  # it has ended
            variables = process.environ()
            if variables.get(env.RUN_ID) == run_id and variables.get(env.GLOBAL_RANK) == "1":
                victims.append(process)
    (victim,) = victims
    victim.send_signal(signum)


KILLED = r"training rank 1 on {node} died in phase train, last seen at \S+:\d+ \(stand\)$"
FOR_TOO_LONG = r"training rank 1 on {node} is stopped in phase train, last seen at \S+:\d+ \(stand\)$"


@pytest.mark.parametrize(
    ("signum", "stop_limit_s", "told"),
    [
        pytest.param(signal.SIGKILL, 0, KILLED, marks=pytest.mark.every_case),
        (signal.SIGSTOP, 0, r"training rank 1 on {node} is stopped in phase train(, last seen)? at \S+:\d+ \(stand\)$"),
        pytest.param(signal.SIGSTOP, 3, FOR_TOO_LONG, marks=pytest.mark.every_case),
    ],
    ids=["killed", "stopped", "stopped for too long"],
)
def test_a_rank_on_another_node_is_asked_there(signum, stop_limit_s, told, machines, tmp_path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    run_id = f"feed{signum.name.lower()}{stop_limit_s}"
    command = ["env", f"PYTHONPATH={REPOSITORY}", sys.executable, str(tmp_path / "job.py")]
    ready = tmp_path / "ready"  # a file, because Ray may show the job's output only at its end
    job = machines.submit(run_id, [*command, run_id, str(ready), str(tmp_path / "failure"), str(stop_limit_s)])
    job.wait_for(ready.exists, "the rank is in its step")
    _strike(machines, signum, run_id)
    assert job.finish() == 0, job.out
    assert ("was stopped (SIGSTOP) for 3 s: it is ended" in job.out) == (stop_limit_s > 0)
    said = json.loads(next(line for line in job.out.splitlines() if line.startswith('{"node"')))
    first, advice, folder = said["verdict"].splitlines()
    assert re.match(told.format(node=re.escape(said["node"])), first), first
    # Nobody tells SIGKILL from an exit: what that node knows has been looked at.
    assert ("its log ends without a word" in advice) is (signum == signal.SIGKILL)
    assert folder == f"evidence in {tmp_path / 'failure'}"
    assert (tmp_path / "failure" / "stack_trainer_1.txt").is_file()
    assert machines.left_of_runs() == []
