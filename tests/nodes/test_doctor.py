"""``rl-safe doctor`` as a user starts it, on this machine as it is and with one thing wrong at a time."""

from __future__ import annotations

import json
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rl_safe_workers import env
from rl_safe_workers.doctor.ray_cluster import DEADLINE_S
from tests.integration.runs import RECIPES, Outcome, Running, finish, running


def doctor(recipe: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "rl_safe_workers", "doctor", str(RECIPES / recipe), *arguments]


def examined(folder: Path, recipe: str, *arguments: str) -> Outcome:
    return finish(doctor(recipe, *arguments), folder)


def stopping(outcome: Outcome) -> dict[str, str]:
    return {item["code"]: item["text"] for item in json.loads(outcome.out)["findings"] if item["severity"] == "stops"}


def test_the_quickstart_would_run_here_and_its_groups_connect_before_there_is_a_model(tmp_path: Path) -> None:
    outcome = examined(tmp_path, "quickstart.yaml", "--live")
    assert (outcome.code, outcome.left) == (0, []), outcome.err
    assert "4 ranks, 8 groups each" in outcome.out
    for group in ("EXPERT_DATA_PARALLEL_GROUP", "WORLD", "EXPERT_MODEL_PARALLEL_GROUP"):
        (line, *_) = [line for line in outcome.out.splitlines() if f" {group} " in line]
        _, _, _, _, seconds, *_ = line.split("│")
        assert float(seconds) >= 0
    assert "not predicted: the model is not there yet" in outcome.out
    assert "✓ bootstrap" in outcome.err
    assert list(tmp_path.iterdir()) == []


def trainers(run: Running) -> dict[str, psutil.Process]:
    """The trainers that have started to import, by rank."""
    found = {}
    for process in run.processes():
        with suppress(psutil.Error):
            if "Trainer" in " ".join(process.cmdline()) and (rank := process.environ().get(env.RANK)):
                found[rank] = process
    return found


def test_a_rank_that_does_not_answer_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with running(doctor("quickstart.yaml", "--live", "--json"), tmp_path) as run:
        run.wait_until(lambda: "2" in trainers(run))
        trainers(run)["2"].kill()
        outcome = run.finish()
    assert (outcome.code, outcome.left) == (1, []), outcome.err
    (finding,) = [item for item in json.loads(outcome.out)["findings"] if item["severity"] == "stops"]
    assert (finding["code"], finding["groups"], finding["ranks"]) == ("live-bootstrap-failed", ["the trainers"], "2")
    assert "training rank 2 failed in phase start: the process died" in finding["text"]


def test_a_recipe_for_gpus_is_stopped_where_there_are_none(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has GPUs")
    outcome = examined(tmp_path, "quickstart_gpu.yaml", "--json")
    assert outcome.code == 1
    assert "takes 2 GPUs, and torch sees 0" in stopping(outcome)["gpus-short"]


def test_an_interface_that_is_not_there_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense0")
    outcome = examined(tmp_path, "quickstart.yaml")
    assert outcome.code == 1
    assert "stops env-gloo-socket-ifname\n  GLOO_SOCKET_IFNAME=nonsense0: no interface" in outcome.out


@pytest.mark.every_case
def test_a_cluster_that_does_not_answer_is_given_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts, and never says a word
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{deaf.getsockname()[1]}")
        started_s = time.monotonic()
        outcome = examined(tmp_path, "quickstart.yaml", "cluster.ray_address=auto", "--live", "--json")
    assert (outcome.code, outcome.left) == (1, [])
    assert "the run cannot join Ray" in stopping(outcome)["ray-unreachable"]
    assert time.monotonic() - started_s < DEADLINE_S + 30
