"""Files that a rank leaves for a later inquiry, and their reading."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers import frames
from rl_safe_workers.diagnostics.answering import leave_failure, note_phase, start_thread
from rl_safe_workers.diagnostics.inquiry import RankProcess, ask_ranks
from rl_safe_workers.diagnostics.rank_files import (
    GLOO_FLIGHTS,
    PHASE_BYTES,
    failure_file,
    phase_file,
    place_file,
    read_failure,
    read_fatal,
    read_phase,
    read_place,
    read_stays,
    request_pipe,
)
from rl_safe_workers.errors import Awaited, PhaseTimeoutError, Raised, RankError
from rl_safe_workers.frames import Frame, frames_of_thread, place_of, relative, telling_frame
from rl_safe_workers.ranks import trainer_id

REPOSITORY = Path(__file__).parents[2]
RANK = """
import sys, time
from pathlib import Path
from rl_safe_workers.diagnostics.answering import answer_when_asked
from rl_safe_workers.ranks import trainer_id

def first():
    time.sleep(300)  # line 8

answer_when_asked(Path(sys.argv[1]), trainer_id(0))
first()
"""


def test_a_rank_that_is_killed_has_left_the_line_that_it_was_at(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    process = subprocess.Popen([sys.executable, "rank.py", str(tmp_path)], cwd=tmp_path, env=_ours())
    expected = "rank.py:8 (first)"
    until_s = time.monotonic() + 30
    while read_place(tmp_path, trainer_id(0)) != expected and time.monotonic() < until_s:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert read_place(tmp_path, trainer_id(0)) == expected


LOCKED = """
import fcntl, sys
from pathlib import Path
from rl_safe_workers.diagnostics.answering import answer_when_asked
from rl_safe_workers.ranks import trainer_id

lock = open("cache.lock", "w")
answer_when_asked(Path(sys.argv[1]), trainer_id(0))
fcntl.flock(lock, fcntl.LOCK_EX)  # line 9
"""


def test_a_rank_notes_where_it_stands_for_long_and_who_holds_the_lock_that_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(LOCKED)
    with (tmp_path / "cache.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen([sys.executable, "rank.py", str(tmp_path)], cwd=tmp_path, env=_ours())
        until_s = time.monotonic() + 30
        while not (stays := read_stays(tmp_path, trainer_id(0))) and time.monotonic() < until_s:
            time.sleep(0.05)
        while not any(stay.holder for stay in stays) and time.monotonic() < until_s:
            stays = read_stays(tmp_path, trainer_id(0))
        process.kill()
        process.wait()
    assert [(stay.place, stay.holder) for stay in stays] == [("rank.py:9 (<module>)", os.getpid())]
    assert stays[0].is_long


ABORTED = """
import ctypes, os, sys
from pathlib import Path
from rl_safe_workers.diagnostics.answering import answer_when_asked
from rl_safe_workers.ranks import trainer_id

answer_when_asked(Path(sys.argv[1]), trainer_id(0))
if (child := os.fork()) == 0:
    ctypes.string_at(0)
os.waitpid(child, 0)
library, thread = ctypes.CDLL(None), ctypes.c_ulong()
library.pthread_create(ctypes.byref(thread), None, ctypes.cast(library.abort, ctypes.c_void_p), None)
library.pause()  # line 13
"""


def test_a_rank_that_a_thread_of_a_library_aborts_has_left_its_stacks_and_not_those_of_a_child(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(ABORTED)
    done = subprocess.run([sys.executable, "rank.py", str(tmp_path)], cwd=tmp_path, env=_ours(), check=False)
    assert done.returncode == -signal.SIGABRT
    left = read_fatal(tmp_path, trainer_id(0))
    assert left.startswith("Fatal Python error: Aborted\n")
    assert 'rank.py", line 13 in <module>' in left
    assert "Current thread" not in left
    assert "Segmentation fault" not in left


def test_a_process_whose_faulthandler_is_on_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(ABORTED)
    command = [sys.executable, "-X", "faulthandler", "rank.py", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=_ours(), check=False, capture_output=True, text=True)
    assert "Fatal Python error: Aborted" in done.stderr
    assert read_fatal(tmp_path, trainer_id(0)) == ""


def test_an_error_raised_from_another_one_has_the_place_of_the_other_one() -> None:
    def first() -> None:
        raise ValueError("no")

    def second() -> None:
        try:
            first()
        except ValueError as error:
            raise RuntimeError("no, either") from error

    with pytest.raises(RuntimeError) as raised:
        second()
    assert re.fullmatch(r"\S*test_answering\.py:\d+ \(first\)", place_of(raised.value) or "")


def test_the_phase_that_a_rank_has_noted_last_is_read(tmp_path: Path) -> None:
    assert read_phase(tmp_path, trainer_id(0)) is None
    read = []
    for phase in ("train", "save", None):
        note_phase(tmp_path, trainer_id(0), phase)
        read.append(read_phase(tmp_path, trainer_id(0)))
    assert read == ["train", "save", None]


def test_a_note_of_a_phase_overwrites_the_one_before(tmp_path: Path) -> None:
    found = set()
    for phase in ("x" * 2 * PHASE_BYTES, "train", None):
        note_phase(tmp_path, trainer_id(0), phase)
        note = (tmp_path / phase_file(trainer_id(0))).stat()
        found.add((note.st_ino, note.st_size))
    assert [size for _, size in found] == [PHASE_BYTES], "a file that is emptied makes its writer wait for the disk"


def test_a_process_starts_anew_where_an_earlier_one_has_been(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(
        RANK.replace("first()\n", "print(len(threads()))\n", 1).replace(
            "import sys, time", "import sys, time, os\nfrom threading import enumerate as threads"
        )
    )
    command = [sys.executable, "rank.py", str(tmp_path)]
    for _ in range(2):
        assert subprocess.run(command, cwd=tmp_path, env=_ours(), capture_output=True, check=True).stdout == b"3\n"


BUSY_RANK = """
import sys, threading, time
from pathlib import Path
from rl_safe_workers.diagnostics.answering import answer_when_asked
from rl_safe_workers.ranks import trainer_id

def idle(depth):
    return idle(depth - 1) if depth else threading.Event().wait()

for _ in range(60):
    threading.Thread(target=idle, args=(12,), daemon=True).start()
answer_when_asked(Path(sys.argv[1]), trainer_id(0))
(notes,) = (thread for thread in threading.enumerate() if thread.name == "place")
clock = time.pthread_getcpuclockid(notes.ident)
time.sleep(1)
began, cpu = time.monotonic(), time.clock_gettime(clock)
time.sleep(8)
print((time.clock_gettime(clock) - cpu) / (time.monotonic() - began))
"""


def test_the_notes_of_a_rank_with_many_threads_take_half_a_percent_of_a_core_at_most(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUSY_RANK, str(tmp_path)]
    share = float(subprocess.run(command, cwd=tmp_path, env=_ours(), capture_output=True, check=True).stdout)
    assert 0 < share <= 0.005


def _ours() -> dict[str, str]:
    return {"PYTHONPATH": str(REPOSITORY)}


def test_a_place_of_another_kind_of_file_is_not_read(tmp_path: Path) -> None:
    assert read_place(tmp_path, trainer_id(0)) is None
    (tmp_path / "secret").write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / place_file(trainer_id(0))).symlink_to(tmp_path / "secret")
    (folder / place_file(trainer_id(1))).write_bytes(b"x" * 10_000)
    (folder / place_file(trainer_id(2))).touch()
    (folder / place_file(trainer_id(3))).write_text("x.py:1 (f)\nrest of a longer one")
    assert [read_place(folder, trainer_id(rank)) for rank in range(4)] == [None, None, None, "x.py:1 (f)"]


def test_a_file_of_this_package_is_named_alike_however_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.chdir("/")
    relative.cache_clear()
    assert relative(frames.__file__) == "rl_safe_workers/frames.py"
    relative.cache_clear()


def test_an_error_has_a_place_where_the_working_directory_is_gone(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert relative("/elsewhere/train.py") == "/elsewhere/train.py"


def test_an_error_tells_the_innermost_line_that_is_not_of_a_library() -> None:
    with pytest.raises(TypeError) as raised:
        Path().joinpath(3)  # type: ignore[arg-type]
    assert re.fullmatch(
        r"(tests/unit/)?test_answering\.py:\d+ \(test_an_error_tells_\w+\)", str(place_of(raised.value))
    )
    assert place_of(ValueError("never raised")) is None


def test_our_own_teardown_is_told_by_the_line_that_calls_it() -> None:
    names = ("control/plane.py", "workers/safe_trainer.py", "standalone.py")
    ours = [Frame(file=f"rl_safe_workers/{name}", line=1, function="f") for name in names]
    users, save = (Frame(file=file, line=9, function="f") for file in ("train.py", "rl_safe_workers/checkpoint/x.py"))
    assert telling_frame([*ours, users]) == users
    assert telling_frame(ours) == ours[1]
    assert telling_frame([save, *ours, users]) == save


async def _asks(answers: asyncio.Queue[int]) -> int:
    return await answers.get()


async def _in_a_group(asked: Coroutine[Any, Any, int]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asked)


@pytest.mark.parametrize(
    "wait",
    [
        lambda asked: asked,
        asyncio.ensure_future,
        lambda asked: asyncio.gather(asyncio.sleep(0), asked),
        lambda asked: asyncio.wait([asyncio.ensure_future(asked)]),
        lambda asked: asyncio.wait_for(asked, 60),
        _in_a_group,
    ],
    ids=["a coroutine", "a task", "gather", "wait", "wait_for", "a group of tasks"],
)
def test_a_thread_whose_event_loop_waits_is_at_the_line_of_the_coroutine(
    wait: Callable[[Coroutine[Any, Any, int]], Awaitable[Any]],
) -> None:
    asked, loops = threading.Event(), []

    async def run() -> None:
        answers: asyncio.Queue[int] = asyncio.Queue()
        loops.append((asyncio.get_running_loop(), answers))
        asyncio.get_running_loop().call_later(0.1, asked.set)
        await wait(_asks(answers))

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    asked.wait(30)
    (loop, answers) = loops[0]
    try:
        until_s, functions = time.monotonic() + 30, []
        while "_asks" not in functions and time.monotonic() < until_s:
            functions = [frame.function for frame in frames_of_thread(thread) if frame.is_telling]
    finally:
        loop.call_soon_threadsafe(answers.put_nowait, 1)
        thread.join()
    assert functions[:1] == ["_asks"]
    assert "run" in functions[1:]


def test_a_stack_of_libraries_alone_tells_its_innermost_line() -> None:
    frames = [Frame(file=f"torch/{name}.py", line=1, function="f") for name in ("inner", "outer")]
    assert telling_frame(frames) == frames[0]
    assert telling_frame([]) is None


@pytest.mark.parametrize(
    ("exit_code", "place", "said"),
    [
        (-9, "x.py:1 (f)", "was killed by SIGKILL, last seen at x.py:1 (f)"),
        (-99, None, "was killed by signal 99"),
        (1, None, "has ended with exit code 1"),
        (0, "x.py:1 (f)", "has ended with exit code 0, last seen at x.py:1 (f)"),
        (None, None, "has no process any more"),
    ],
)
def test_a_process_that_has_ended_is_told_of(exit_code: int | None, place: str | None, said: str) -> None:
    process = RankProcess(rank_id=trainer_id(0), pid=1, status="gone", exit_code=exit_code, last_place=place)
    assert process.where() == said


def test_a_rank_leaves_what_it_has_failed_with(tmp_path: Path) -> None:
    rank_id = trainer_id(1)
    assert read_failure(tmp_path, rank_id) is None
    try:
        raise ValueError("no such expert")
    except ValueError as error:
        leave_failure(tmp_path, error, rank_id, "train")
    found = read_failure(tmp_path, rank_id)
    assert isinstance(found, RankError)
    assert (found.rank_id, found.phase, found.cause) == (rank_id, "train", Raised())
    assert found.text == "ValueError: no such expert"
    assert "test_answering.py" in str(found.place)
    late = PhaseTimeoutError(phase="save", awaited=Awaited("all"), waited_s=1.0, setting="rl_safe.timeouts.save")
    leave_failure(tmp_path, late, rank_id, "save")
    assert str(read_failure(tmp_path, rank_id)) == str(late)


EXHAUSTED = """
import os, sys
from pathlib import Path
from rl_safe_workers.diagnostics.answering import answer_when_asked, leave_failure
from rl_safe_workers.ranks import trainer_id

folder = Path(sys.argv[1])
answer_when_asked(folder, trainer_id(0))
try:
    while True:
        os.open(os.devnull, os.O_RDONLY)
except OSError as error:
    leave_failure(folder, error, trainer_id(0), "train")
"""


def test_a_rank_that_can_open_no_more_files_leaves_what_it_has_failed_with(tmp_path: Path) -> None:
    command = ["bash", "-c", 'ulimit -n 100; exec "$@"', "-", sys.executable, "-c", EXHAUSTED, str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, env=_ours(), check=True, timeout=60)
    found = read_failure(tmp_path, trainer_id(0))
    assert isinstance(found, RankError)
    assert "Too many open files" in found.text


def test_a_failure_that_nobody_can_read_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / failure_file(trainer_id(0))).write_text('{"late": {}}')
    (tmp_path / failure_file(trainer_id(1))).write_text("no JSON")
    (tmp_path / failure_file(trainer_id(2))).symlink_to("/etc/hostname")
    (tmp_path / failure_file(trainer_id(3))).mkdir()
    assert [read_failure(tmp_path, trainer_id(rank)) for rank in range(5)] == [None] * 5
    told = [f"{failure_file(trainer_id(rank))} cannot be read: " in caplog.text for rank in range(5)]
    assert told == [True] * 4 + [False], "the last one has left none"


def _asked(rank: int, folder: Path) -> RankProcess:
    """A rank whose process has ended, and for which a thread still answers: with a record, after a while."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder.mkdir(exist_ok=True)
    os.mkfifo(folder / request_pipe(trainer_id(rank)))
    pipe = os.open(folder / request_pipe(trainer_id(rank)), os.O_RDWR)

    def answer() -> None:
        os.read(pipe, 1)
        os.close(pipe)
        time.sleep(0.5)
        (folder / "unfinished").write_bytes(b"new")
        (folder / "unfinished").rename(folder / f"{GLOO_FLIGHTS}{rank}")

    start_thread("answer", answer)
    return RankProcess(rank_id=trainer_id(rank), pid=ended.pid, folder=folder, exit_code=0)


def test_the_record_of_an_earlier_request_is_not_taken_for_the_answer(tmp_path: Path) -> None:
    (tmp_path / f"{GLOO_FLIGHTS}0").write_bytes(b"old")  # as long as the new one
    rank = _asked(0, tmp_path)
    assert zlib.decompress(ask_ranks(lambda: [rank], patience_s=10.0).flights[f"{GLOO_FLIGHTS}0"]) == b"new"


def test_no_record_of_a_rank_is_awaited_in_the_folder_of_another(tmp_path: Path) -> None:
    ranks = [_asked(rank, tmp_path / f"asked_{rank}") for rank in range(2)]
    began_s = time.monotonic()
    assert len(ask_ranks(lambda: ranks, patience_s=60.0).flights) == 2
    assert time.monotonic() - began_s < 10.0, "it has waited 16 s for a file that nobody writes"


def test_a_failure_that_cannot_be_left_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave_failure(tmp_path / "gone", ValueError("no"), trainer_id(0), "train")
    assert "training rank 0 cannot leave its failure" in caplog.text


RUNNING_RANK = """
import ctypes, sys, threading
from pathlib import Path
from rl_safe_workers.diagnostics.answering import answer_when_asked
from rl_safe_workers.ranks import trainer_id

def numbers(depth):
    yield depth
    if depth:
        yield from numbers(depth - 1)

def run():
    while True:
        sorted(range(20), key=lambda one: sum(numbers(4)))

enter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

def start_threads_of_a_library():
    library, thread = ctypes.CDLL(None), ctypes.c_ulong()
    while True:
        library.pthread_create(ctypes.byref(thread), None, enter, None)
        library.pthread_join(thread, None)

for work in (run, run, start_threads_of_a_library):
    threading.Thread(target=work, daemon=True).start()
answer_when_asked(Path(sys.argv[1]), trainer_id(0))
print("ready", flush=True)
run()
"""


def test_a_rank_whose_threads_run_outlives_the_questions(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUNNING_RANK, str(tmp_path)]
    process = subprocess.Popen(command, cwd=tmp_path, env=_ours(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(40):
            (found,) = ask_ranks(
                lambda: [RankProcess(rank_id=trainer_id(0), pid=process.pid, folder=tmp_path)], patience_s=10.0
            ).ranks
            assert process.poll() is None
            assert found.source == "rank"
            assert "of a library" in found.text or "start_threads_of_a_library" in found.text
    finally:
        process.kill()
        process.communicate()


BEREFT_RANK = """
import queue, sys, threading
from pathlib import Path
from rl_safe_workers.diagnostics.answering import answer_when_asked, note_event
from rl_safe_workers.ranks import trainer_id

batches = queue.Queue()

def prefetch():
    raise FileNotFoundError("shard 4\\nhas moved")  # line 10

threading.excepthook = lambda args: print("before")
answer_when_asked(Path(sys.argv[1]), trainer_id(0))
leaving = threading.Thread(target=sys.exit)
leaving.start()
leaving.join()
prefetching = threading.Thread(target=prefetch, name="prefetch")
prefetching.start()
prefetching.join()
_ = print("ready", flush=True), batches.get()  # line 20
"""


def test_a_rank_whose_thread_has_ended_by_an_exception_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bereft.py").write_text(BEREFT_RANK)
    command = [sys.executable, "bereft.py", str(tmp_path)]
    process = subprocess.Popen(command, cwd=tmp_path, env=_ours(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["before\n", "before\n", "ready\n"]
        rank = RankProcess(rank_id=trainer_id(0), pid=process.pid, folder=tmp_path)
        (found,) = ask_ranks(lambda: [rank], patience_s=10.0).ranks
    finally:
        process.kill()
        process.communicate()
    assert found.where() == (
        "is at bereft.py:20 (<module>), and its thread prefetch has ended at bereft.py:10 (prefetch): "
        "FileNotFoundError: shard 4"
    )


LEAVING_RANK = """
import os, sys
from pathlib import Path
from rl_safe_workers.diagnostics.answering import answer_when_asked
from rl_safe_workers.ranks import trainer_id

def run_sandboxed():
    os._exit(0)  # line 8

answer_when_asked(Path(sys.argv[1]), trainer_id(0))
if sys.argv[2] == "child" and (child := os.fork()):
    os.waitpid(child, 0)
else:
    run_sandboxed()
"""


@pytest.mark.parametrize(
    ("who", "said"),
    [
        (
            "rank",
            "ended with exit status 0, without an error and without teardown: exit code 0: it called os._exit at "
            "leaving.py:8 (run_sandboxed)",
        ),
        ("child", "died, last seen at leaving.py:12 (<module>): why is not known, because "),
    ],
)
def test_a_rank_that_leaves_by_a_call_of_exit_is_told_with_its_status_and_its_line(
    who: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING_RANK)
    process = subprocess.Popen([sys.executable, "leaving.py", str(tmp_path), who], cwd=tmp_path, env=_ours())
    assert process.wait() == 0
    (tmp_path / place_file(trainer_id(0))).write_text("leaving.py:12 (<module>)")
    rank = RankProcess(rank_id=trainer_id(0), pid=process.pid, folder=tmp_path, never_ends=True)
    (found,) = ask_ranks(lambda: [rank], patience_s=10.0).ranks
    assert f"{found.where()}: {found.ending}".startswith(said)


HOLDING_RANK = """
import ctypes, sys
from pathlib import Path
from rl_safe_workers.diagnostics.answering import answer_when_asked
from rl_safe_workers.ranks import trainer_id

def hold():
    ctypes.PyDLL(None).sleep(300)  # line 8

answer_when_asked(Path(sys.argv[1]), trainer_id(0))
print("ready", flush=True)
hold()
"""


def test_a_rank_that_keeps_pythons_lock_in_a_call_of_c_is_found(tmp_path: Path) -> None:
    (tmp_path / "holding.py").write_text(HOLDING_RANK)
    command = [sys.executable, "holding.py", str(tmp_path)]
    process = subprocess.Popen(command, cwd=tmp_path, env=_ours(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(1)
        (found,) = ask_ranks(
            lambda: [RankProcess(rank_id=trainer_id(0), pid=process.pid, folder=tmp_path)], patience_s=10.0
        ).ranks
        assert found.stack is not None
        assert str(found.stack.place).endswith("holding.py:8 (hold)")
        assert found.source == "rank"
    finally:
        process.kill()
        process.communicate()
