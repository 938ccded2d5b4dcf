"""Runs that are submitted as jobs to a Ray cluster of three nodes on this machine."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role
from tests.chaos.plan import VARIABLE, Fault, Kind, Point, to_json
from tests.integration.runs import RECIPES, REPOSITORY, Outcome
from tests.nodes.local_cluster import Job, LocalCluster, environment_file
from tests.nodes.slow_reward import STRUCK

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.timeout(400)
RUNTIME_ENV = REPOSITORY / "ray_configs" / "runtime_env.yaml"
TIMEOUT_S, START_TIMEOUT_S = 8.0, 60.0
"""Timeouts of the phase that something happens in, and of the start."""
NOTICED_LATER = {Phase.ROLLOUT: Phase.ONLOAD, Phase.REWARD: Phase.ONLOAD}
"""When the loss of idle trainers shows, unless Ray notices it before."""
SLACK_S = 10.0
HEAD, OTHER, LAST = 0, 1, 2
SPREAD = (
    "cluster.cpus_per_trainer=1",
    "cluster.cpus_per_rollout=1",
    "data.train_batch_size=4",
    "data.max_response_length=8",
    "rollout.n=2",
    "actor.ppo_micro_batch_size_per_gpu=1",
    "trainer.total_training_steps=3",
)
"""Two trainers on each of the first two nodes, the rollout rank on the third."""


def report_form(report: str) -> list[str]:
    """A report's headings and the names of its figures."""
    return [heading or name for heading, name in re.findall(r"<h[23][^>]*>(.*?)</h|<(?:th|dt)[^>]*>(.*?)</", report)]


def test_the_quickstart_runs_as_a_job_as_it_does_directly(
    three_nodes: LocalCluster, moe_model: Path, quickstart: Outcome
) -> None:
    """The README's command, but for steps, the model that is there already, and saves as in the direct run."""
    name = f"quickstart_{uuid.uuid4().hex[:6]}"
    command = ["rl-safe", "run", "recipes/quickstart.yaml", f"model.path={moe_model}", "trainer.save_freq=4"]
    more = ["trainer.total_training_steps=10", "rl_safe.checkpoint.async_save=true", "rl_safe.checkpoint.digest=true"]
    job = three_nodes.submit(name, [*command, *more], "--working-dir", ".", "--runtime-env", str(RUNTIME_ENV))
    # It streams while the job runs.
    job.wait_for(lambda: "step  1/10" in job.out, "the first step in the log")
    assert job.finish() == 0, job.out[-3000:]
    assert job.status == "SUCCEEDED"
    base = Path(yaml.safe_load(RUNTIME_ENV.read_text())["env_vars"]["RL_SAFE_BASE_DIR"].replace("${HOME}", "home"))
    (run_dir,) = (three_nodes.folder / base / "outputs").iterdir()
    direct = quickstart.run_dir
    assert {file.name for file in run_dir.iterdir()} == {file.name for file in direct.iterdir()}
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record.keys() for record in records] == [record.keys() for record in quickstart.records]
    assert [r["reward/mean"] for r in records] == [r["reward/mean"] for r in quickstart.records]
    assert report_form((run_dir / "report.html").read_text()) == report_form((direct / "report.html").read_text())
    checkpoints = {path.name for path in (three_nodes.folder / base / "checkpoints" / "quickstart").iterdir()}
    assert {"global_step_8", "global_step_10"} <= checkpoints
    assert three_nodes.left_of_runs() == []


@pytest.fixture(autouse=True)
def no_job_is_left(three_nodes: LocalCluster) -> Iterator[None]:
    """A test that fails leaves its places to the next one."""
    yield
    three_nodes.end_jobs()


def start(
    cluster: LocalCluster, moe_model: Path, folder: Path, fault: Fault, *overrides: str, phase: Phase | None
) -> Job:
    """Submits a run in which a rank stops at some point, and waits until it has."""
    name = f"run_{uuid.uuid4().hex[:8]}"
    base = folder / "base"
    variables = {VARIABLE: to_json(fault).replace('"', '\\"'), "RL_SAFE_BASE_DIR": str(base)}
    variables |= {"RAY_JOB_STOP_WAIT_TIME_S": "60", STRUCK: str(fault.struck)}
    recipe = str(RECIPES / "quickstart.yaml")
    timeout = [] if phase is None else [f"rl_safe.timeouts.{phase}={timeout_of(phase)}"]
    if fault.phase is Phase.REWARD:
        timeout.append("reward.function=tests.nodes.slow_reward:reward")
    job = cluster.submit(
        name,
        [
            *("python", "-m", "tests.chaos.command", "run", recipe, f"model.path={moe_model}"),
            *(*SPREAD, "trainer.save_freq=2", *timeout, *overrides),
        ],
        *("--runtime-env", str(environment_file(folder, variables))),
    )
    job.wait_for(fault.struck.exists, "the fault")
    return job


def timeout_of(phase: Phase) -> float:
    """Start-up imports torch and vLLM, and is given the time for it."""
    return START_TIMEOUT_S if phase is Phase.START else TIMEOUT_S


def seconds_since(fault: Fault) -> float:
    return time.time() - float(fault.struck.read_text())


def error_of(job: Job) -> str:
    """The one line in which a run says why it has failed, which `ray job submit` shows once more at its end.

    Without the id that tells a node from the one before it at its address, which Ray takes for alive a while longer.
    """
    (line,) = {*re.findall(r"^rl-safe: error: (.*)$", job.out, re.MULTILINE)}
    return re.sub(r"([\d.]+), [0-9a-f]{8} \(\1\)", r"\1", line)


def fault_in(phase: Phase, folder: Path, *, role: Role, rank: int, kind: Kind = Kind.STALL) -> Fault:
    inside = phase in (Phase.TRAIN, Phase.SAVE, Phase.CONVERT, Phase.BOOTSTRAP)
    point = Point.INSIDE if inside else Point.BOUNDARY
    return Fault(kind=kind, role=role, rank=rank, phase=phase, point=point, folder=str(folder))


PHASES = [phase for phase in Phase if phase is not Phase.LOAD]
"""A run that does not resume loads nothing."""


@pytest.mark.every_case
@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_a_job_that_is_stopped_ends_as_a_run_that_is_interrupted(
    phase: Phase, three_nodes: LocalCluster, moe_model: Path, tmp_path: Path
) -> None:
    fault = fault_in(phase, tmp_path, role=Role.TRAINER, rank=3)
    job = start(three_nodes, moe_model, tmp_path, fault, phase=None)
    job.stop()
    job.finish()
    seconds = seconds_since(fault)
    assert job.status == "STOPPED"
    assert error_of(job) == "interrupted by SIGTERM"
    (report,) = tmp_path.glob("base/outputs/*/report.html")
    assert "failed: interrupted by SIGTERM" in report.read_text()
    assert three_nodes.left_of_runs() == []
    logger.info("stopped in %s: ended after %.1f s", phase, seconds)
    assert seconds < TIMEOUT_S + SLACK_S


@pytest.mark.every_case
def test_a_rank_that_hangs_is_found_where_it_is_on_whichever_node(
    three_nodes: LocalCluster, mended: Callable[[], None], moe_model: Path, tmp_path: Path
) -> None:
    mended()
    fault = fault_in(Phase.TRAIN, tmp_path, role=Role.TRAINER, rank=3)
    job = start(three_nodes, moe_model, tmp_path, fault, phase=Phase.TRAIN)
    assert job.finish() == 1
    (line,) = {*re.findall(r"^hang: .*$", job.out, re.MULTILINE)}
    address = re.escape(three_nodes.address(OTHER))
    assert re.match(
        r"hang: phase train, the trainers, \w+ of \w+: 0-2 arrived, 3 did not within [\d.]+ s; "
        rf"training rank 3 on {address} is at \S*tests/chaos/striker\.py:\d+ \(_strike\); evidence in \S+/hang",
        line,
    ), line
    (evidence,) = tmp_path.glob("base/outputs/*/hang")
    stacks = {f"stack_trainer_{rank}.txt" for rank in range(4)} | {"stack_rollout_0.txt"}
    assert {path.name for path in evidence.iterdir()} == {
        "verdict.json",
        *stacks,
        *(f"flight_gloo_{rank}" for rank in range(4)),
    }
    assert all("most recent call first" in (evidence / name).read_text() for name in stacks)
    actors = json.loads((evidence / "verdict.json").read_text())["actors"]
    assert [actor["node"] for actor in actors] == [three_nodes.address(n) for n in (HEAD, HEAD, OTHER, OTHER, LAST)]
    for node in (HEAD, OTHER, LAST):
        logs = list((evidence.parent / "ray_logs" / three_nodes.address(node)).glob("worker-*.err"))
        here = [str(actor["pid"]) for actor in actors if actor["node"] == three_nodes.address(node)]
        assert {log.stem.rpartition("-")[2] for log in logs} >= {*here}
        assert all(log.read_text() for log in logs)
    assert three_nodes.left_of_runs() == []


@pytest.mark.every_case
@pytest.mark.parametrize("kind", [Kind.STOP, Kind.KILL])
def test_an_engine_that_is_lost_on_another_node_is_replaced_there(
    kind: Kind, three_nodes: LocalCluster, mended: Callable[[], None], moe_model: Path, tmp_path: Path
) -> None:
    """The run waits for the new engine: it has no other."""
    mended()
    fault = fault_in(Phase.ROLLOUT, tmp_path, role=Role.ROLLOUT, rank=0, kind=kind)
    more = ("rollout.replace_lost_engines=1", "rl_safe.timeouts.stopped=2")
    job = start(three_nodes, moe_model, tmp_path, fault, *more, phase=None)
    assert job.finish() == 0, job.out[-3000:]
    (written,) = tmp_path.glob("base/outputs/*/metrics.jsonl")
    records = [json.loads(line) for line in written.read_text().splitlines()]
    assert [record["engines/lost"] for record in records] == [1, 0, 0]
    assert records[-1]["engines/serving"] == 1
    assert records[0]["sync/proved"] > 0
    assert records[-1]["rl_safe/comms_late"] == 0
    assert three_nodes.left_of_runs() == []


@pytest.mark.every_case
def test_nothing_outlives_a_job_whose_driver_was_killed(
    three_nodes: LocalCluster, mended: Callable[[], None], moe_model: Path, tmp_path: Path
) -> None:
    mended()
    fault = fault_in(Phase.TRAIN, tmp_path, role=Role.TRAINER, rank=3)
    job = start(three_nodes, moe_model, tmp_path, fault, phase=None)
    # Not the shell that Ray has started it in, nor `ray job submit`, which was told the same words.
    (driver,) = [p for p in three_nodes.processes() if p.cmdline()[1:3] == ["-m", "tests.chaos.command"]]
    driver.kill()
    assert job.finish() == 1
    assert job.status == "FAILED"
    three_nodes.wait_until(lambda: not three_nodes.left_of_runs(), "nothing is left", timeout_s=30)


@pytest.fixture
def mended(three_nodes: LocalCluster) -> Callable[[], None]:
    """Gives the cluster back the nodes that a test has lost."""

    def mend() -> None:
        for node in {OTHER, LAST} - {*three_nodes.nodes}:
            three_nodes.add_node(node)

    return mend


@pytest.mark.parametrize(
    "phase",
    [pytest.param(p, id=str(p), marks=() if p is Phase.SAVE else pytest.mark.every_case) for p in PHASES],
)
def test_a_node_that_is_lost_is_named_and_the_run_ends(
    phase: Phase, three_nodes: LocalCluster, mended: Callable[[], None], moe_model: Path, tmp_path: Path
) -> None:
    mended()
    fault = fault_in(phase, tmp_path, role=Role.TRAINER, rank=3)
    job = start(three_nodes, moe_model, tmp_path, fault, phase=phase)
    lost_at = time.monotonic()
    three_nodes.kill_node(OTHER)
    assert job.finish() == 1, job.out[-3000:]
    seconds = time.monotonic() - lost_at
    assert job.status == "FAILED"
    named = f": node {three_nodes.address(OTHER)} is lost, and with it training rank 2-3 ("
    expected = tuple(f"phase {noticed}{named}" for noticed in (phase, NOTICED_LATER.get(phase, phase)))
    assert error_of(job).startswith(expected), error_of(job)
    logger.info("lost in %s: ended after %.1f s", phase, seconds)
    assert seconds < timeout_of(phase) + SLACK_S
    assert three_nodes.left_of_runs() == []
    mended()


@pytest.mark.every_case
def test_a_run_that_may_start_again_goes_on_without_the_node(
    three_nodes: LocalCluster, mended: Callable[[], None], moe_model: Path, tmp_path: Path
) -> None:
    """It waits for a node in the place of the lost one, and goes on from its checkpoint."""
    mended()
    fault = fault_in(Phase.TRAIN, tmp_path, role=Role.TRAINER, rank=3)
    object.__setattr__(fault, "occurrence", 3)
    job = start(three_nodes, moe_model, tmp_path, fault, "rl_safe.restarts=1", phase=Phase.TRAIN)
    three_nodes.kill_node(OTHER)
    job.wait_for(lambda: "restart 1 of 1" in job.out, "the restart")
    three_nodes.add_node(OTHER)
    assert job.finish() == 0, job.out[-3000:]
    words = " ".join(job.out.split())
    assert f"global_step_2, after: phase train: node {three_nodes.address(OTHER)} is lost" in words
    (records,) = tmp_path.glob("base/outputs/*/metrics.jsonl")
    assert [json.loads(line)["step"] for line in records.read_text().splitlines()] == [1, 2, 3]
    assert three_nodes.left_of_runs() == []


def refused(cluster: LocalCluster, moe_model: Path, folder: Path, *overrides: str) -> str:
    """Runs a job that must fail before it has an actor; returns its error."""
    variables = {"RL_SAFE_BASE_DIR": str(folder)}
    command = [sys.executable, "-m", "rl_safe_workers", "run", str(RECIPES / "quickstart.yaml"), *SPREAD]
    job = cluster.submit(
        f"refused_{uuid.uuid4().hex[:8]}",
        [*command, f"model.path={moe_model}", *overrides],
        *("--runtime-env", str(environment_file(folder, variables))),
    )
    assert job.finish() == 1, job.out[-3000:]
    assert job.status == "FAILED"
    assert cluster.left_of_runs() == []
    return error_of(job)


@pytest.mark.every_case
def test_too_few_nodes_are_refused_with_what_is_missing(
    three_nodes: LocalCluster, mended: Callable[[], None], moe_model: Path, tmp_path: Path
) -> None:
    mended()
    error = refused(three_nodes, moe_model, tmp_path, "cluster.num_rollouts=4")
    assert error.startswith(
        "the run needs 8 CPUs, the cluster has 6 CPUs and 0 GPUs on 3 nodes: no room for 2 rollout ranks (1 CPU each);"
    )
    error = refused(three_nodes, moe_model, tmp_path, "cluster.device=cuda", "model.dtype=bfloat16")
    assert "no room for 4 trainers (1 CPU and 1 GPU each) and 1 rollout ranks (1 CPU and 1 GPU each)" in error


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("rl_safe_workers/more.py", r"runs other code of rl_safe_workers \(\w{12}, the driver \w{12}\)"),
        # A module by the package's name, which hides the one that is installed.
        ("rl_safe_workers.py", r"has no rl_safe_workers \(install the wheel there, or submit the job with .*\)"),
    ],
    ids=["other_code", "none"],
)
def test_a_node_without_the_driver_s_package_is_named(
    three_nodes: LocalCluster, mended: Callable[[], None], moe_model: Path, tmp_path: Path, file: str, complaint: str
) -> None:
    mended()
    package = tmp_path / file
    if package.parent != tmp_path:
        shutil.copytree(REPOSITORY / "rl_safe_workers", package.parent)
    package.write_text("")
    three_nodes.kill_node(LAST)
    three_nodes.wait_until(lambda: three_nodes.living() == 2, "Ray has noticed")
    three_nodes.add_node(LAST, python_path=tmp_path)
    error = refused(three_nodes, moe_model, tmp_path)
    named = f"the nodes of the cluster differ: {three_nodes.address(LAST)} "
    assert re.match(rf"{named}{complaint}$", error), error
    three_nodes.kill_node(LAST)
    mended()


def test_the_doctor_connects_the_groups_on_every_node(
    three_nodes: LocalCluster, mended: Callable[[], None], tmp_path: Path
) -> None:
    """A live bootstrap needs no model, and makes none."""
    mended()
    command = [sys.executable, "-m", "rl_safe_workers", "doctor", str(RECIPES / "quickstart.yaml"), *SPREAD, "--live"]
    variables = {"RL_SAFE_BASE_DIR": str(tmp_path)}
    environment = environment_file(tmp_path, variables)
    job = three_nodes.submit(f"doctor_{uuid.uuid4().hex[:8]}", command, "--runtime-env", str(environment))
    assert job.finish() == 0, job.out[-3000:]
    assert "4 ranks, 8 groups each" in job.out
    assert list(tmp_path.iterdir()) == [environment]
    assert three_nodes.left_of_runs() == []


def test_an_address_that_does_not_answer_is_named_within_the_timeout(
    three_nodes: LocalCluster, moe_model: Path, tmp_path: Path
) -> None:
    nobody = f"{three_nodes.address(7)}:6379"
    error = refused(three_nodes, moe_model, tmp_path, f"cluster.ray_address={nobody}", "rl_safe.timeouts.start=3")
    assert re.match(
        rf"phase start: joining the Ray cluster did not finish within 3.0 s \({nobody}, of cluster", error
    ), error
