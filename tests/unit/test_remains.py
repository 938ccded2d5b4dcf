"""The root cause in what a dead run has left; the files are like real ones, or hostile."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.diagnostics.explain_output import lines, write_html, write_json, write_trace
from rl_safe_workers.diagnostics.explanation import Explanation
from rl_safe_workers.diagnostics.log_lines import Fault, fault_of_exception, fault_of_line
from rl_safe_workers.diagnostics.remains import explain_folder
from rl_safe_workers.errors import UsageError

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 12, in step\n    x()\n'
PEER = "RuntimeError: [x/pair.cc:553] Connection closed by peer [127.0.0.1]:27805. This is typically ..."
TORCHRUN = """\
E1125 00:03:07.525000 6313 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 \
(pid: 6571) of binary: /usr/bin/python
Traceback (most recent call last):
  File "/x/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
======================================================
[1]:
  time      : 2026-11-25_00:03:07
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6570)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-25_00:03:07
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 6571)  (SIGKILL)
"""


def explained(folder: Path, files: dict[str, str], *, changed: str | None = None) -> Explanation:
    """Writes files, each 10 s after the one before, or all at one time, and explains their folder."""
    for number, (name, text) in enumerate(files.items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        at_s = 1e9 + 10 * number if changed is None else datetime.fromisoformat(changed).timestamp()
        os.utime(folder / name, (at_s, at_s))
    return explain_folder(folder)


@pytest.mark.parametrize(
    ("files", "cause", "culprit"),
    [
        (
            {"rank_0.log": f"{TRACEBACK}{PEER}\n", "rank_1.log": f"{TRACEBACK}ValueError: no such expert\n"},
            Fault.RAISED,
            "rank 1",
        ),
        ({"rank_2.log": f"{TRACEBACK}ModuleNotFoundError: No module named 'flash'\n"}, Fault.IMPORT, "rank 2"),
        ({"rank_2.log": f"{TRACEBACK}OSError: [Errno 28] No space left on device\n"}, Fault.NO_SPACE, "rank 2"),
        (
            {"a.log": f"[rank3]: {TRACEBACK.replace(chr(10), chr(10) + '[rank3]: ')}torch.OutOfMemoryError: CUDA\n"},
            Fault.DEVICE_MEMORY,
            "rank 3",
        ),
        ({"job.log": TORCHRUN}, Fault.SIGNAL, "rank 1 (process 6571)"),
        (
            {"job.log": TORCHRUN, "dmesg.txt": "[1.5] Memory cgroup out of memory: Killed process 6571 (python)\n"},
            Fault.OOM_KILL,
            "process 6571",
        ),
        (
            {"job.log": TORCHRUN, "dmesg.txt": "[1] Out of memory: Killed process 9 (x)\n"},
            Fault.SIGNAL,
            "rank 1 (process 6571)",
        ),
        (
            {
                "job.log": f'\x1b[36m(Actor pid=7)\x1b[0m {TRACEBACK.splitlines()[0]}\n(Actor pid=7)   File "/x.py", '
                "line 1, in f\n(Actor pid=7) RuntimeError: CUDA error: an illegal memory access was encountered\n"
            },
            Fault.DEVICE_ERROR,
            "Actor (process 7)",
        ),
        (
            {
                "driver.log": f"{TRACEBACK}ray.exceptions.RayTaskError(KeyError): ray::A.f() (pid=44, ip=1.2.3.4)\n"
                "  File \"/x/mine.py\", line 3, in f\nKeyError: 'loss'\n"
            },
            Fault.RAISED,
            "ray::A.f (process 44)",
        ),
        (
            {
                "logs/gcs_server.out": "[2026-11-25 00:02:01,760 W 3214 3214] (gcs_server) gcs_worker_manager.cc:70: "
                "Reporting worker exit, worker id = 65, node id = 44, exit_type = NODE_OUT_OF_MEMORY, exit_detail = x\n"
            },
            Fault.RAY_MEMORY,
            None,
        ),
        (
            {
                "logs/gcs_server.out": "[2026-11-25 00:02:01,760 W 3 3] Removing node, node name = b, death reason = "
                "UNEXPECTED_TERMINATION, death message = health check failed\n",
                "d.log": f"{TRACEBACK}ray.exceptions.ActorDiedError: The actor died\n",
            },
            Fault.NODE_LOST,
            None,
        ),
        (
            {"dmesg.txt": "[Wed Nov 25] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"},
            Fault.XID,
            None,
        ),
    ],
)
def test_the_cause_is_told_from_what_its_victims_say(
    files: dict[str, str], cause: Fault, culprit: str | None, tmp_path: Path
) -> None:
    found = explained(tmp_path, files)
    assert (found.is_known, found.cause) == (True, cause)
    assert list(found.culprits) == ([] if culprit is None else [culprit])


GLOO_ENDS = """\
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8000 vs 6000. Received data
"""


def test_a_rank_that_gloo_ends_over_its_shape_is_not_blamed(tmp_path: Path) -> None:
    found = explained(tmp_path, {"rank_2.log": GLOO_ENDS})
    assert (found.cause, list(found.culprits)) == (Fault.SHAPES, [])
    assert "which rank has another shape is not known" in found.verdict
    assert not any(row.is_culprit for row in found.rows)


def test_the_verdict_of_the_run_says_more_of_shapes_than_a_log(tmp_path: Path) -> None:
    verdict = json.dumps({"verdict": "different shapes in all_gather of dp: training rank 1 with 5000 Float"})
    assert "training rank 1" in explained(tmp_path, {"rank_2.log": GLOO_ENDS, "verdict.json": verdict}).verdict


def test_a_traceback_that_the_process_has_outlived_is_not_the_cause(tmp_path: Path) -> None:
    alive = "".join(f"step {step}\n" for step in range(50))
    found = explained(
        tmp_path,
        {
            "rank_0.log": f"{TRACEBACK}ImportError: flash_attn is optional\n{alive}",
            "rank_1.log": f"{TRACEBACK}ValueError: no such expert\n",
        },
    )
    assert (found.cause, list(found.culprits)) == (Fault.RAISED, ["rank 1"])


def test_a_worker_that_was_killed_goes_before_an_error_that_another_outlived(tmp_path: Path) -> None:
    exits = "Reporting worker exit, worker id = 65, node id = 44, exit_type = SYSTEM_ERROR, exit_detail = x"
    found = explained(
        tmp_path,
        {
            "driver.log": f"{TRACEBACK}ImportError: flash_attn is optional\n" + "step\n" * 50,
            "logs/gcs_server.out": f"[2026-11-25 00:02:01,760 W 3 3] {exits}\n",
            "logs/worker-65-ffffffff-4711.err": "",
        },
    )
    assert (found.cause, list(found.culprits)) == (Fault.SILENT_END, ["process 4711"])


RAYLET = (
    "\x1b[33m(raylet)\x1b[0m A worker died or was killed while executing a task by an unexpected system error. "
    "Worker IP address: 192.0.2.2 Worker port: 4 Worker PID: 1950 Worker exit type: SYSTEM_ERROR\n"
)
GCS = "[2026-11-25 08:38:47,646 W 17 17] (gcs_server) x.cc:70: Reporting worker exit, worker id = {}, "


def test_the_worker_that_died_in_a_task_goes_before_those_that_ended_later(tmp_path: Path) -> None:
    lines = [
        GCS.format("ab") + "exit_type = SYSTEM_ERROR",
        *["else"] * 30,
        GCS.format("cd") + "exit_type = SYSTEM_ERROR",
    ]
    died = "".join(f"{line}\n" for line in lines)
    session = {"worker-ab-01-1950.err": "", "worker-cd-01-1951.err": "", "gcs_server.out": died}
    files = {"job.log": RAYLET, **{f"r/logs/{name}": text for name, text in session.items()}}
    found = explained(tmp_path, files, changed="2026-11-25 08:38:48")
    assert found.culprits == ["process 1950"]
    assert found.cause == Fault.SILENT_END


def test_a_worker_that_died_in_a_task_is_named_however_long_ray_lives_on(tmp_path: Path) -> None:
    died = f"{GCS.format('ab')}exit_type = SYSTEM_ERROR\n" + "something else\n" * 30
    found = explained(tmp_path, {"job.log": RAYLET, "worker-ab-01-1950.err": "", "gcs_server.out": died})
    assert found.culprits == ["process 1950"]


def of_rank(rank: int, error: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in [*TRACEBACK.splitlines(), error])


@pytest.mark.parametrize("exits_first", ["rank 1", "rank 0"])
def test_an_exception_says_more_than_the_exit_codes_of_its_rank_and_of_those_that_lost_it(
    exits_first: str, tmp_path: Path
) -> None:
    report = TORCHRUN.replace("-9", "1").replace("-15", "1").replace("  (SIGKILL)", "").replace("  (SIGTERM)", "")
    if exits_first == "rank 0":
        report = report.replace("local_rank: 1 (pid: 6571)", "local_rank: 0 (pid: 6570)")
    told = of_rank(1, "torch.distributed.DistBackendError: NCCL error in") + of_rank(0, PEER)
    found = explained(tmp_path, {"job.log": f"{told}{report}"}, changed="2026-11-25 00:03:08")
    assert found.culprits == ["rank 1"]
    assert found.cause == Fault.NCCL


def test_the_first_of_a_chain_counts(tmp_path: Path) -> None:
    chain = f"{TRACEBACK}KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n"
    found = explained(tmp_path, {"rank_0.log": f"{chain}{TRACEBACK}ValueError: later\n"})
    assert "KeyError: 1" in found.verdict


def test_two_causes_without_an_order_are_both_told(tmp_path: Path) -> None:
    files = {f"rank_{n}.log": f"{TRACEBACK}{error}\n" for n, error in enumerate(("KeyError: 1", "ValueError: 2"))}
    explained(tmp_path, files)
    for name in files:
        os.utime(tmp_path / name, (1e9, 1e9))
    found = explain_folder(tmp_path)
    assert (found.is_known, list(found.culprits)) == (False, [])
    assert found.verdict.startswith("not known, because no log tells which came first: ")


def test_a_crash_that_the_driver_repeats_is_one_crash(tmp_path: Path) -> None:
    files = {
        "job.log": "(Actor pid=7) *** SIGSEGV received at time=1000000000 on cpu 1 ***\n",
        "logs/worker-65-ffffffff-7.err": "Fatal Python error: Segmentation fault\n",
    }
    explained(tmp_path, files)
    for name in files:
        os.utime(tmp_path / name, (1e9, 1e9))
    assert explain_folder(tmp_path).cause == Fault.SIGNAL


def test_victims_alone_name_nobody(tmp_path: Path) -> None:
    found = explained(tmp_path, {"rank_0.log": f"{TRACEBACK}{PEER}\n"})
    assert (found.is_known, list(found.culprits)) == (False, [])


def test_a_verdict_of_ours_is_taken_before_signs_without_a_cause(tmp_path: Path) -> None:
    verdict = {"verdict": "hang: training rank 1 is at x.py:3 (f)", "wait": {"missing": [["trainer", 1]]}}
    found = explained(tmp_path, {"hang/verdict.json": json.dumps(verdict), "rank_0.log": f"{TRACEBACK}{PEER}\n"})
    assert (found.verdict, list(found.culprits)) == (verdict["verdict"], ["training rank 1"])


def test_the_culprits_the_advice_and_the_fault_of_our_verdict_are_told(tmp_path: Path) -> None:
    verdict = {
        "verdict": "training rank 1 has ended with exit code 1",
        "culprits": [["trainer", 1]],
        "advice": "install that module",
        "fault": "import error",
        "wait": {"missing": [["trainer", 1], ["trainer", 2]]},
        "waiting": [["trainer", 0, "train", None, None]],
    }
    found = explained(tmp_path, {"verdict.json": json.dumps(verdict)})
    assert (list(found.culprits), found.advice, found.cause) == (["training rank 1"], verdict["advice"], Fault.IMPORT)


def test_a_verdict_of_ours_without_a_culprit_blames_no_rank_that_waited(tmp_path: Path) -> None:
    verdict = {"verdict": "hang", "culprits": [], "fault": None, "wait": {"missing": [["trainer", 1]]}}
    assert list(explained(tmp_path, {"verdict.json": json.dumps(verdict)}).culprits) == []


@pytest.mark.parametrize(
    "told",
    [
        "[]",
        '{"verdict": "x", "culprits": 7}',
        '{"verdict": "x", "culprits": [["trainer", 1e999]]}',
        '{"fault": "x"}',
        '{"verdict": {}}',
    ],
)
def test_a_damaged_verdict_is_not_read(told: str, tmp_path: Path) -> None:
    found = explained(tmp_path, {"verdict.json": told})
    assert not found.is_known
    assert found.notes[0].startswith("not read: verdict.json (no verdict of ours: ")


def test_a_folder_without_a_sign_says_so(tmp_path: Path) -> None:
    found = explained(tmp_path, {"a.log": "all is well\n"})
    assert found.verdict == "not known, because no file here tells how a process ended"
    with pytest.raises(UsageError, match="is not a folder"):
        explain_folder(tmp_path / "a.log")


def flight(
    works: list[tuple[str, int, bool]], size: int = 3, *, group: tuple[str, str] = ("0", "default_pg"), told: str = ""
) -> bytes:
    entries = [
        {
            "process_group": group,
            "profiling_name": f"nccl:{op}",
            "collective_seq_id": number,
            "retired": ended,
            "state": "scheduled",
            "time_created_ns": number * 10**9,
            "input_sizes": [[2]],
        }
        for op, number, ended in works
    ]
    groups = {"": {"ranks": str(list(range(size)))}} | ({group[0]: {"ranks": told}} if told else {})
    return pickle.dumps({"entries": entries, "pg_config": groups})


def test_the_rank_that_is_behind_by_its_flight_record_is_named(tmp_path: Path) -> None:
    for number in range(3):
        works = [("all_reduce", 1, True)] + [("all_gather", 2, False)] * (number != 1)
        (tmp_path / f"nccl_trace_rank_{number}").write_bytes(flight(works))
    found = explain_folder(tmp_path)
    assert found.culprits == ["rank 1"]
    assert found.verdict == "rank 1 did not come: rank 0, 2 waits in all_gather of default_pg (number 2)".replace(
        "waits", "wait"
    )
    write_trace(found, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 5
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"rank 0", "rank 1", "rank 2"}


def test_ranks_in_different_collectives_are_told_by_their_flight_records(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"flight_nccl_{number}").write_bytes(
            flight([("broadcast" if number == 2 else "all_reduce", 1, False)])
        )
    found = explain_folder(tmp_path)
    assert found.culprits == ["rank 2"]
    assert "different collectives" in found.verdict


def test_a_rank_without_a_flight_record_is_not_blamed(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"flight_nccl_{number}").write_bytes(flight([("all_reduce", 1, False)]))
    found = explain_folder(tmp_path)
    assert (found.is_known, list(found.culprits)) == (False, [])
    assert "rank 2 has left no Flight Recorder file" in found.verdict


@pytest.mark.parametrize("is_told", [True, False])
def test_groups_of_one_description_are_told_apart_by_their_names(tmp_path: Path, is_told: bool) -> None:
    for number, done in enumerate([10, 9, 4, 4]):
        name, members = ("1", "[0, 1]") if number < 2 else ("2", "[2, 3]")
        written = flight(
            [("all_reduce", done, number != 0)],
            size=0,
            group=(name, "TENSOR_MODEL_PARALLEL_GROUP"),
            told=members if is_told else "",  # gloo's files do not tell members
        )
        (tmp_path / f"flight_nccl_{number}").write_bytes(written)
    found = explain_folder(tmp_path)
    assert found.culprits == ["rank 1"]
    assert found.verdict == (
        "rank 1 did not come: rank 0 waits in all_reduce of TENSOR_MODEL_PARALLEL_GROUP (number 10)"
    )


def test_the_same_place_of_two_groups_of_one_description_is_no_mismatch(tmp_path: Path) -> None:
    for number, op in enumerate(["all_reduce", "broadcast"]):
        written = flight([(op, 1, False)], size=0, group=(str(number), "TP"), told=f"[{number}, {number + 2}]")
        (tmp_path / f"flight_nccl_{number}").write_bytes(written)
    found = explain_folder(tmp_path)
    assert "different collectives" not in found.verdict
    assert "rank 2-3 has left no Flight Recorder file" in found.verdict


def test_files_beyond_the_limit_are_told_and_their_ranks_are_not_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_safe_workers.diagnostics.remains._MOST_FLIGHTS", 3)
    for number in range(4):
        works = [("all_reduce", 1, True)] + [("all_gather", 2, False)] * (number != 1)
        (tmp_path / f"flight_nccl_{number}").write_bytes(flight(works, size=4))
    found = explain_folder(tmp_path)
    assert list(found.culprits) == []
    assert found.verdict.startswith("not known, because a Flight Recorder file of rank 3 was not read; ")
    assert "not read: 1 Flight Recorder file (3 were read before)" in found.notes


def test_a_rank_of_which_one_file_is_not_read_is_not_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_safe_workers.diagnostics.remains._MOST_FLIGHTS", 3)
    for number in range(2):
        (tmp_path / f"flight_gloo_{number}").write_bytes(flight([("barrier", 1, True)], size=2, group=("1", "TP")))
        (tmp_path / f"flight_nccl_{number}").write_bytes(flight([("all_gather", 2, False)], size=2))
    found = explain_folder(tmp_path)
    assert list(found.culprits) == []
    assert found.verdict.startswith("not known, because a Flight Recorder file of rank 1 was not read; ")


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/rl_safe_explain_was_here",)


def test_hostile_files_are_refused_or_read_within_bounds(tmp_path: Path) -> None:
    canary = Path("/tmp/rl_safe_explain_was_here")
    (tmp_path / "flight_nccl_0").write_bytes(pickle.dumps({"entries": [_Runs()]}))
    (tmp_path / "flight_nccl_1").write_bytes(b"\x80\x04" + b"(" * 2**20)
    (tmp_path / "flight_nccl_2").write_text('{"entries": 7}')
    with (tmp_path / "huge.log").open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "endless.log").write_bytes(b"x" * (20 * 2**20))
    (tmp_path / "binary.log").write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "verdict.json").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "link.log").symlink_to("/etc/passwd")
    (tmp_path / "rank_0.log").write_text(f"{TRACEBACK}ValueError: \x1b]0;title\x07 </td><script>\n")
    found = explain_folder(tmp_path)
    assert (found.cause, list(found.culprits)) == (Fault.RAISED, ["rank 0"])
    assert sum(note.startswith("not read: ") for note in found.notes) == 4
    assert not canary.exists()
    write_html(found, tmp_path / "why.html")
    write_json(found, tmp_path / "why.json")
    assert "<script>" not in (tmp_path / "why.html").read_text()
    assert not any(character in line for line in lines(found) for character in "\x1b\x07")


def test_the_command_prints_cause_and_advice_first(tmp_path: Path) -> None:
    (tmp_path / "rank_1.log").write_text(f"{TRACEBACK}ValueError: no such expert\n")
    command = [sys.executable, "-m", "rl_safe_workers", "explain", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()[:2]
    assert first == "exception: rank 1 at /home/me/train.py:12 (step): ValueError: no such expert (rank_1.log:4)"
    assert second == "to do: look at the line that raised it"


def test_the_command_refuses_processes_that_do_not_exist() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    command = [sys.executable, "-m", "rl_safe_workers", "explain", "--pid", str(ended.pid)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert f"there is no process {ended.pid}" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["x", "--pid", "1"], ["--pid", "1", "--ray", "auto"], ["x", "--job", "1"]])
def test_the_command_takes_one_subject(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "rl_safe_workers", "explain", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert "rl-safe: error: " in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "Some common causes include: (1) the process was killed by the OOM killer due to high memory usage",
        "step 3: No error, exit code unknown",
        "death reason = EXPECTED_TERMINATION",
        "Killed 3 of 4 experts",
    ],
)
def test_a_line_that_only_mentions_a_failure_tells_of_none(text: str) -> None:
    assert fault_of_line(text) is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("ray.exceptions.ActorDiedError: The actor died unexpectedly", Fault.PEER_LOST),
        ("ray.exceptions.GetTimeoutError: Get timed out: some object(s) not ready.", Fault.TIMEOUT),
        ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory", Fault.RAY_MEMORY),
        ("MemoryError", Fault.HOST_MEMORY),
        ("KeyboardInterrupt", Fault.ASKED),
        ("rl_safe_workers.errors.PhaseTimeoutError: phase train: rank 1 did not arrive", Fault.DEADLINE),
        ("torch.distributed.DistBackendError: NCCL error in: x", Fault.NCCL),
        ("mine.Error: no", Fault.RAISED),
    ],
)
def test_an_exception_is_classified_by_its_type_first(text: str, fault: Fault) -> None:
    assert fault_of_exception(text) is fault
