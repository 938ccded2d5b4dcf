"""The ranks of a script on one machine say with which of them a failure began: real processes, no driver."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers import bootstrap, guard, teardown
from rl_safe_workers.diagnostics import neighbours
from rl_safe_workers.diagnostics.neighbours import Neighbours
from rl_safe_workers.diagnostics.rank_files import Stay
from rl_safe_workers.errors import RankError, ResourceError, Victim
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.ranks import Outcome, run_ranks, values
from tests.distributed.worker import served_store

SIZE, CULPRIT = 3, 1
PATIENCE = timedelta(seconds=3)
KEY = "0123456789abcdef"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for temporary files of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _start(rank: int, address: StoreAddress, temporary: Path) -> list[str]:
    """Creates the groups of a rank. Returns the list that its lines in the log are added to."""
    tempfile.tempdir = str(temporary)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    neighbours.logger.addHandler(handler)
    store = connect_store(address, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=PATIENCE)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    return lines


def _train(
    rank: int, address: StoreAddress, temporary: Path, break_down: Callable[[], None] | None
) -> tuple[str, list[str]]:
    """Reduces with the others as a script does, which rank 1 does not.

    Rank 0 kills rank 1 once the others have failed.

    Returns:
        The class of the error that the rank leaves on, and its lines in the log.
    """
    lines = _start(rank, address, temporary)
    try:
        try:
            bootstrap()
            if rank == CULPRIT and break_down is not None:
                break_down()
            dist.all_reduce(torch.ones(1))
        finally:
            teardown()
    except Exception as error:
        if rank == 0:
            for file in temporary.glob(f"rl_safe_ranks_*/process_{CULPRIT}"):
                with suppress(ProcessLookupError):
                    os.kill(int(file.read_text().split()[0]), signal.SIGKILL)
        return type(error).__name__, lines
    return "", lines


def _dawdle() -> None:
    time.sleep(60)


def _skip_and_dawdle() -> None:
    with suppress(ValueError), guard("train"):
        raise ValueError("no text")
    _dawdle()


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _ends(address: StoreAddress, temporary: Path, break_down: Callable[[], None]) -> tuple[list[str], list[Outcome]]:
    outcomes = run_ranks(_train, SIZE, address, temporary, break_down)
    return [line for outcome in outcomes if outcome.error is None for line in outcome.value[1]], outcomes


@pytest.mark.parametrize(
    ("break_down", "doing"),
    [
        (
            _skip_and_dawdle,
            r"is at tests/distributed/test_neighbours.py:\d+ \(_dawdle\) in phase train, and its script has gone on "
            r"after an error in phase train at tests/distributed/test_neighbours.py:\d+ \(_skip_and_dawdle\): "
            "ValueError: no text",
        ),
        (_stop, "is stopped at "),
    ],
    ids=["in a line of its own after an error", "stopped"],
)
def test_the_silent_rank_is_named_with_its_place_by_one_of_the_others(
    break_down: Callable[[], None], doing: str, address: StoreAddress, temporary: Path
) -> None:
    lines, _ = _ends(address, temporary, break_down)
    assert len(lines) == SIZE - 1
    assert all("the job has failed on training rank 1: " in line for line in lines)
    told = lines[0]
    assert len({line.partition(": ")[2] for line in lines}) == 1, "all say what one has found"
    assert f"training rank {CULPRIT} " in told
    assert re.search(doing, told), told
    assert "training rank 0 is" not in told
    assert "training rank 2 is" not in told
    (folder,) = temporary.glob("rl_safe_ranks_*")
    assert json.loads((folder / "verdict" / "verdict.json").read_text())["verdict"] in told
    assert (folder / "verdict" / "stack_trainer_1.txt").stat().st_size > 0
    assert folder.stat().st_mode & 0o077 == 0


def _gather(rank: int, address: StoreAddress, temporary: Path, of_culprit: int) -> list[str]:
    """Gathers 4000 numbers of each rank, but others of rank 1. Returns the lines in the log."""
    lines = _start(rank, address, temporary)
    with suppress(RuntimeError):
        try:
            bootstrap()
            mine = torch.ones(of_culprit if rank == CULPRIT else 4000)
            dist.all_gather([torch.empty_like(mine) for _ in range(SIZE)], mine)
        finally:
            teardown()
    return lines


@pytest.mark.parametrize("of_culprit", [3000, 5000], ids=["shorter", "longer"])
def test_a_rank_with_another_shape_is_named_whoever_gloo_ends(
    of_culprit: int, address: StoreAddress, temporary: Path
) -> None:
    outcomes = run_ranks(_gather, SIZE, address, temporary, of_culprit)
    (ended,) = [outcome.rank for outcome in outcomes if outcome.error is not None]
    assert (ended == CULPRIT) == (of_culprit < 4000)
    lines = [line for outcome in outcomes if outcome.error is None for line in outcome.value]
    assert len(lines) == SIZE - 1
    shapes = (
        "training rank 0, 2 with 4000 Float, and training rank 1 with less"
        if of_culprit < 4000
        else r"training rank \d with \d000 Float; training rank \d with \d000 Float"
    )
    told = (
        rf"training rank \d: the job has failed on training rank 1: different shapes in all_gather of \S+: {shapes}; "
        rf"gloo aborted training rank {ended}, which received more bytes than expected; training rank 1 was at "
        r"\S+:\d+ \(_gather\)\n"
    )
    assert [line for line in lines if re.match(told, line)] == lines, lines


def _fail() -> None:
    raise ValueError("no such column")


def test_a_rank_that_tells_its_own_failure_is_not_asked(address: StoreAddress, temporary: Path) -> None:
    lines, outcomes = _ends(address, temporary, _fail)
    assert [outcome.value[0] for outcome in outcomes][CULPRIT] == "ValueError"
    assert {line.partition("failed on ")[2].partition(":")[0] for line in lines} <= {"training rank 1"}
    assert not list(temporary.glob("rl_safe_ranks_*/verdict"))


def test_nothing_is_left_of_an_orderly_end(address: StoreAddress, temporary: Path) -> None:
    assert values(run_ranks(_train, SIZE, address, temporary, None)) == [("", [])] * SIZE
    assert not list(temporary.glob("rl_safe_ranks_*"))


def test_a_rank_whose_folder_is_gone_says_so_and_judges_nobody(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    neighbours = object.__new__(Neighbours)  # without a handler of signals in this process
    neighbours.evidence = temporary / "gone" / "verdict"
    assert neighbours.judge({}) is None
    assert "nobody can be asked where the ranks are: " in caplog.text


def test_a_rank_leaves_a_folder_that_another_rank_removes(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(*_: object) -> None:
        raise FileNotFoundError("another rank was faster")  # as glob of Python 3.11 does

    neighbours = object.__new__(Neighbours)
    neighbours._rank, neighbours.folder = 0, temporary / "gone"
    neighbours.evidence = neighbours.folder / "verdict"
    monkeypatch.setattr(Path, "glob", removed)
    neighbours.leave()
    assert neighbours._has_left


def test_late_ranks_blame_the_holder_of_the_file_lock(temporary: Path) -> None:
    now_s = time.time()

    def report(rank: int, at_s: float) -> RankError:
        told = {
            "phase": "train",
            "cause": Victim(),
            "text": "",
            "trace": "",
            "place": "a.py:18 (load)",
            "op": "barrier",
        }
        return RankError(rank_id=trainer_id(rank), raised_at=at_s, **told)

    neighbours = object.__new__(Neighbours)  # without a handler of signals in this process
    neighbours.folder = temporary
    (temporary / "process_0").write_text(f"{os.getpid()} {psutil.Process().create_time()}")
    until_s = now_s - 0.2
    for rank, place, holder in ((0, "a.py:18 (load)", 0), (1, "a.py:16 (load)", os.getpid())):
        stay = Stay(now_s - 20, until_s, holder, place)
        (temporary / f"place_trainer_{rank}.txt").write_text(f"a.py:30 (<module>)\n{os.getpid()}\n{stay}\n")
    reports = {trainer_id(0): report(0, now_s), trainer_id(1): report(1, now_s - 0.001)}
    told = neighbours.came_late(reports)
    assert told is not None
    assert set(told[0]) == {trainer_id(0)}
    assert told[1].partition("\n")[0] == (
        "training rank 1 was at a.py:16 (load), and waited for a file lock of training rank 0, until training rank 0 "
        "gave up; training rank 0 gave up waiting in phase train in barrier at a.py:18 (load)"
    )
    assert neighbours.came_late({one: report(one.rank, now_s + 60) for one in reports}) is None


def _train_twice(rank: int, addresses: list[StoreAddress], temporary: Path) -> list[tuple[str, list[str]]]:
    ends = [_train(rank, addresses[0], temporary, None)]
    return [*ends, _train(rank, addresses[1], temporary, _dawdle)]


def test_a_script_may_begin_anew_and_is_judged_then(temporary: Path) -> None:
    with served_store() as first, served_store() as second:
        outcomes = run_ranks(_train_twice, SIZE, [first, second], temporary)
    lines = [line for outcome in outcomes if outcome.error is None for line in outcome.value[1][1]]
    assert any("training rank 1 is at " in line for line in lines), lines


def test_another_users_folder_or_one_that_others_may_read_is_refused(temporary: Path) -> None:
    (temporary / f"rl_safe_ranks_{KEY}").mkdir(mode=0o755)
    with pytest.raises(ResourceError, match="is not a private folder of this user; remove it"):
        Neighbours(KEY, rank=0)


def test_what_killed_jobs_left_goes_and_evidence_stays(temporary: Path) -> None:
    left, judged, alive = (temporary / f"rl_safe_ranks_{name}" for name in ("left", "judged", "alive"))
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    for folder, pid in ((left, process.pid), (judged, process.pid), (alive, os.getpid())):
        folder.mkdir(mode=0o700)
        (folder / "process_0").write_text(f"{pid} {psutil.Process().create_time()}")
    (left / "process_1").write_text(f"{os.getpid()} 1.0")  # the process number is another process's by now
    (judged / "verdict").mkdir()
    source = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]; from rl_safe_workers.diagnostics.neighbours import *; "
        f"Neighbours('{KEY}', rank=0).leave()"
    )
    subprocess.run([sys.executable, "-c", source, str(temporary)], check=True, timeout=60)
    assert sorted(path.name for path in temporary.iterdir()) == [alive.name, judged.name]


NEIGHBOUR = """
import logging, os, signal, sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from rl_safe_workers.diagnostics.neighbours import Neighbours

logging.basicConfig(stream=sys.stdout, format="%(message)s")
neighbours = Neighbours(sys.argv[2], rank=int(sys.argv[3]))
neighbours.speak_before_sigterm()
if (child := os.fork()) == 0:
    time.sleep(60)
    os._exit(0)
os.kill(child, signal.SIGTERM)
print(os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
time.sleep(60)
"""


def _watches_all(process: subprocess.Popen[str]) -> bool:
    """Returns True if a rank has a file descriptor of each other one, which tells it of their end."""
    links = [str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    return links.count("anon_inode:[pidfd]") == SIZE - 1


def _ended(temporary: Path, *, by: signal.Signals | None) -> list[tuple[int, list[str]]]:
    """Ends neighbours as a launcher does, once one of them was ended by a signal, or because its user says so.

    Returns:
        The exit code and the words of each.
    """
    command = [sys.executable, "-c", NEIGHBOUR, str(temporary), KEY]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(SIZE)]
    forked = [process.stdout.readline() for process in ranks if process.stdout is not None]
    assert forked == [f"{signal.SIGTERM.value}\n"] * SIZE
    if by is not None:
        while not all(map(_watches_all, ranks)):
            time.sleep(0.05)
        ranks[CULPRIT].send_signal(by)
        time.sleep(0.1)  # torchrun looks at its ranks so often
        ranks[CULPRIT].wait()
    for process in ranks:
        process.terminate()  # not one that has ended
    told = [process.communicate(timeout=60)[0].splitlines() for process in ranks]
    return [(process.returncode, lines) for process, lines in zip(ranks, told, strict=True)]


@pytest.mark.parametrize(
    ("by", "said", "why"),
    [
        (signal.SIGKILL, "died", "it got SIGKILL from an unknown sender"),
        (signal.SIGALRM, "was killed by SIGALRM", "signal SIGALRM: its exit status says so"),
    ],
)
def test_a_launcher_that_ends_all_has_one_of_them_name_the_rank_that_was_killed(
    by: signal.Signals, said: str, why: str, temporary: Path
) -> None:
    ends = _ended(temporary, by=by)
    assert [code for code, _ in ends] == [-signal.SIGTERM, -by, -signal.SIGTERM]
    (told,) = [lines for _, lines in ends if lines]
    named = rf"training rank [02]: the job has failed on training rank 1: training rank 1 {said}, last seen at "
    assert re.match(named, told[0]), told
    assert why in f"{told[0]}\n{told[1]}"
    assert told[2].startswith("evidence in ")


def test_sigterm_to_a_healthy_job_blames_no_rank(temporary: Path) -> None:
    assert _ended(temporary, by=None) == [(-signal.SIGTERM, [])] * SIZE
    assert list(temporary.iterdir()) == []


EXIT = """
import atexit, sys, threading, time
from rl_safe_workers.diagnostics.neighbours import Neighbours

def upload():
    time.sleep(3.0)  # line 6

neighbours = Neighbours("0123456789abcdef", rank=2)
neighbours.watch_exit(0.5)
if "handler" in sys.argv:
    atexit.register(upload)
if "thread" in sys.argv:
    threading.Thread(target=upload, name="sender").start()
neighbours.leave()
"""


@pytest.mark.parametrize(
    ("held_by", "said"),
    [
        (["handler"], r"it is at exits\.py:6 \(upload\)"),
        (["thread"], r"its thread sender is at exits\.py:6 \(upload\)"),
        ([], None),
    ],
    ids=["a handler of atexit", "a thread", "nobody"],
)
def test_a_rank_that_does_not_exit_says_where_it_is(held_by: list[str], said: str | None, tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(EXIT)
    variables = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "exits.py", *held_by]
    done = subprocess.run(command, cwd=tmp_path, env=variables, check=True, capture_output=True, text=True, timeout=60)
    told = [line for line in done.stderr.splitlines() if "does not exit" in line]
    assert len(told) == (said is not None), done.stderr
    if said is not None:
        assert re.fullmatch(rf"training rank 2 does not exit, 0\.5 s after the end of its script: {said}", told[0])


def _reduce_or_meet(rank: int, address: StoreAddress, temporary: Path) -> list[str]:
    """Rank 1 comes to another collective than the others. Returns the lines in the log."""
    lines = _start(rank, address, temporary)
    with suppress(RuntimeError):
        try:
            bootstrap()
            again = dist.new_group(list(range(SIZE)), timeout=PATIENCE)
            if rank == CULPRIT:
                dist.all_reduce(torch.ones(1), group=again)
            dist.all_reduce(torch.ones(1))
        finally:
            teardown()
    return lines


def test_ranks_that_all_wait_in_vain_are_told_by_the_lines_that_they_wait_at(
    address: StoreAddress, temporary: Path
) -> None:
    found = values(run_ranks(_reduce_or_meet, SIZE, address, temporary))
    (told,) = {line.partition(": ")[2] for lines in found for line in lines if "the job has failed" in line}
    first, advice = told.splitlines()
    assert re.fullmatch(
        r"the job has failed on training rank 1: no rank is missing, and training rank 1 is the odd one: "
        r"training rank 1 gave up waiting between phases in all_reduce at "
        r"tests/distributed/test_neighbours.py:\d+ \(_reduce_or_meet\); "
        r"training rank 0, 2 gave up waiting between phases in all_reduce at "
        r"tests/distributed/test_neighbours.py:\d+ \(_reduce_or_meet\)",
        first,
    ), told
    assert advice.startswith("compare these lines")


def _reduce_or_meet_for_long(rank: int, address: StoreAddress, temporary: Path) -> list[str]:
    """Rank 1 comes to another collective than the others, who wait there for longer. Returns the lines in the log."""
    lines = _start(rank, address, temporary)
    with suppress(RuntimeError):
        try:
            bootstrap()
            short = dist.new_group(list(range(SIZE)), timeout=PATIENCE)
            long = dist.new_group(list(range(SIZE)), timeout=4 * PATIENCE)
            dist.all_reduce(torch.ones(1), group=short if rank == CULPRIT else long)
        finally:
            teardown()
    return lines


def test_ranks_that_still_wait_elsewhere_are_told_with_their_places_and_not_blamed(
    address: StoreAddress, temporary: Path
) -> None:
    found = values(run_ranks(_reduce_or_meet_for_long, SIZE, address, temporary))
    (told,) = {line.partition(": ")[2] for line in found[CULPRIT] if "the job has failed" in line}
    first, advice = told.splitlines()
    where = r"tests/distributed/test_neighbours\.py:\d+ \(_reduce_or_meet_for_long\)"
    assert re.fullmatch(
        rf"the job has failed: no rank is missing: training rank 0, 2 wait between phases in all_reduce at {where}; "
        rf"training rank 1 gave up waiting between phases in all_reduce at {where}",
        first,
    ), told
    assert advice.startswith("compare these lines")
