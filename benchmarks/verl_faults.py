"""Causes faults in jobs of verl, stock and ours: kills a training rank, or silences an engine."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import host_meter
from benchmarks.gpus import gpu_row
from benchmarks.host_jobs import Job
from benchmarks.table import Goal, Row, at_least, at_most
from benchmarks.verl_jobs import ON_CPU, OURS, STOCK, UNCOMPILED, WITHOUT_VLLM, Jobs, Wanted, Watch

TIMEOUT_S = 40.0
"""The deadline of the phases with a fault. Steps are shorter, even the first one, because it is not compiled."""
HANDING_OUT_S = 60.0
"""The same for generation. Agent loops are slow to take their first prompts."""
ALLOWED_S = 10.0
CUT_STOCK_S, CUT_OURS_S = (45.0 if ON_CPU else 120.0), HANDING_OUT_S + 45
"""Seconds after the fault after which a job is ended."""
NAMED = re.compile(r"^rl_safe: .*(training|rollout) rank \d on ")
"""Pattern of our verdict's first line, if it names the rank to blame."""
PHASE = re.compile(r"^rl_safe: .*phase \w+")
_ERRORS = ("ActorDiedError", "EngineDeadError", "Connection closed", "Connection reset", "Error: ")
_AFTER_SYNC_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and the phases with a short deadline in its job.

    Example: ``Fault(phases=("save",), meter="save_checkpoint:1:1:kill")``
    """

    phases: Sequence[str]
    meter: str = ""
    """The value of `host_meter.FAULT`, for a fault that a worker causes itself."""
    echo: str = ""
    """The call that a test engine does not answer, and the step of its weights."""
    outside: str = ""
    """A fault from outside while engines generate: ``rank`` kills a training rank, ``engine`` stops an engine."""
    without_vllm: bool = True


FAULTS: Mapping[str, Fault] = {
    "killed in training": Fault(phases=("train",), meter="update_actor:2:1:kill"),
    "killed in a save": Fault(phases=("save",), meter="save_checkpoint:1:1:kill"),
    "killed in the weight export": Fault(phases=("sync",), meter="update_weights:2:1:kill"),
    "silent engine": Fault(phases=("rollout",), echo="generate 2"),
}
"""Faults in jobs without vLLM."""
ENGINE_FAULTS: Mapping[str, Fault] = {
    "vLLM, killed in the weight export": Fault(phases=("sync",), meter="update_weights:2:1:kill", without_vllm=False),
    "vLLM, killed in generation": Fault(phases=("rollout", "sync"), outside="rank", without_vllm=False),
    "vLLM, silent engine": Fault(phases=("rollout", "sync"), outside="engine", without_vllm=False),
}
"""Faults in jobs with vLLM."""


def faults(jobs: Jobs, wanted: Mapping[str, Fault]) -> list[Row]:
    """Runs each fault in a job of ours and in a stock job, which is cut some time after the fault."""
    watches = {(name, who): FaultWatch(jobs, fault, who) for name, fault in wanted.items() for who in (OURS, STOCK)}
    jobs.run([_job(jobs, name, wanted[name], who, watch) for (name, who), watch in watches.items()])
    return [row for (name, who), watch in watches.items() for row in watch.rows(f"{who}, {name}")]


def _job(jobs: Jobs, name: str, fault: Fault, who: str, watch: FaultWatch) -> Wanted:
    overrides = [
        "trainer.total_training_steps=6",
        f"trainer.save_freq={1 if 'save' in fault.phases else -1}",
        *(WITHOUT_VLLM if fault.without_vllm else ()),
        *(["data.max_response_length=512"] if fault.outside else []),
    ]
    if who == OURS:
        seconds = {phase: HANDING_OUT_S if phase == "rollout" else TIMEOUT_S for phase in fault.phases}
        overrides += [f"actor_rollout_ref.rl_safe.timeouts.{phase}={limit:g}" for phase, limit in seconds.items()]
    name = f"{who}, {name}"
    if fault.echo:
        watch.echo_file = jobs.folder / f"{jobs.folder_of(name).name}_echo"
        watch.echo_file.write_text(fault.echo)
        overrides.append(f"+actor_rollout_ref.rollout.custom.fault={watch.echo_file}")
    return Wanted(name=name, who=who, overrides=overrides, variables=UNCOMPILED, fault=fault.meter, watch=watch)


class FaultWatch(Watch):
    """Causes the fault if it comes from outside, ends the job some time later, and measures the consequences."""

    def __init__(self, jobs: Jobs, fault: Fault, who: str) -> None:
        self._jobs, self._fault, self._who = jobs, fault, who
        self._limit_s = CUT_STOCK_S if who == STOCK else CUT_OURS_S
        self.echo_file: Path | None = None
        self.at_s: float | None = None
        """Unix time of the fault, in seconds; None before it."""
        self.took_s: float | None = None
        self._was_cut, self._left, self._names_who, self._names_phase = False, 0, False, False

    def look(self, job: Job) -> None:
        """Notes when the fault happens. Ends the job some time later."""
        if self.at_s is None:
            if self._fault.outside:
                self._strike(job)
            self._find(job)
        elif time.time() > self.at_s + self._limit_s:
            self._was_cut, self.took_s = True, time.time() - self.at_s
            self._tell(job, "cut")
            job.end()

    def ended(self, job: Job, *, in_a_hurry: bool) -> None:
        """Looks for processes that the job leaves behind."""
        self._find(job)
        if self.at_s is None or self._was_cut or job.ended_s is None:
            return
        self.took_s = job.ended_s - self.at_s
        self._left = len(job.left(2.0 if in_a_hurry else 20.0))
        self._tell(job, f"status {job.poll()}, {self._left} processes left")

    def rows(self, name: str) -> list[Row]:
        """Returns the measured rows."""
        ours = self._who == OURS
        if self.took_s is None:
            return [_row(f"{name}: the job had its fault, and ended", "", 0, at_least(1))]
        deadline_s = HANDING_OUT_S if "rollout" in self._fault.phases else TIMEOUT_S
        goal = at_most(deadline_s + ALLOWED_S) if ours else at_least(0)
        rows = [_row(f"{name}: {'cut' if self._was_cut else 'ended'} after", "s", self.took_s, goal)]
        if ours:
            rows.append(_row(f"{name}: who is missing is named", "", self._names_who, at_least(1)))
            rows.append(_row(f"{name}: the phase is named", "", self._names_phase, at_least(1)))
        if not self._was_cut:
            rows.append(_row(f"{name}: processes left", "", self._left, at_most(0) if ours else at_least(0)))
        return rows

    def _find(self, job: Job) -> None:
        if self.at_s is not None:
            return
        since = self.echo_file and Path(f"{self.echo_file}.since")
        if since and since.exists() and (text := since.read_text()):
            self.at_s = float(text)
        for call in job.calls(host_meter.FAULT_NAME):
            self.at_s = call.started_s

    def _tell(self, job: Job, end: str) -> None:
        lines = [line.strip() for line in job.output().splitlines()]
        named = [line for line in lines if NAMED.search(line)]
        self._names_who, self._names_phase = bool(named), any(PHASE.search(line) for line in lines)
        errors = named or [line for line in lines if any(text in line for text in _ERRORS)]
        self._jobs.report(f"{job.name}: {end} {self.took_s:.1f} s after the fault: {(errors or ['no error'])[0][:400]}")

    def _strike(self, job: Job) -> None:
        """Kills rank 1 or stops an engine, half a second after the second weight sync."""
        syncs = [call for call in job.calls("update_weights") if call.rank == 1]
        if len(syncs) < 2 or time.time() < syncs[1].started_s + syncs[1].seconds + _AFTER_SYNC_S:
            return
        pid, how = syncs[1].pid, signal.SIGKILL
        if self._fault.outside == "engine":
            pid, how = _engine(job), signal.SIGSTOP
        record = host_meter.Call(
            name=host_meter.FAULT_NAME,
            call=1,
            rank=1,
            pid=pid,
            started_s=time.time(),
            seconds=0,
            outside_torch=None,
            torch_reserved=0,
        )
        host_meter.append(record, job.calls_folder / "outside.jsonl")
        psutil.Process(pid).send_signal(how)


def _engine(job: Job) -> int:
    for process in job.processes():
        with suppress(psutil.Error):
            if "EngineCore" in " ".join(process.cmdline()):
                return process.pid
    raise RuntimeError(f"{job.name} has no process EngineCore")


def _row(name: str, unit: str, ours: float, goal: Goal) -> Row:
    return gpu_row(f"verl, {name}", unit, ours, goal)
