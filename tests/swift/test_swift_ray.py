"""ms-swift's Ray mode, with real Ray: a good run, and one training actor of two that fails.

All failures: scripts/test --swift --every-case, which also runs stock ms-swift beside ours and prints a table.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_safe_workers.reaping.processes import TEMP_PREFIX
from tests.swift.commands import End
from tests.swift.ray_jobs import run_ray

pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 20.0
"""Seconds of every phase but the teardown."""
SETTINGS = {
    "timeouts": {"bootstrap": 60, "teardown": 5}
    | dict.fromkeys(("world", "outside", "start", "convert", "train", "logprob", "save", "rollout", "sync"), TIMEOUT_S)
}
PLACES, WAYS = {"setup": "convert", "step": "train", "save": "save"}, ("kill", "raise", "hang")
"""The phase of each place."""
RAISED = r"(CheckpointError: )?RuntimeError: broken on purpose"
BROKEN = r"\S*break_plugin\.py:\d+ \(strike\)"
OTHER = r"(; training rank 0 was in \w+ of \w+)?$"
TOLD = {
    "kill": rf"training rank 1 on [\d.]+ died in phase {{phase}}, last seen at \S+:\d+ \(\w+\){OTHER}",
    "raise": rf"training rank 1 on [\d.]+ failed in phase {{phase}} at {BROKEN}: {RAISED}{OTHER}",
    "hang": rf"hang: phase {{phase}}, .*; training rank 1 on [\d.]+ is at {BROKEN}$",
}
"""The first line of the verdict; a killed rank may have come further than where it was last seen."""
SAMPLE = {("step", "raise")}
CASES = [
    pytest.param(place, way, marks=() if (place, way) in SAMPLE else pytest.mark.every_case, id=f"{place}-{way}")
    for place in PLACES
    for way in WAYS
]


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "out" / "logging.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def own(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, End]:
    folder = tmp_path_factory.mktemp("own") / "job"
    return folder, run_ray(folder, inputs, ours=True, settings={"release_comms": True}, limit_s=300)


def test_a_job_trains_saves_and_leaves_nothing(own: tuple[Path, End]) -> None:
    folder, end = own
    assert end.status == 0, end.output[-4000:]
    assert end.left == []
    assert len(losses(folder)) == 4
    tracker = folder / "out" / "checkpoint-4" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "4"


def test_the_phases_have_really_run_in_the_actors(own: tuple[Path, End]) -> None:
    for rank in (0, 1):
        record = json.loads((own[0] / f"record{rank}.json").read_text())
        record["phases"].pop("teardown", None)  # Ray may kill an actor before it
        # Each step: weights, communicators given away and taken back, two log-probabilities, an update.
        assert record["phases"] == {
            "world": 1,
            "groups": 1,
            "bootstrap": 5,
            "convert": 1,
            "sync": 4,
            "rollout": 4,
            "logprob": 8,
            "train": 4,
            "save": 2,
        }
        assert record["released"]["step"] == [False] * 4
        assert record["saves"][0]["all"] == 0


def test_the_sockets_of_weights_are_the_jobs_own(own: tuple[Path, End]) -> None:
    sockets = {Path(path.read_text().removeprefix("ipc://")) for path in own[0].glob("socket*")}
    assert len(sockets) == 2
    (folder,) = {socket.parent for socket in sockets}
    assert folder.name.startswith(TEMP_PREFIX), "another job on this machine has the same"
    assert not folder.exists(), "it is removed with the job"


@pytest.mark.every_case
def test_the_losses_are_those_of_stock_to_the_last_bit(own: tuple[Path, End], inputs: Path, tmp_path: Path) -> None:
    stock = run_ray(tmp_path / "job", inputs, ours=False, limit_s=300)
    assert stock.status == 0, stock.output[-4000:]
    assert losses(own[0]) == losses(tmp_path / "job")


@pytest.mark.parametrize(("place", "way"), CASES)
def test_a_failing_actor_ends_the_driver_which_names_it(
    place: str, way: str, inputs: Path, tmp_path: Path, rows: list[str]
) -> None:
    end = run_ray(tmp_path / "job", inputs, ours=True, settings=SETTINGS, BREAK=f"{place}:{way}")
    rows.append(end.row(f"ours ray {place} {way}"))
    assert end.status == 1, end.output[-4000:]
    assert end.seconds < TIMEOUT_S + 10
    assert end.left == []
    assert re.search(TOLD[way].format(phase=PLACES[place]), end.verdict[0]), end.verdict
    assert end.verdict[2].startswith(f"evidence in {tmp_path / 'job' / 'out' / 'rl_safe_failure_'}")
    assert (Path(end.verdict[2].removeprefix("evidence in ")) / "verdict.json").is_file()


@pytest.mark.every_case
def test_engines_that_hang_are_named_by_replica(inputs: Path, tmp_path: Path) -> None:
    end = run_ray(tmp_path / "job", inputs, ours=True, settings=SETTINGS, BREAK_ENGINE="generate:hang")
    assert end.status == 1, end.output[-4000:]
    assert end.seconds < TIMEOUT_S + 10
    assert re.match(r"hang: phase rollout, generation: .*, rollout rank 0-1 did not within", end.verdict[0]), (
        end.verdict
    )


@pytest.mark.every_case
@pytest.mark.parametrize(("place", "way"), [(place, way) for place in PLACES for way in WAYS])
def test_stock_beside_it(place: str, way: str, inputs: Path, tmp_path: Path, rows: list[str]) -> None:
    end = run_ray(tmp_path / "job", inputs, ours=False, BREAK=f"{place}:{way}")
    rows.append(end.row(f"stock ray {place} {way}"))
    # What else it does is in the table.
    if way == "hang":
        assert end.status is None
    if place != "setup" and way == "raise":
        assert end.status is None
        assert "base_trainer.py" in end.place


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    """Lines printed after the tests."""
    lines: list[str] = []
    yield lines
    sys.stdout.write("\n" + "\n".join(sorted(lines)) + "\n")
