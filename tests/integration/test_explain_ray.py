"""`rl-safe explain --ray` on the actors of a living job, without this package in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_safe_workers.diagnostics.ray_actors import choose
from rl_safe_workers.errors import UsageError

START = """
import asyncio, sys, threading, time
from pathlib import Path
import ray, torch, torch.distributed as dist
folder = Path(sys.argv[1])
ray.init(num_cpus=3, include_dashboard=False, _temp_dir=str(folder / "r"))

@ray.remote(num_cpus=0)
class Trainer:"""
JOB = """
    def start(self, rank):
        self.rank = rank
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
    def train(self):
        (folder / f"ready_{self.rank}").touch()
        if self.rank == 2:
            time.sleep(600)
        dist.all_reduce(torch.ones(2))
    OTHER_METHOD

@ray.remote(num_cpus=0)
class Reward:
    def __init__(self):
        threading.Thread(target=self.serve, daemon=True).start()
    def serve(self):
        time.sleep(600)
    def score(self):
        return 1

@ray.remote(num_cpus=0)
class Judge:
    async def compare(self):
        await asyncio.sleep(600)

trainers, reward, judge = [Trainer.remote() for _ in range(3)], Reward.remote(), Judge.remote()
judged = judge.compare.remote()
ray.get([reward.score.remote(), *(one.start.remote(rank) for rank, one in enumerate(trainers))])
called = [one.train.remote() for one in trainers[: int(sys.argv[2])]]
(folder / "address").write_text(ray.get_runtime_context().gcs_address)
time.sleep(600)
"""

IN_CONSTRUCTORS = """
    def __init__(self, rank):
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
        (folder / f"ready_{rank}").touch()
        if rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(2))

@ray.remote(num_cpus=99)
class Waiting: ...

trainers, waiting = [Trainer.remote(rank) for rank in range(2)], Waiting.remote()
(folder / "address").write_text(ray.get_runtime_context().gcs_address)
time.sleep(600)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, for Ray's sockets."""
    made = Path(tempfile.mkdtemp(prefix="e"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def explained(folder: Path, called: int, other_method: str = "", job_text: str = JOB) -> dict[str, Any]:
    """Starts a job that calls some of its trainers, and explains it."""
    (folder / "job.py").write_text(START + job_text.replace("OTHER_METHOD", other_method))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    quiet = subprocess.DEVNULL
    job = subprocess.Popen(
        [sys.executable, "job.py", str(folder), str(called)], cwd=folder, env=variables, stdout=quiet, stderr=quiet
    )
    try:
        deadline_s = time.monotonic() + 120
        while not (folder / "address").exists() or len(list(folder.glob("ready_*"))) < called:
            assert time.monotonic() < deadline_s, "the job does not start"
            time.sleep(0.2)
        time.sleep(2)
        address = (folder / "address").read_text()
        command = [sys.executable, "-m", "rl_safe_workers", "explain", "--ray", address, "--json", str(folder / "why")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode in (0, 1), result.stderr
        found: dict[str, Any] = json.loads((folder / "why").read_text())
        return found
    finally:
        for one in [*psutil.Process(job.pid).children(recursive=True), job]:
            one.kill()
        job.wait()


# With a coroutine among its methods, Ray runs all methods of an actor on a thread beside the main one. So are verl's.
@pytest.mark.parametrize(
    "other_method",
    ["", pytest.param("async def sync(self): ...", marks=pytest.mark.every_case)],
    ids=["of_methods", "of_coroutines"],
)
def test_the_actor_that_the_others_wait_for_is_named(folder: Path, other_method: str) -> None:
    found = explained(folder, 3, other_method)
    (culprit,) = found["culprits"]
    assert culprit.startswith("actor Trainer (process ")
    assert "job.py:16 (Trainer.train)" in found["verdict"]
    others = {row["who"].split()[1]: row["what"] for row in found["rows"] if not row["who"].startswith("actor Trainer")}
    assert others == {"Reward": "is in no call", "Judge": "waits in a coroutine, which is on no thread"}


@pytest.mark.every_case
def test_an_actor_that_nobody_has_called_is_named(folder: Path) -> None:
    found = explained(folder, called=2)
    assert found["cause"] == "actor not called"
    assert len(found["culprits"]) == 1


@pytest.mark.every_case
def test_a_constructor_that_the_others_wait_for_is_named(folder: Path) -> None:
    found = explained(folder, 2, job_text=IN_CONSTRUCTORS)
    (culprit,) = found["culprits"]
    assert culprit.startswith("actor Trainer (process ")
    assert "job.py:14 (Trainer.__init__)" in found["verdict"]
    assert found["notes"] == ["not looked at: actor Waiting is in state PENDING_CREATION"]


def row(pid: int, *, address: str = "127.0.0.1", state: str = "ALIVE", job: str = "01000000") -> dict[str, Any]:
    return {"ActorClassName": "A", "Address": {"IPAddress": address}, "Pid": pid, "State": state, "JobID": job}


def test_actors_that_cannot_be_looked_at_are_listed() -> None:
    chosen = choose([row(1, address="198.51.100.7"), row(2, address="198.51.100.7"), row(3, state="DEAD")], job=None)
    assert chosen.classes == {}
    assert list(chosen.notes) == [
        "dead: actor A (process 3 on node 127.0.0.1)",
        "not looked at: 2 actors on node 198.51.100.7; run `rl-safe explain --pid PID ...` there",
    ]
    with pytest.raises(UsageError, match="the jobs are 01000000"):
        choose([row(1)], job="02000000")
