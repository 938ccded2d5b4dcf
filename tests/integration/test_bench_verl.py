"""The pure parts of verl's benchmark, and its jobs over a small script in verl's place."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from math import isnan
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from benchmarks import host_meter, verl, verl_bare_steps, verl_faults, verl_jobs
from benchmarks.host_jobs import Job
from benchmarks.table import at_most
from benchmarks.verl_jobs import OURS, STOCK, Jobs, Wanted

ACTIVE = "rl_safe/active"
LOG = """
(TaskRunnerV1 pid=1) step:4 - actor/loss:-0.48 - actor/grad_norm:1.5e-02 - num_turns/max:np.int32(2) - timing_s/gen:2.0
(TaskRunnerV1 pid=1) noise
(TaskRunnerV1 pid=1) step:5 - actor/loss:-0.5 - rl_safe/late_allocations:0.0
"""
SCRIPT = """
import json, os, sys, time

FAULT = os.environ["RL_SAFE_METER_FAULT"]
print("step:1 - actor/loss:-0.5", flush=True)
with open(os.environ["RL_SAFE_METER"] + "/1.jsonl", "w") as records:
    for name in ["update_actor"] * 3 + ["fault"] * bool(FAULT):
        record = dict(name=name, call=records.tell(), rank=1, pid=1, started_s=time.time(), seconds=0.1)
        records.write(json.dumps(dict(record, outside_torch=None, torch_reserved=0)) + "\\n")
time.sleep(float(sys.argv[1]))
print("rl_safe: training rank 1 on 10.0.0.4 died in phase train, last seen at loss.py:3 (loss)", flush=True)
sys.exit(int(sys.argv[2]))
"""
"""Writes the records of three updates and of a fault, sleeps and fails; its arguments are seconds and exit status."""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Jobs that run `SCRIPT`: the overrides are its arguments."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(self: Jobs, wanted: Wanted) -> Job:
        variables = {"PYTHONPATH": str(verl_jobs.ROOT)}
        command = [sys.executable, str(script), *wanted.overrides]
        return Job(wanted.name, command, self.folder_of(wanted.name), variables, fault=wanted.fault)

    monkeypatch.setattr(Jobs, "_start", start)
    return Jobs(tmp_path, lambda line: None, at_once=1)


def test_metrics_are_read_by_step() -> None:
    found = verl_jobs.metrics_of(LOG)
    assert found[4] == {"actor/loss": -0.48, "actor/grad_norm": 0.015, "timing_s/gen": 2.0}
    assert found[5]["rl_safe/late_allocations"] == 0


def test_figures_that_tell_nothing_are_not_equal() -> None:
    assert verl.apart(-0.5, -0.5) == 0
    assert verl.apart(2.0, 3.0) == 0.5
    for one, other in ((0.0, 0.0), (None, 1.0), (1.0, None), (1.0, float("nan"))):
        assert isnan(verl.apart(one, other))
    assert verl.largest([0.0, 0.5]) == 0.5
    assert isnan(verl.largest([0.5, float("nan"), 0.0]))


@pytest.mark.parametrize(
    "line",
    [
        "rl_safe: training rank 1 on 10.0.0.4 died in phase train, last seen at my_loss.py:40 (loss)",
        "rl_safe: hang: phase rollout, generation: rollout rank 0 arrived, rollout rank 1 did not within 60.4 s; "
        "rollout rank 1 on 10.0.0.4 is in no call",
    ],
)
def test_a_line_that_names_who_is_missing_is_found(line: str) -> None:
    assert verl_faults.NAMED.search(line)
    assert verl_faults.PHASE.search(line)
    assert not verl_faults.NAMED.search("ActorDiedError: The actor died unexpectedly before finishing this task.")
    assert not verl_faults.PHASE.search("training rank 0 cannot enter phase teardown while phase sync is running")


def test_steps_that_both_have_are_paired() -> None:
    rows = {row.name: row for row in verl.paired_rows("x", [1.0] * 9 + [5.0], [2.0] * 9, goal=at_most(1))}
    assert rows[f"verl, x: steps of both, the first {verl.LEFT_OUT} left out"].ours == 9
    assert rows["verl, x: median of the steps' ratios"].ours == 0.5
    (row,) = verl.paired_rows("x", [], [2.0], goal=at_most(1))
    assert not row.met


def test_a_step_with_phases_is_compared_with_the_bare_one_beside_it() -> None:
    steps = [
        {"timing_s/step": 1.0 + 0.01 * n} | ({} if verl_bare_steps.is_bare(n) else {ACTIVE: 1.0}) for n in range(1, 41)
    ]
    for step in steps:
        step["timing_s/step"] += 0.1 * step.get(ACTIVE, 0)
    rows = {row.name: row.ours for row in verl.added_rows(steps)}
    assert rows["verl, phases: pairs of steps"] == 20
    assert rows["verl, phases: added to a step, median of the pairs"] == pytest.approx(0.1), "without the drift"
    assert rows["verl, phases: lower end of its 95 % interval"] == pytest.approx(0.09)
    (row,) = verl.added_rows(steps[:1])
    assert not row.met


def test_a_bare_object_has_the_methods_of_its_stock_class() -> None:
    class Stock:
        def call(self) -> str:
            return "stock"

    class Guard:
        def call(self) -> str:
            return f"guarded {super().call()}"  # type: ignore[misc]

        def metrics(self) -> str:
            return "ours"

    class Ours(Guard, Stock):
        pass

    it = Ours()
    verl_bare_steps.take_methods(it, Stock, bare=True)
    assert (it.call(), it.metrics()) == ("stock", "ours")
    verl_bare_steps.take_methods(it, Stock, bare=False)
    assert (it.call(), vars(it)) == ("guarded stock", {})


def test_jobs_wait_for_a_place_and_their_records_are_read(jobs: Jobs) -> None:
    began = time.monotonic()
    done = jobs.run([Wanted(name=f"{n} {who}", who=who, overrides=["0.5", "0"]) for n in "ab" for who in (STOCK, OURS)])
    assert time.monotonic() - began > 2
    assert [job.poll() for job in done.values()] == [0] * 4
    assert len(verl_jobs.slowest(done["a ours"], "update_actor")) == 3


def test_jobs_that_are_stopped_leave_their_records(jobs: Jobs) -> None:
    threading.Timer(4, jobs.stop).start()
    done = jobs.run([Wanted(name=name, who=STOCK, overrides=["60", "0"]) for name in ("first", "second")])
    assert list(done) == ["first"]
    assert done["first"].poll() != 0
    assert len(verl_jobs.slowest(done["first"], "update_actor")) == 3
    assert verl_jobs.slowest(done.get("second"), "update_actor") == []


def test_parts_report_what_they_have_when_the_time_is_up(jobs: Jobs) -> None:
    jobs.stop()
    rows = {row.name: row for row in verl.measure_together(["saves", "steps"], jobs)}
    assert rows["verl, ours async save: exit status"].ours == 99
    assert not rows["verl, of a small model: save"].met
    assert not rows["verl, save"].met
    assert not any("failed" in name for name in rows)


def test_a_stock_job_is_cut_after_its_fault(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_faults, "CUT_STOCK_S", 2.0)
    watch = verl_faults.FaultWatch(jobs, verl_faults.Fault(phases=("train",)), STOCK)
    jobs.run([Wanted(name="x", who=STOCK, overrides=["60", "1"], fault="any", watch=watch)])
    (row,) = watch.rows("x")
    assert row.name == "verl, x: cut after"
    assert 2 < row.ours < 20


def test_a_fault_of_ours_is_timed_and_its_rank_named(jobs: Jobs) -> None:
    watch = verl_faults.FaultWatch(jobs, verl_faults.Fault(phases=("train",)), OURS)
    jobs.run([Wanted(name="x", who=OURS, overrides=["1", "1"], fault="any", watch=watch)])
    rows = {row.name: row for row in watch.rows("x")}
    assert 1 < rows["verl, x: ended after"].ours < 20
    assert rows["verl, x: who is missing is named"].met
    assert rows["verl, x: the phase is named"].met
    assert rows["verl, x: processes left"].met


def test_a_fault_that_does_not_come_is_missed(jobs: Jobs) -> None:
    watch = verl_faults.FaultWatch(jobs, verl_faults.Fault(phases=("train",)), OURS)
    jobs.run([Wanted(name="x", who=OURS, overrides=["0", "1"], watch=watch)])
    (row,) = watch.rows("x")
    assert not row.met


def test_calls_of_one_name_are_read(tmp_path: Path) -> None:
    for number in range(2):
        call = host_meter.Call(
            name="a", call=number, rank=0, pid=1, started_s=number, seconds=1, outside_torch=None, torch_reserved=0
        )
        host_meter.append(call, tmp_path / "1.jsonl")
    with (tmp_path / "1.jsonl").open("a") as records:
        records.write('{"name": "cut o')
    assert [call.call for call in host_meter.read_calls(tmp_path)] == [0, 1]


def test_the_slowest_rank_counts_and_the_longest_collection_is_left_out() -> None:
    found = [
        host_meter.Call(
            name="a", call=call, rank=rank, pid=1, started_s=0, seconds=seconds, outside_torch=None, torch_reserved=0,
            gc_s=gc_s,
        )
        for call, rank, seconds, gc_s in ((0, 0, 1.0, 0.0), (0, 1, 2.0, 0.0), (1, 1, 3.0, 0.0), (1, 0, 2.5, 0.5))
    ]  # fmt: skip
    assert host_meter.slowest(found) == [2.0, 3.0]
    assert host_meter.slowest(found, net=True) == [2.0, 2.5]


def test_collections_of_garbage_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        def work(self) -> None:
            gc.collect()

        def rest(self) -> None: ...

    monkeypatch.setenv(host_meter.FOLDER, str(tmp_path))
    for name in ("work", "rest"):
        host_meter.watch(Worker, name, name)
    gc.disable()
    try:
        Worker().work()
        Worker().rest()
    finally:
        gc.enable()
    work, rest = host_meter.read_calls(tmp_path)
    assert 0 < work.gc_s <= work.seconds
    assert rest.gc_s == 0


def test_the_first_calls_take_no_turns(tmp_path: Path) -> None:
    (tmp_path / "other.pid").write_text("0")
    environment = {**os.environ, host_meter.TURNS: f"{tmp_path}:mine:other"}
    script = """
from pathlib import Path
from benchmarks import host_meter

class Driver:
    def step(self): print(len(Path("turns").read_text()))

host_meter.take_turns(Driver, "step", left_out=1)
for _ in range(3): Driver().step()
"""
    command = [sys.executable, "-c", script]
    environment["PYTHONPATH"] = str(verl_jobs.ROOT)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    # The first has none before it. Those after it wait for the other, which has ended: each leaves a line of its own.
    assert done.stdout.split() == ["0", "0", str(len("mine\n"))]


def test_benchmarks_beside_each_other_have_their_own_ports() -> None:
    (first, one), (second, other) = verl_jobs._hold_ports(), verl_jobs._hold_ports()
    assert first != second
    one.close()
    other.close()
