"""Failures and exits of whole ``megatron`` commands, under torchrun, as users start them.

All of them: scripts/test --swift --every-case, which also runs stock ms-swift beside ours and prints a table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.adapters.swift.__main__ import PLUGIN
from rl_safe_workers.ports import port_to_listen_on
from tests.swift.commands import End, run
from tests.swift.jobs import BREAK, CPU, ON_CPU, PLAIN, TRAINING, Forge

TIMEOUT_S = 15.0
"""Seconds of every phase but the teardown."""
SETTINGS = {
    "timeouts": {"world": 60, "bootstrap": 60, "teardown": 5}
    | dict.fromkeys(("outside", "convert", "train", "logprob", "save"), TIMEOUT_S)
}
PLACES, WAYS = ("before", "step", "save", "export"), ("raise", "kill", "hang")
SAMPLE = {("step", "hang")}
CASES = [
    pytest.param(place, way, marks=() if (place, way) in SAMPLE else pytest.mark.every_case, id=f"{place}-{way}")
    for place in PLACES
    for way in WAYS
]
EXITS = 50
HANG = (
    r"phase train, the trainers, \w+ of \w+: training rank 0 gave up waiting; "
    r"training rank 1 is at break_plugin.py:\d+ "
)


def broken(
    folder: Path, inputs: Path, place: str, way: str, *, ours: bool, settings: dict[str, Any] | None = None
) -> End:
    folder.mkdir()
    model, output = ["--model", str(inputs / "model")], ["--output_dir", str(folder / "out")]
    if place == "export":
        command = ["export", *model, *output, "--to_mcore", "true", "--check_model", "false"]
    else:
        command = ["sft", *model, *output, "--dataset", str(inputs / "data.jsonl"), *TRAINING]
    plugins = [CPU, *([PLUGIN] if ours else []), BREAK]
    args = [*command, "--expert_model_parallel_size", "2", *ON_CPU, *PLAIN, "--external_plugins", *map(str, plugins)]
    env = {"NPROC_PER_NODE": "2", "MASTER_PORT": str(port_to_listen_on("127.0.0.1")), "BREAK": f"{place}:{way}"}
    return run(folder, args, settings=settings or SETTINGS, **env)


@pytest.mark.parametrize(("place", "way"), CASES)
def test_a_broken_job_ends_in_time_and_names_the_rank(
    place: str, way: str, inputs: Path, tmp_path: Path, rows: list[str]
) -> None:
    end = broken(tmp_path / "job", inputs, place, way, ours=True)
    rows.append(end.row(f"ours {place} {way}"))
    assert end.status == 1, end.output[-4000:]
    assert end.seconds < TIMEOUT_S + 10
    assert end.left == []
    assert end.named_by_us or end.named_by_torchrun, end.output[-4000:]
    # torchrun names the rank that it has seen end first: of a rank that hangs, a victim.
    assert way != "hang" or end.named_by_us, end.output[-4000:]
    # In other places no rank waits in a collective, or nobody waits for the other.
    assert (place, way) != ("step", "hang") or re.search(HANG, end.output), end.output[-4000:]


def test_a_rank_that_stays_stopped_is_named_long_before_the_timeout_of_its_phase(inputs: Path, tmp_path: Path) -> None:
    settings = {"timeouts": {"teardown": 5, "stopped": 3}}
    end = broken(tmp_path / "job", inputs, "step", "stop", ours=True, settings=settings)
    assert end.status == 1, end.output[-4000:]
    assert end.seconds < TIMEOUT_S + 10
    assert end.left == []
    told = r"training rank 1 is stopped, last seen at break_plugin.py:\d+ \(strike\)"
    assert re.search(f"the job has failed on training rank 1: {told}", end.output), end.output[-4000:]


@pytest.mark.every_case
@pytest.mark.parametrize(("place", "way"), [(place, way) for place in PLACES for way in WAYS])
def test_stock_beside_it(place: str, way: str, inputs: Path, tmp_path: Path, rows: list[str]) -> None:
    end = broken(tmp_path / "job", inputs, place, way, ours=False)
    rows.append(end.row(f"stock {place} {way}"))
    # What it does is in the table; only a hang is certain.
    assert way != "hang" or end.status is None


@pytest.mark.every_case
@pytest.mark.timeout(3600)
def test_fifty_jobs_end_within_five_seconds(forge: Forge, inputs: Path, tmp_path: Path, rows: list[str]) -> None:
    seconds = []
    for number in range(EXITS):
        more = ("--expert_model_parallel_size", "2", "--train_iters", "1")
        job = forge.train(tmp_path / str(number), inputs, *more).check()
        seconds += [job.ended[rank] - job.record(rank)["trained"] for rank in (0, 1)]
    rows.append(f"{EXITS} of {EXITS} clean exits; the slowest rank took {max(seconds):.2f} s")
    assert max(seconds) < 5


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    """Lines printed after the tests."""
    lines: list[str] = []
    yield lines
    sys.stdout.write("\n" + "\n".join(sorted(lines)) + "\n")
