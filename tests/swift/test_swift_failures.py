"""Failures and exits of whole ``megatron`` commands, under torchrun, as users start them.

All of them: scripts/test --swift --every-failure, which also runs stock ms-swift beside ours and prints a table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_safe_workers.adapters.swift.__main__ import PLUGIN
from tests.swift.jobs import BREAK, CPU, ON_CPU, PLAIN, TRAINING, Forge, environment, free_port

TIMEOUT_S = 15.0
"""Seconds of every phase but the teardown."""
SETTINGS = {
    "timeouts": {"world": 60, "bootstrap": 60, "teardown": 5}
    | dict.fromkeys(("outside", "convert", "train", "logprob", "save"), TIMEOUT_S)
}
CUT_S = 120.0
"""When stock is given up."""
PLACES, WAYS = ("before", "step", "save", "export"), ("raise", "kill", "hang")
SAMPLE = {("step", "hang"), ("save", "raise")}
CASES = [
    pytest.param(place, way, marks=() if (place, way) in SAMPLE else pytest.mark.every_failure, id=f"{place}-{way}")
    for place in PLACES
    for way in WAYS
]
EXITS = 50
GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class End:
    """How a command has ended."""

    status: int | None
    """None if it was cut."""
    seconds: float
    """From the failure to the end of the command."""
    named_by_us: bool
    named_by_torchrun: bool
    left: list[int]
    """Processes of the job that still ran."""
    output: str


def processes_of(folder: Path) -> list[int]:
    """The processes whose command names a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended
    return found


def run(folder: Path, inputs: Path, place: str, way: str, *, ours: bool) -> End:
    folder.mkdir()
    model = ["--model", str(inputs / "model")]
    if place == "export":
        command = [
            "export",
            *model,
            "--to_mcore",
            "true",
            "--output_dir",
            str(folder / "out"),
            "--check_model",
            "false",
        ]
    else:
        data = ["--dataset", str(inputs / "data.jsonl"), "--output_dir", str(folder / "out")]
        command = ["sft", *model, *data, *TRAINING]
    plugins = [CPU, *([PLUGIN] if ours else []), BREAK]
    megatron = str(Path(sys.executable).parent / "megatron")
    with subprocess.Popen(
        [
            megatron,
            *command,
            "--expert_model_parallel_size",
            "2",
            *ON_CPU,
            *PLAIN,
            "--external_plugins",
            *map(str, plugins),
        ],
        cwd=folder,
        env=environment(
            BREAK=f"{place}:{way}",
            NPROC_PER_NODE="2",
            MASTER_PORT=str(free_port()),
            RL_SAFE_SWIFT=json.dumps(SETTINGS),
        ),
        stdout=(folder / "output").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        while process.poll() is None and not (folder / "struck").exists():
            time.sleep(0.05)
        assert (folder / "struck").exists(), (folder / "output").read_text()[-3000:]
        struck = float((folder / "struck").read_text())
        try:
            status: int | None = process.wait(CUT_S - (time.time() - struck))
        except subprocess.TimeoutExpired:
            status = None
        seconds = time.time() - struck
        # The kernel may take a moment to take the last one away.
        gone_by_s = time.monotonic() + GRACE_S
        while (left := processes_of(folder)) and status is not None and time.monotonic() < gone_by_s:
            time.sleep(0.05)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
    output = (folder / "output").read_text()
    root_cause = output.rpartition("Root Cause")[2] if "Root Cause" in output else ""
    return End(
        status=status,
        seconds=seconds,
        named_by_us="failed on training rank 1" in output,
        named_by_torchrun="rank      : 1 " in root_cause,
        left=left if status is not None else [],
        output=output,
    )


@pytest.mark.parametrize(("place", "way"), CASES)
def test_a_broken_job_ends_in_time_and_names_the_rank(
    place: str, way: str, inputs: Path, tmp_path: Path, rows: list[str]
) -> None:
    end = run(tmp_path / "job", inputs, place, way, ours=True)
    rows.append(row(place, way, "ours", end))
    assert end.status == 1, end.output[-4000:]
    assert end.seconds < TIMEOUT_S + 10
    assert end.left == []
    assert end.named_by_us or end.named_by_torchrun, end.output[-4000:]
    # torchrun names the rank that it has seen end first: of a rank that hangs, a victim.
    assert way != "hang" or end.named_by_us, end.output[-4000:]


@pytest.mark.every_failure
@pytest.mark.parametrize(("place", "way"), [(place, way) for place in PLACES for way in WAYS])
def test_stock_beside_it(place: str, way: str, inputs: Path, tmp_path: Path, rows: list[str]) -> None:
    end = run(tmp_path / "job", inputs, place, way, ours=False)
    rows.append(row(place, way, "stock", end))
    # What it does is in the table; only a hang is certain.
    assert way != "hang" or end.status is None


@pytest.mark.every_failure
@pytest.mark.timeout(3600)
def test_fifty_jobs_end_within_five_seconds(forge: Forge, inputs: Path, tmp_path: Path, rows: list[str]) -> None:
    seconds = []
    for number in range(EXITS):
        more = ("--expert_model_parallel_size", "2", "--train_iters", "1")
        job = forge.train(tmp_path / str(number), inputs, *more).check()
        seconds += [job.ended[rank] - job.record(rank)["trained"] for rank in (0, 1)]
    rows.append(f"{EXITS} of {EXITS} clean exits; the slowest rank took {max(seconds):.2f} s")
    assert max(seconds) < 5


def row(place: str, way: str, who: str, end: End) -> str:
    """A line of the table."""
    ended = "cut" if end.status is None else f"{end.seconds:.1f} s, status {end.status}"
    named = " and ".join(who for who, named in (("us", end.named_by_us), ("torchrun", end.named_by_torchrun)) if named)
    return f"{who:5} {place:6} {way:5} {ended:20} rank 1 named by {named or 'nobody'}; {len(end.left)} left"


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    """Lines printed after the tests."""
    lines: list[str] = []
    yield lines
    sys.stdout.write("\n" + "\n".join(sorted(lines)) + "\n")
