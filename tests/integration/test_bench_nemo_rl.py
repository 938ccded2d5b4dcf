"""The benchmark of NeMo RL's script over a small script in its place: jobs, records, faults, turns and rows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from benchmarks import host_meter, nemo_rl, nemo_rl_meter
from benchmarks.nemo_rl_jobs import START, Job, module_search_path, own_place, run_jobs
from benchmarks.nemo_rl_meter import OURS, SAVE, SIDE, STOCK, TRAIN
from benchmarks.table import Row

SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path

from benchmarks import host_meter, nemo_rl_meter

given = dict(word.lstrip("+").split("=", 1) for word in sys.argv[3:])


class Host:
    def train(self):
        time.sleep(0.01)


class Worker(Host):
    def world(self): ...

    def train(self):
        time.sleep(0.02)
        super().train()


class Driver:
    def step(self):
        Worker.now.train()


host_meter.watch(Worker, "world", nemo_rl_meter.WORLD)
host_meter.watch(Worker, "train", nemo_rl_meter.TRAIN)
if os.environ[nemo_rl_meter.SIDE] == nemo_rl_meter.OURS:
    host_meter.watch(Host, "train", nemo_rl_meter.inside(nemo_rl_meter.TRAIN), memory=False)
host_meter.watch(Driver, "step", nemo_rl_meter.REFIT)
if "rl_safe.prove_sync_freq" in given:
    host_meter.watch(Driver, "step", nemo_rl_meter.PROVED_REFIT, memory=False)
host_meter.take_turns(Driver, "step")
Worker.now = Worker()
Worker.now.world()
logs = Path(given["logger.log_dir"]) / "exp_001"
logs.mkdir(parents=True, exist_ok=True)
first = len(list(logs.glob("*.jsonl")))
for step in range(first, int(given.get("grpo.max_num_steps", 5))):
    Driver().step()
    row = {"rewards": [0.1 * step], "generation_logprobs": [[0.0, -1.0, -2.0]], "prev_logprobs": [[0.0, -1.5, -2.0]],
           "token_loss_mask": [[0, 1, 1]]}
    (logs / f"train_data_step{step + 1}.jsonl").write_text(json.dumps(row) + "\\n")
print("(worker) rank 0: the bootstrap has missed x took 12 MiB of device memory; y took 3 MiB of device memory")
print("\\x1b[36m(worker pid=3)\\x1b[0m ValueError: rank 1 is lost")
if os.environ.get("LEAVE_ONE"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    examples = tmp_path / "source" / "examples"
    examples.mkdir(parents=True)
    (examples / "run_grpo.py").write_text(SCRIPT)
    monkeypatch.setenv("NEMO_RL_SRC", str(examples.parent))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("benchmarks.nemo_rl_jobs.RECIPES", tmp_path / "recipes")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "run_grpo_safe.py").write_text(SCRIPT)
    return tmp_path


def _quiet(line: str) -> None: ...


def _by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


@pytest.mark.every_case
def test_jobs_of_two_benchmarks_have_different_ports() -> None:
    code = "from benchmarks.nemo_rl_jobs import own_place\nwith own_place() as place:\n    print(place)"
    for _ in range(2):
        with own_place() as mine, own_place() as other:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONPATH": module_search_path()},
                capture_output=True,
                text=True,
                check=True,
            )
            assert len({mine, other, int(done.stdout)}) == 3


@pytest.mark.every_case
def test_a_placement_is_run_and_resumed(source: Path) -> None:
    lines: list[str] = []
    part: Callable[..., list[Row]] = nemo_rl.PARTS["apart"]
    rows = _by_name(part(source, source / "out", lines.append))
    name = nemo_rl.APART
    assert rows[f"{name}: steps"].ours == nemo_rl.PLAIN_STEPS
    assert rows[f"{name}: late bytes of communicators"].ours == 15
    assert rows[f"{name}: mean reward"].ratio == pytest.approx(1)
    assert rows[f"{name}: mean logprob gap"].ours == pytest.approx(0.25)
    assert rows[f"{name}: processes left"].met
    assert rows[f"{name}, resumed, ours: updates"].ours == nemo_rl.RESUMED_STEPS - nemo_rl.PLAIN_STEPS
    assert rows[f"{name}, resumed, stock: last step"].met
    assert any("ValueError: rank 1 is lost" in line for line in lines)
    assert len(list((source / "out").glob("*.tar.gz"))) == 2


@pytest.mark.every_case
def test_steps_are_compared_in_turns(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo_rl, "_make_model", lambda *_: None)
    rows = _by_name(nemo_rl.PARTS["steps-apart"](source, source / "out", _quiet))
    name, ratios = f"{nemo_rl.APART}: {TRAIN}", f"median of {nemo_rl.MEASURED_STEPS} ratios"
    assert rows[f"{name}, {ratios}"].ours == pytest.approx(1, abs=0.5)
    assert rows[f"{name}, the host's method, {ratios}"].ours == pytest.approx(1 / 3, abs=0.2)
    assert rows[f"{name}, ours, outside of the host's method, median"].ours == pytest.approx(20, abs=10)


@pytest.mark.parametrize(
    ("part", "transport", "memory_gib", "size"), [("refits", "host", 139, "5 B"), ("joint-refits", "joint", 79, "3 B")]
)
def test_proved_refits_are_compared_with_others(
    source: Path, monkeypatch: pytest.MonkeyPatch, part: str, transport: str, memory_gib: int, size: str
) -> None:
    monkeypatch.setattr(nemo_rl, "_make_model", lambda *_: None)
    monkeypatch.setattr(nemo_rl, "gpu_bytes", lambda: memory_gib * 2**30)
    model = source / size.replace(" ", "_") / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(bytes(2**20))
    rows = _by_name(nemo_rl.PARTS[part](source, source / "out", _quiet))
    name = f"refits of {size}, apart, {transport}"
    assert rows[f"{name}: exit code"].met
    assert rows[f"{name}: a proved one, against another"].ratio == pytest.approx(1, abs=0.5)
    assert 0 < rows[f"{name}: rate of one that is not proved"].ours < 2**-10 / 0.03


def test_a_fault_is_timed_from_outside(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nemo_rl.FAULTS, "step", f"{TRAIN}:3:0:kill")
    rows = _by_name(nemo_rl.run_faults(["step"], source, source / "out", _quiet))
    name = f"step ({TRAIN}:3:0:kill)"
    assert rows[f"{name}, ours: ended after"].ours < 5
    assert rows[f"{name}, ours: exit code"].met
    assert not rows[f"{name}, ours: names rank 1"].met
    assert rows[f"{name}, ours: processes left"].met
    assert f"{name}, stock: ended after, 120: cut" in rows


@pytest.mark.every_case
def test_a_fault_that_does_not_happen_is_missed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nemo_rl.FAULTS, "step", f"{TRAIN}:300:0:kill")
    rows = nemo_rl.run_faults(["step"], source, source / "out", _quiet)
    assert [row.met for row in rows] == [False, False]


@pytest.mark.parametrize("side", [OURS, pytest.param(STOCK, marks=pytest.mark.every_case)])
def test_a_process_that_stays_is_named_and_ended(source: Path, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    monkeypatch.setenv("LEAVE_ONE", "1")
    (run,) = run_jobs([Job(name="x", side=side, recipe="tiny", folder=source)], limit_s=60)
    assert run.exit_code == 0
    assert len(run.left) == 1
    assert "time.sleep(60)" in run.left[0]
    assert run.was_cut


ACTORS = """
import ray, torch


class Implementation:
    def __init__(self):
        self.model = torch.nn.Linear(2, 2)

    def train(self): ...
    def get_logprobs(self): ...
    def save_checkpoint(self): ...
    def broadcast_weights_for_collective(self): ...
    def stream_weights_via_ipc_zmq(self): ...


# As NeMo RL does: Ray then pickles the class itself, and not its name.
@ray.remote(num_cpus=0)
class MegatronPolicyWorker(Implementation): ...


class Mixin:
    def train(self):
        super().train()


@ray.remote(num_cpus=0)
class SafeMegatronPolicyWorker(Mixin, Implementation): ...
"""
JOB_WITH_ACTOR = """
import actors, ray, sys

ray.init(num_cpus=1, include_dashboard=False)
worker = getattr(actors, sys.argv[1]).options(runtime_env={"env_vars": {"RANK": "0"}}).remote()
ray.get([worker.train.remote(), worker.train.remote(), worker.save_checkpoint.remote()])
ray.shutdown()
"""


@pytest.mark.parametrize(
    ("side", "worker", "inner"),
    [
        pytest.param(STOCK, "MegatronPolicyWorker", [], marks=pytest.mark.every_case),
        (OURS, "SafeMegatronPolicyWorker", [nemo_rl_meter.inside(TRAIN)]),
    ],
)
def test_calls_of_an_actor_are_recorded_in_its_process(
    tmp_path: Path, side: str, worker: str, inner: list[str]
) -> None:
    (tmp_path / "actors.py").write_text(ACTORS)
    (tmp_path / "job.py").write_text(JOB_WITH_ACTOR)
    records = tmp_path / "records"
    records.mkdir()
    search = os.pathsep.join([str(tmp_path), module_search_path(START)])
    variables = {**os.environ, "PYTHONPATH": search, host_meter.FOLDER: str(records), SIDE: side}
    subprocess.run([sys.executable, str(tmp_path / "job.py"), worker], env=variables, check=True, timeout=120)
    calls = [(call.name, call.call, call.rank) for call in host_meter.read_calls(records)]
    trained = [(name, number, 0) for number in (0, 1) for name in (TRAIN, *inner)]
    assert calls == [*trained, (SAVE, 0, 0)]
    (digests,) = records.glob("digests-0-0.json")
    assert len(digests.read_text()) > 128


def test_a_policy_worker_sees_the_gpus_before_its_own() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "2,3", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    nemo_rl_meter.see_earlier_gpus(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_an_engine_sees_only_its_own_gpu() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "3"}
    nemo_rl_meter.see_earlier_gpus(environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "3"}
