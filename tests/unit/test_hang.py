"""Evidence from processes that hang, and the verdict on them. The processes here are no actors of Ray."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rl_safe_workers.config import RunConfig
from rl_safe_workers.diagnostics import inquiry
from rl_safe_workers.diagnostics.flight_recorder import Record, Work, works_waited_in
from rl_safe_workers.diagnostics.hang import Hang, collect_evidence, keep, verdict, wait_of
from rl_safe_workers.diagnostics.inquiry import Answers, RankProcess, ask_ranks, processes_of_run
from rl_safe_workers.diagnostics.stacks import Stack
from rl_safe_workers.driver.cluster.actors import CALL_FRAME
from rl_safe_workers.driver.session import Session
from rl_safe_workers.env import actor_env
from rl_safe_workers.errors import (
    Awaited,
    Cause,
    CommunicatorError,
    PhaseTimeoutError,
    Raised,
    RankError,
    Repeats,
    RunError,
    StoreLostError,
    Victim,
)
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role, joint_ids, trainer_id, trainer_ids

pytestmark = pytest.mark.usefixtures("without_messages")

RUN = uuid.uuid4().hex[:12]
REPOSITORY = Path(__file__).parents[2]
ACTOR = """
import sys, time
from rl_safe_workers.driver.cluster.actors import TrainerActor

class Worker:
    def train(self):
        print("here", flush=True)
        time.sleep(300)

shell = TrainerActor(None, int(sys.argv[1]))
shell._worker = Worker()
if sys.argv[2] == "call":
    shell.call("train", "train", ())
print("here", flush=True)
time.sleep(300)
"""
STACKS = """\
Thread 0x00007f0000000001 (most recent call first):
  File "{stdlib}/threading.py", line 327 in wait
  File "{site}/torch/distributed/distributed_c10d.py", line 2900 in all_gather_object

Current thread 0x00007f0000000002 (most recent call first):
  File "{site}/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "{site}/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "{site}/megatron/core/optimizer.py", line 12 in step
  File "{repository}/rl_safe_workers/driver/cluster/actors.py", line 78 in call
  File "{site}/ray/_private/worker.py", line 1069 in main_loop
"""

Start = Callable[[int, str], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a trainer of a run by its rank, and waits until it is where it stays: in a ``call``, or ``idle``."""
    processes: list[subprocess.Popen[str]] = []
    (tmp_path / "asked").mkdir()
    (tmp_path / "actor.py").write_text(ACTOR)

    def start_one(rank: int, place: str) -> subprocess.Popen[str]:
        variables = actor_env("trainer", RUN, 1.0, rank=rank, hang_dir=tmp_path / "asked")
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "actor.py"), str(rank), place],
            env={**os.environ, **variables, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


def timeout(
    missing: Sequence[int | RankId] = (1,), *, size: int = 2, name: str = "the trainers", rollouts: int = 0
) -> PhaseTimeoutError:
    """An error about missing trainers, given by number, and others, given as they are."""
    return PhaseTimeoutError(
        phase="train",
        awaited=Awaited(name, frozenset(joint_ids(trainers=size, size=size + rollouts))),
        missing=[trainer_id(one) if isinstance(one, int) else one for one in missing],
        waited_s=9.0,
        setting="rl_safe.timeouts.train",
    )


def failed(cause: Cause) -> RankError:
    return RankError(
        rank_id=trainer_id(0), phase="train", cause=cause, text="RuntimeError: Timed out", trace="", raised_at=1.0
    )


R0 = RankId(Role.ROLLOUT, 0)


def ask(patience_s: float) -> Answers:
    return ask_ranks(lambda: processes_of_run(RUN), patience_s=patience_s, call_frame=CALL_FRAME)


def collect(
    error: BaseException,
    folder: Path,
    patience_s: float = 40.0,
    ask: Callable[[float], Answers] = ask,
) -> str | None:
    """Returns the verdict."""
    hang = find(error, folder, patience_s, ask)
    return None if hang is None else hang.verdict


def find(
    error: BaseException,
    folder: Path,
    patience_s: float = 40.0,
    ask: Callable[[float], Answers] = ask,
) -> Hang | None:
    return collect_evidence(error, ask=ask, folder=folder, patience_s=patience_s)


def evidence(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "hang" / "verdict.json").read_text())
    return found


@pytest.mark.parametrize(
    "error",
    [
        RunError("no"),
        KeyboardInterrupt(),
        failed(Raised()),
        failed(Repeats(trainer_id(1))),
        CommunicatorError("plans differ"),
        PhaseTimeoutError(phase="start", awaited=Awaited("the placement group"), waited_s=1.0, setting="x"),
    ],
)
def test_a_failure_that_no_rank_waits_in_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    assert collect(error, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def ask_judge(asked: threading.Event) -> None:
    """A reward that never answers."""
    asked.wait(60)


def test_a_reward_that_hangs_in_the_driver_is_named_with_its_line_and_its_stack(tmp_path: Path) -> None:
    config, asked = RunConfig(), threading.Event()
    config.rl_safe.timeouts.reward = 0.2
    listener: Any = SimpleNamespace(check=lambda: None)
    cluster: Any = SimpleNamespace(leaves_work=False)
    session = Session(config, cluster, SimpleNamespace(), listener)  # type: ignore[arg-type]
    assert session.within(Phase.REWARD, lambda: 1) == 1
    assert not cluster.leaves_work
    with pytest.raises(PhaseTimeoutError) as caught:
        session.run_here(Phase.REWARD, lambda: ask_judge(asked))
    place = r"it is at (tests/unit/)?test_hang\.py:\d+ \(ask_judge\)"
    assert re.fullmatch(place, caught.value.detail)
    line = collect(caught.value, tmp_path, ask=lambda _: Answers())
    assert cluster.leaves_work
    asked.set()
    assert line is not None
    assert re.fullmatch(
        rf"hang: phase reward, the driver: did not finish within [\d.]+ s; {place}; evidence in \S+/hang", line
    )
    assert "in ask_judge" in (tmp_path / "hang" / "stack_driver.txt").read_text()
    assert evidence(tmp_path)["verdict"] == line


def test_evidence_of_an_earlier_run_goes_and_files_of_the_user_stay(tmp_path: Path) -> None:
    hang, theirs = tmp_path / "hang", tmp_path / "theirs"
    hang.mkdir()
    for name in ("verdict.json", "stack_trainer_7.txt", "flight_nccl_7", "notes.txt"):
        (hang / name).write_text("of before")
    theirs.write_text("precious")
    (hang / "verdict.json").unlink()
    (hang / "verdict.json").symlink_to(theirs)
    assert collect(timeout(), tmp_path) is not None
    assert evidence(tmp_path)["verdict"]
    left = {path.name for path in hang.iterdir() if path.read_text() == "of before"}
    assert (left, theirs.read_text()) == ({"notes.txt"}, "precious")


def test_evidence_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "verdict.json").write_text("precious")
    (tmp_path / "hang").symlink_to("theirs")
    assert collect(timeout(), tmp_path) is not None
    assert [(path.name, path.read_text()) for path in (tmp_path / "theirs").iterdir()] == [("verdict.json", "precious")]


@pytest.mark.parametrize(
    ("error", "arrived", "missing"),
    [
        (timeout(), {trainer_id(0)}, {trainer_id(1)}),
        (timeout([R0], size=0, rollouts=1), set(), {R0}),
        (timeout([1, R0], rollouts=2), {trainer_id(0), RankId(Role.ROLLOUT, 1)}, {trainer_id(1), R0}),
        (timeout([], size=1), {trainer_id(0)}, set()),
        (timeout([0, 1, R0], rollouts=1), set(), {trainer_id(0), trainer_id(1), R0}),
    ],
)
def test_an_error_tells_who_has_come(error: PhaseTimeoutError, arrived: set[RankId], missing: set[RankId]) -> None:
    wait = wait_of(error)
    assert wait is not None
    assert (wait.phase, wait.arrived, wait.missing) == ("train", arrived, missing)


@pytest.mark.parametrize(
    ("error", "arrived"), [(failed(Victim()), {trainer_id(0)}), (StoreLostError("rank 1 has lost it"), set())]
)
def test_a_wait_in_vain_names_nobody(error: RunError, arrived: set[RankId]) -> None:
    wait = wait_of(error)
    assert wait is not None
    assert (wait.missing, wait.arrived) == (None, arrived)


def test_a_stack_is_read_where_the_call_runs() -> None:
    site = sysconfig.get_path("purelib")  # Ray may bring a psutil of its own
    stack = Stack.parse(STACKS.format(stdlib=Path(os.__file__).parent, site=site, repository=REPOSITORY), CALL_FRAME)
    assert stack.is_in_a_call
    assert (stack.op, str(stack.place)) == ("all_reduce", "megatron/core/optimizer.py:12 (step)")


def test_a_stack_of_py_spy_is_read_too() -> None:
    stack = Stack.parse(
        'Thread 7 (active): "MainThread"\n    Event.wait (threading.py:629)\n    work (/x/mine.py:3)\n'
        'Thread 8 (idle): "Thread-1"\n    other (/x/other.py:4)\n',
        CALL_FRAME,
    )
    assert not stack.is_in_a_call
    assert [frame.function for frame in stack.frames] == ["Event.wait", "work"]


def test_a_text_without_a_stack_has_no_place() -> None:
    assert Stack.parse("Error: Permission Denied\n").place is None


def test_a_missing_rank_is_found_where_it_sleeps(start: Start, tmp_path: Path) -> None:
    start(0, "idle")
    start(1, "call")
    line = collect(timeout(), tmp_path)
    assert line is not None
    assert re.fullmatch(
        r"hang: phase train, the trainers: 0 arrived, 1 did not within 9\.0 s; "
        rf"training rank 1 is at {tmp_path}/actor\.py:8 \(train\); evidence in {tmp_path}/hang",
        line,
    )
    found = evidence(tmp_path)
    assert found["verdict"] == line
    assert [(actor["rank"], actor["stack_from"]) for actor in found["actors"]] == [
        (0, "rank"),
        (1, "rank"),
    ]
    for rank in (0, 1):
        assert "most recent call first" in (tmp_path / "hang" / f"stack_trainer_{rank}.txt").read_text()


def test_whoever_is_in_a_call_is_missing_where_an_error_names_nobody(start: Start, tmp_path: Path) -> None:
    start(0, "idle")
    start(1, "call")
    line = collect(failed(Victim()), tmp_path)
    assert line is not None
    assert line.startswith("hang: phase train, the trainers: training rank 0 gave up waiting; training rank 1 is at ")


def stop(process: subprocess.Popen[str]) -> None:
    """Stops a process. A busy machine lets it run on for a moment."""
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")


def test_a_stopped_process_is_reported_in_time(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(0, "idle")
    process = start(1, "call")
    stop(process)
    without_py_spy(monkeypatch)
    started_s = time.monotonic()
    line = collect(timeout(), tmp_path)
    assert line is not None
    # It notes its place every half second, and may have done so before it was stopped.
    assert re.search(r"; training rank 1 is stopped(, last seen at actor\.py:\d+ \(train\))?; ", line)
    assert time.monotonic() - started_s < 12  # of the 16 that it waits for answers
    assert (tmp_path / "hang" / "stack_trainer_1.txt").read_text() == "no stack: the process is stopped\n"
    assert evidence(tmp_path)["actors"][1]["status"] == "stopped"
    assert process.poll() is None


def test_a_process_that_stops_after_the_first_look_is_said_to_be_stopped(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(1, "call")
    stop(process)
    without_py_spy(monkeypatch)
    look, looks = inquiry._Inquiry._look_at, []

    def look_at(self: inquiry._Inquiry, rank: RankProcess) -> None:
        look(self, rank)
        looks.append(rank)
        if len(looks) == 1:
            rank.status = psutil.STATUS_RUNNING

    monkeypatch.setattr(inquiry._Inquiry, "_look_at", look_at)
    line = collect(timeout(), tmp_path, patience_s=4.0)
    assert line is not None
    assert "; training rank 1 is stopped" in line


def test_a_rank_without_a_process_here_is_said_to_have_none(tmp_path: Path) -> None:
    line = collect(timeout(), tmp_path, patience_s=3.0)
    assert line is not None
    assert "; training rank 1 has no process on this machine; " in line


def test_evidence_of_an_earlier_run_by_the_same_name_goes(tmp_path: Path) -> None:
    (tmp_path / "hang").mkdir()
    (tmp_path / "hang" / "stack_trainer_7.txt").touch()
    collect(timeout(), tmp_path, patience_s=3.0)
    assert [path.name for path in (tmp_path / "hang").iterdir()] == ["verdict.json"]


def test_a_process_that_does_not_listen_yet_is_not_signalled(tmp_path: Path) -> None:
    variables = actor_env("trainer", RUN, 1.0, rank=1, hang_dir=tmp_path)
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(300)"]
    process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        collect(timeout(), tmp_path, patience_s=3.0)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_a_child_of_an_actor_is_not_taken_for_it(tmp_path: Path) -> None:
    variables = actor_env("trainer", RUN, 1.0, rank=1, hang_dir=tmp_path)
    child = f"import subprocess; subprocess.run(['{sys.executable}', '-c', 'print(flush=True); input()'])"
    process = subprocess.Popen(
        [sys.executable, "-c", child],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert [(actor.rank_id, actor.pid) for actor in ask(1.0).ranks] == [(trainer_id(1), process.pid)]
    finally:
        process.communicate(b"\n")


def flight(*ended: bool, group: str = "EXPERT_GROUP") -> bytes:
    """A Flight Recorder file as torch 2.13 writes it, without what is not read."""
    entries = [
        {
            "profiling_name": "gloo:all_reduce",
            "process_group": ("3", group),
            "state": "scheduled",
            "retired": has_ended,
            "collective_seq_id": number,
            "time_created_ns": time.time_ns(),
        }
        for number, has_ended in enumerate(ended, start=1)
    ]
    return pickle.dumps({"version": "2.10", "entries": entries})


def both_in(*files: bytes) -> bytes:
    """One file with the entries of several."""
    return pickle.dumps({"entries": [entry for file in files for entry in pickle.loads(file)["entries"]]})


@pytest.mark.parametrize(
    ("file", "number"),
    [
        (flight(True, False, False), 2),
        (flight(True), None),
        (b"\x80cut off", None),
        # Of a batch of sends NCCL's record ends the last entry alone, and leaves its parts as they were.
        (flight(True, False, True), None),
        (both_in(flight(False, True, group="KERNELS"), flight(True, False)), 2),
    ],
)
def test_the_oldest_collective_under_way_is_the_one_waited_in(
    start: Start, tmp_path: Path, file: bytes, number: int | None
) -> None:
    start(0, "idle")
    (tmp_path / "asked" / "flight_gloo_7").write_bytes(file)
    line = collect(timeout(), tmp_path)
    assert line is not None
    works: Mapping[str, Any] = evidence(tmp_path)["works"]
    assert (works["7"]["number"] if number else works) == (number or {})
    assert ("phase train, the trainers, all_reduce of EXPERT_GROUP: " in line) == (number is not None)


def test_a_rank_in_a_collective_waits_for_those_that_are_in_none(start: Start, tmp_path: Path) -> None:
    start(0, "call")
    start(1, "call")
    (tmp_path / "asked" / "flight_nccl_0").write_bytes(flight(True, False))
    (tmp_path / "asked" / "flight_nccl_1").write_bytes(flight(True))
    error = timeout([0, 1, R0], rollouts=1)
    hang = find(error, tmp_path)
    assert hang is not None
    assert (
        "all_reduce of EXPERT_GROUP: training rank 0 arrived, training rank 1, rollout rank 0 did not" in hang.verdict
    )
    assert hang.culprits == {trainer_id(1), R0}
    assert error.with_missing(hang.culprits).missing == {trainer_id(1), R0}
    assert error.missing == {trainer_id(0), trainer_id(1), R0}


def answers_of(waiting: int, idle: int, *, silent: Sequence[int] = (), rollouts: int = 0) -> Answers:
    """``waiting`` trainers in a collective, ``idle`` ones in none, and of others no word: each on a node of its own."""
    trainers = trainer_ids(range(waiting + idle))
    homes = {one: f"node{one.rank}" for one in (*trainers, *trainer_ids(silent))}
    idle_work, busy_work = work("A", 1, 1.0), work("A", 2, 2.0, has_ended=False)
    others = [RankId(Role.ROLLOUT, rank) for rank in range(rollouts)]
    return Answers(
        ranks=[RankProcess(rank_id=one, pid=1, status="running") for one in (*trainers, *others)],
        records={rank: Record.of([idle_work, busy_work] if rank < waiting else [idle_work]) for _, rank in trainers},
        homes={**homes, **dict.fromkeys(others, "node0")},
        silent=[f"node{rank}" for rank in silent],
    )


def test_a_rank_of_which_nothing_was_heard_is_not_blamed(tmp_path: Path) -> None:
    error = timeout(range(6), size=6)
    hang = find(error, tmp_path, ask=lambda patience_s: answers_of(3, 1, silent=[4, 5]))
    assert hang is not None
    assert hang.culprits == {trainer_id(3)}
    assert "0-2 arrived, 3 did not within" in hang.verdict
    assert "training rank 4-5 on node4, node5 cannot be asked; no answer from node4, node5; " in hang.verdict
    assert evidence(tmp_path)["wait"]["unknown"] == [["trainer", 4], ["trainer", 5]]


def test_where_all_that_are_known_wait_nobody_else_is_blamed(tmp_path: Path) -> None:
    error = timeout([0, 1, 2, R0], size=3, rollouts=1)
    hang = find(error, tmp_path, ask=lambda patience_s: answers_of(3, 0, rollouts=1))
    assert hang is not None
    assert hang.culprits is None


def test_the_error_as_it_was_is_kept_with_the_evidence(tmp_path: Path) -> None:
    error = timeout([0, 1, R0], rollouts=1)
    hang = find(error, tmp_path, ask=lambda patience_s: answers_of(1, 1, rollouts=1))
    assert hang is not None
    assert hang.culprits == {trainer_id(1)}
    assert evidence(tmp_path)["error"] == f"PhaseTimeoutError: {error}"


def test_storage_that_does_not_answer_takes_no_verdict_away(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(1, "call")
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: time.sleep(60))
    line = collect(timeout(), tmp_path, patience_s=6.0)
    assert line is not None
    assert "; training rank 1 is at " in line


def test_files_of_other_nodes_follow_the_verdict(tmp_path: Path) -> None:
    flights = {"flight_nccl_1": zlib.compress(b"record")}
    answers = Answers(more_flights=[lambda: flights])
    assert collect(timeout(), tmp_path, ask=lambda patience_s: answers) is not None
    assert (tmp_path / "hang" / "flight_nccl_1").read_bytes() == b"record"


def test_the_culprits_files_are_kept_before_those_of_others(tmp_path: Path) -> None:
    flights = {"flight_nccl_0": b"no zlib", "flight_nccl_11": b"no zlib", "flight_nccl_1": zlib.compress(b"record")}
    for answers in (Answers(flights=flights), Answers(more_flights=[lambda: flights])):
        with pytest.raises(zlib.error):
            keep(answers, {}, tmp_path, first=[trainer_id(1)])
        assert (tmp_path / "flight_nccl_1").read_bytes() == b"record"


def test_ranks_that_all_wait_in_collectives_are_all_named(start: Start, tmp_path: Path) -> None:
    start(0, "call")
    for rank in (0, 1):
        (tmp_path / "asked" / f"flight_nccl_{rank}").write_bytes(flight(False, group=f"GROUP_{rank}"))
    hang = find(timeout([0, 1]), tmp_path)
    assert hang is not None
    assert hang.culprits is None


def test_a_flight_file_that_would_run_code_is_refused(start: Start, tmp_path: Path) -> None:
    start(0, "idle")
    (tmp_path / "asked" / "flight_gloo_7").write_bytes(pickle.dumps({"entries": Path("/")}))
    assert collect(timeout(), tmp_path) is not None
    assert evidence(tmp_path)["works"] == {}


def test_ranks_at_the_same_place_are_named_together(tmp_path: Path) -> None:
    wait = wait_of(timeout([0, 1]))
    assert wait is not None
    assert verdict(wait, trainer_ids([0, 1]), Answers(), {}, target=tmp_path) == (
        "hang: phase train, the trainers: none arrived, 0-1 did not within 9.0 s; training rank 0-1 has no process on "
        f"this machine; evidence in {tmp_path}"
    )


def test_nodes_are_named_as_far_as_they_are_few(tmp_path: Path) -> None:
    wait = wait_of(timeout(range(20), size=20))
    assert wait is not None
    ranks = trainer_ids(range(20))
    homes = {one: f"node{one.rank // 2}" for one in ranks}
    there = [RankProcess(rank_id=one, pid=1, status="sleeping") for one in ranks[:16]]
    answers = Answers(ranks=there, homes=homes, silent=["node8"])
    assert verdict(wait, ranks, answers, {}, target=tmp_path) == (
        "hang: phase train, the trainers: none arrived, 0-19 did not within 9.0 s; training rank 0-15 on 8 nodes gives "
        "no stack, sleeping; training rank 16-17 on node8 cannot be asked; training rank 18-19 on node9 has no process "
        f"there; no answer from node8; evidence in {tmp_path}"
    )


def test_ranks_of_a_node_that_does_not_answer_may_be_the_missing_ones(tmp_path: Path) -> None:
    homes = {trainer_id(0): "node0", trainer_id(1): "node1"}
    line = collect(failed(Victim()), tmp_path, ask=lambda patience_s: Answers(homes=homes, silent=["node1"]))
    assert line is not None
    assert "training rank 0 gave up waiting; training rank 1 on node1 cannot be asked; no answer from node1; " in line
    assert evidence(tmp_path)["silent_nodes"] == ["node1"]


def work(group: str, number: int, created_s: float, *, has_ended: bool = True, name: str = "") -> Work:
    return Work(op="all_reduce", group=group, number=number, has_ended=has_ended, created_s=created_s, group_name=name)


def records(**works: list[Work]) -> dict[int, Record]:
    return {int(rank.removeprefix("rank")): Record.of(of_rank) for rank, of_rank in works.items()}


def test_a_collective_that_gave_up_is_known_by_the_missing_ranks_not_having_begun_it() -> None:
    both = [work("A", 1, 1.0), work("B", 1, 2.0)]
    last = work("A", 2, 3.0)
    assert works_waited_in(records(rank0=[*both, last], rank1=both), {1}) == {0: last}
    assert works_waited_in(records(rank0=both, rank1=both), {1}) == {}
    # Of a stopped rank there is no record.
    assert works_waited_in(records(rank0=[*both, last]), {1}) == {}


def test_a_number_in_another_group_of_one_description_does_not_count() -> None:
    last, other = work("TP", 2, 1.0, name="1"), work("TP", 9, 1.0, name="2")
    assert works_waited_in(records(rank0=[last], rank2=[other]), {2}) == {0: last}
