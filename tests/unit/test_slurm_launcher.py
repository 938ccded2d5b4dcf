"""The launcher for Slurm, really run: with stand-ins for Slurm's commands and Ray's on PATH."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.fake_slurm import NODES, SCRIPT, Batch


@pytest.fixture
def batches() -> Iterator[list[Batch]]:
    started: list[Batch] = []
    yield started
    for batch in started:
        # The group outlives the script if a stand-in does.
        with suppress(ProcessLookupError):
            os.killpg(batch.process.pid, signal.SIGKILL)
        batch.process.wait(10)


def test_the_batch_script_is_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=10)
    assert "\nset -euo pipefail\n" in SCRIPT.read_text()


def test_the_batch_starts_the_head_then_workers_then_the_run_and_stops_ray(
    tmp_path: Path, batches: list[Batch]
) -> None:
    batches.append(batch := Batch(tmp_path, "recipes/x.yaml", "trainer.seed=1"))
    batch.wait_for("running")
    batch.end_run("SUCCEEDED 0")
    assert batch.finish()[0] == 0
    starts, (submit, *stops) = batch.calls[:4], batch.calls[4:]
    assert starts[0].startswith(f"{NODES[0]}: ")
    assert sorted(line.split(":")[0] for line in starts) == NODES
    head, workers = starts[0], starts[1:]
    assert "--head --node-ip-address=10.0.0.1 --port=6379 --dashboard-host=127.0.0.1" in head
    assert [line for line in workers if "--address=10.0.0.1:6379" not in line or "--head" in line] == []
    assert [line for line in starts if f"--node-name={line.split(':')[0]}" not in line or "--block" not in line] == []
    assert {line.split(":")[1].strip() for line in starts} == {"token"}
    assert submit.startswith(
        "batch: ray job submit --no-wait --address http://127.0.0.1:8265 --submission-id rl-safe-7 "
    )
    assert "--working-dir . --runtime-env ray_configs/runtime_env.yaml -- " in submit
    assert submit.endswith("-- rl-safe run recipes/x.yaml trainer.seed=1")
    assert stops == ["all: ray stop"]
    assert (tmp_path / "asked").read_text() == "http://127.0.0.1:8265 rl-safe-7\n"


def test_the_batch_runs_the_recipe_for_four_nodes_if_none_is_named(tmp_path: Path, batches: list[Batch]) -> None:
    batches.append(batch := Batch(tmp_path))
    batch.wait_for("running")
    batch.end_run("SUCCEEDED 0")
    assert batch.finish()[0] == 0
    assert batch.calls[4].endswith("-- rl-safe run recipes/qwen3_30b_a3b_4x8.yaml")


@pytest.mark.parametrize(
    ("state", "expected"),
    [("SUCCEEDED 0", 0), ("FAILED 1", 1), ("FAILED 2", 2), ("FAILED None", 1), ("STOPPED None", 1)],
    ids=["well", "failed", "wrong input", "never ran", "stopped by somebody else"],
)
def test_the_batch_ends_with_the_exit_code_of_the_run(
    state: str, expected: int, tmp_path: Path, batches: list[Batch]
) -> None:
    batches.append(batch := Batch(tmp_path))
    batch.wait_for("running")
    batch.end_run(state)
    assert batch.finish()[0] == expected
    assert batch.calls[-1] == "all: ray stop"


def test_a_run_is_submitted_again_while_no_agent_takes_it(tmp_path: Path, batches: list[Batch]) -> None:
    batches.append(batch := Batch(tmp_path, NO_AGENT="at first"))
    batch.wait_for("running")
    batch.end_run("SUCCEEDED 0")
    assert batch.finish()[0] == 0
    assert sum("ray job submit" in call for call in batch.calls) == 2


def test_a_run_that_nobody_takes_is_given_up(tmp_path: Path, batches: list[Batch]) -> None:
    batches.append(batch := Batch(tmp_path, NO_AGENT="forever", SUBMIT_DEADLINE_S="1"))
    code, err = batch.finish()
    assert (code, "could not be submitted within 1 s" in err) == (1, True)
    assert batch.calls[-1] == "all: ray stop"


def test_a_log_that_breaks_off_does_not_end_the_run(tmp_path: Path, batches: list[Batch]) -> None:
    batches.append(batch := Batch(tmp_path, BROKEN_STREAM="yes"))
    batch.wait_for("broken")
    time.sleep(0.3)
    assert batch.process.poll() is None
    batch.end_run("FAILED 2")
    assert batch.finish()[0] == 2


def test_a_job_server_that_is_gone_is_not_asked_for_ever(tmp_path: Path, batches: list[Batch]) -> None:
    batches.append(batch := Batch(tmp_path, NO_ANSWER="yes"))
    batch.wait_for("running")
    batch.end_run("")
    code, err = batch.finish()
    assert (code, "does not answer any more" in err) == (1, True)


def test_a_node_that_does_not_come_is_named_at_the_deadline(tmp_path: Path, batches: list[Batch]) -> None:
    batches.append(batch := Batch(tmp_path, LATE_NODE="gpu-03", NODES_DEADLINE_S="8"))
    code, err = batch.finish()
    assert code == 1
    assert "not all of 4 nodes have joined after 8 s, missing: gpu-03;" in err
    assert "raise NODES_DEADLINE_S" in err
    assert not (tmp_path / "running").exists()
    assert batch.calls[-1] == "all: ray stop"


@pytest.mark.parametrize("node", [NODES[0], NODES[3]])
def test_a_node_whose_ray_does_not_start_is_not_waited_for(node: str, tmp_path: Path, batches: list[Batch]) -> None:
    batches.append(batch := Batch(tmp_path, BAD_NODE=node))
    began = time.monotonic()
    code, err = batch.finish()
    assert code == 1
    assert node in err
    assert time.monotonic() - began < 20
    assert not (tmp_path / "running").exists()


def test_a_signal_stops_the_job_before_ray(tmp_path: Path, batches: list[Batch]) -> None:
    batches.append(batch := Batch(tmp_path))
    batch.wait_for("running")
    batch.process.send_signal(signal.SIGTERM)
    code, err = batch.finish()
    assert (code, "asked to stop" in err) == (143, True)
    assert batch.calls[5:] == [
        "batch: ray job stop --address http://127.0.0.1:8265 rl-safe-7",
        "all: ray stop",
    ]


def test_a_signal_while_nodes_are_waited_for_ends_the_batch(tmp_path: Path, batches: list[Batch]) -> None:
    batches.append(batch := Batch(tmp_path, LATE_NODE="gpu-02"))
    batch.wait_for("joined")
    batch.process.send_signal(signal.SIGTERM)
    code, _ = batch.finish()
    assert code == 143
    assert not any("job" in call for call in batch.calls)
    assert "all: ray stop" in batch.calls
