"""The processes of a job of NeMo RL's end with it, on every node, however it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.runs import REPOSITORY, Running, running
from tests.nemo_rl.source import write_source
from tests.nodes.local_cluster import LocalCluster, SeparateMachines, local_cluster

SAFE = REPOSITORY / "recipes" / "nemo_rl" / "run_grpo_safe.py"
NODES = 2
ENDS_S = 40.0
LEFTOVER = "a_process_that_nobody_knows"
SCRIPT = f'''
import os, shlex, subprocess, sys, time
from types import SimpleNamespace
import ray

HELPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"

@ray.remote(num_cpus=0)
class Worker:
    """A worker whose library starts a process that is no child of it: Ray ends the children of its workers."""
    def start(self):
        command = shlex.join([sys.executable, "-c", HELPER, "{LEFTOVER}"])
        subprocess.run(["sh", "-c", command + " >/dev/null 2>&1 &"], start_new_session=True, check=True)

def init_ray():
    # As NeMo RL's (distributed/virtual_cluster.py:306).
    runtime_env = {{"env_vars": dict(os.environ)}}
    if "RAY_ADDRESS" in os.environ:
        ray.init(runtime_env=runtime_env)
    else:
        ray.init("local", runtime_env=runtime_env, num_cpus=2, include_dashboard=False)

def setup(config, tokenizer, dataset, val_dataset):
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    workers = [Worker.options(scheduling_strategy=place(node, soft=False)).remote() for node in nodes]
    ray.get([worker.start.remote() for worker in workers])
    return workers

def main():
    init_ray()
    config = SimpleNamespace(rl_safe={{"enabled": False}})
    tokenizer = dataset = val_dataset = None
    workers = setup(config, tokenizer, dataset, val_dataset)
    print("the workers have started", flush=True)
    if sys.argv[1:] == ["fail"]:
        raise RuntimeError("the reward is not finite")
    time.sleep(1000)

if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose example script starts workers on every node, as far as processes go."""
    root = write_source(tmp_path_factory.mktemp("nemo-rl"))
    (root / "examples" / "run_grpo.py").write_text(SCRIPT)
    return root


@pytest.fixture(scope="module")
def machines() -> Iterator[LocalCluster]:
    with local_cluster(NODES, kind=SeparateMachines) as cluster:
        yield cluster


def has_helpers(processes: Sequence[psutil.Process]) -> int:
    found = 0
    for process in processes:
        with suppress(psutil.Error):
            found += process.cmdline()[-1:] == [LEFTOVER]
    return found


def _command(source: Path, script: Path, *arguments: str) -> list[str]:
    return ["env", f"NEMO_RL_SRC={source}", sys.executable, str(script), *arguments]


def _gone_after(cluster: LocalCluster, seconds: float) -> float:
    """Returns how long it takes until nothing of a job is left on any node."""
    started_s = time.monotonic()
    while (left := cluster.left_of_runs()) and time.monotonic() < started_s + seconds:
        time.sleep(0.2)
    assert left == []
    assert has_helpers(cluster.processes()) == 0
    return time.monotonic() - started_s


@pytest.mark.every_case
def test_without_us_a_failed_job_leaves_processes_on_every_node(machines, source) -> None:
    job = machines.submit("stock", _command(source, source / "examples" / "run_grpo.py", "fail"))
    assert job.finish() != 0
    assert "the reward is not finite" in job.out
    time.sleep(5.0)
    left = [process for process in machines.processes() if has_helpers([process])]
    assert len(left) == NODES
    for process in left:
        process.kill()


def test_a_job_that_fails_leaves_nothing_on_any_node(machines, source) -> None:
    job = machines.submit("fails", _command(source, SAFE, "fail"))
    assert job.finish() != 0
    assert "the reward is not finite" in job.out
    _gone_after(machines, 5.0)


@pytest.mark.every_case
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_job_that_is_stopped_or_whose_driver_is_killed_leaves_nothing_on_any_node(how, machines, source) -> None:
    job = machines.submit(how, _command(source, SAFE))
    job.wait_for(lambda: has_helpers(machines.processes()) == NODES, "its workers have started")
    if how == "stopped":
        job.stop()
    else:
        (driver,) = [process for process in machines.processes() if _is_driver(process)]
        driver.kill()
    job.finish()
    _gone_after(machines, ENDS_S)


def _is_driver(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.cmdline()[:2] == [sys.executable, str(SAFE)]
    return False


def _left_after(run: Running, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while (found := run.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [" ".join(process.cmdline())[:100] for process in found]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster that a job would join."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.every_case
@pytest.mark.usefixtures("alone")
def test_a_job_with_a_ray_of_its_own_that_fails_leaves_nothing(source, tmp_path) -> None:
    with running(_command(source, SAFE, "fail"), tmp_path / "job") as run:
        outcome = run.finish()
        assert _left_after(run, 0) == []
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1] == "RuntimeError: the reward is not finite"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGTERM,
        *(pytest.param(number, marks=pytest.mark.every_case) for number in (signal.SIGINT, signal.SIGKILL)),
    ],
    ids=lambda signum: signum.name,
)
def test_a_job_with_a_ray_of_its_own_that_is_stopped_or_killed_leaves_nothing(signum, source, tmp_path) -> None:
    with running(_command(source, SAFE), tmp_path / "job") as run:
        run.wait_until(lambda: "the workers have started" in run.out)
        os.kill(run.process.pid, signum)
        code = run.process.wait(ENDS_S)
        # What a killed driver leaves, its guardian ends.
        assert _left_after(run, ENDS_S if signum is signal.SIGKILL else 5.0) == []
        said = run.err
    assert code == (-signum if signum is signal.SIGKILL else 128 + signum)
    if signum is not signal.SIGKILL:
        assert f"rl_safe: stopped by {signum.name}; what was started has ended" in said
