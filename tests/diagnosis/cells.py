"""The ground truth: what users report, the fault that stands for it under each host, and the right answer.

Rows are numbered as users' reports are in docs/diagnosis.md. A cell without a fault gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.diagnosis.host import Fault
from tests.diagnosis.misdeeds import TOLD


class Host(StrEnum):
    """Where a fault strikes."""

    BUILTIN = "builtin"
    SCRIPT = "script"
    VERL = "verl"
    NEMO_RL = "nemo_rl"
    SWIFT = "swift"


class Score(StrEnum):
    """The worth of the first line of a run."""

    RIGHT = "right"
    """It names the rank, the phase and what happened there."""
    INCOMPLETE = "incomplete"
    """It names nobody else, and leaves something out."""
    WRONG = "wrong culprit"
    """It blames another rank."""


class Cell(NamedTuple):
    """One fault under one host."""

    row: int
    host: Host
    fault: Fault

    def __str__(self) -> str:
        return f"{self.row:02d}-{self.host}"


class Row(NamedTuple):
    """One kind of report."""

    report: str
    faults: Mapping[Host, Fault]
    absent: Mapping[Host, str] = MappingProxyType({})
    """Why there is no fault, by host."""


ALL = tuple(Host)
DRIVEN = (Host.BUILTIN, Host.VERL, Host.NEMO_RL)
"""Hosts that generate in this suite."""
_NO_ENGINE = {
    Host.SCRIPT: "a script generates nothing",
    Host.SWIFT: "supervised fine-tuning generates nothing; GRPO is in tests/swift",
}
_NO_PROCESS = "no process fails, so there is nobody to name"


def _everywhere(fault: Fault) -> dict[Host, Fault]:
    return dict.fromkeys(ALL, fault)


def _nowhere(why: str) -> dict[Host, str]:
    return dict.fromkeys(ALL, why)


def _engine(phase: str, act: str, detail: str = "") -> dict[Host, Fault]:
    calls = {"sync": "wake_kv_cache", "rollout": "generate"}
    common: dict[str, Any] = {"phase": phase, "act": act, "role": "rollout"}
    return {
        Host.BUILTIN: Fault(**common, rank=0, detail=detail),
        Host.VERL: Fault(**common, rank=1, detail=detail, call=calls[phase], at=2 if phase == "sync" else 1),
        Host.NEMO_RL: Fault(**common, rank=0, detail=detail),
    }


_NO_LOAD = {
    Host.NEMO_RL: "its loads are no phase: it reads a checkpoint while it builds the worker",
    Host.SWIFT: "its loads are no phase: it reads a checkpoint while it builds the trainer, in phase convert",
}
_LOADING = tuple(host for host in ALL if host not in _NO_LOAD)

ROWS: dict[int, Row] = {
    1: Row("a save takes hours, or looks stuck", _everywhere(Fault("save", "hang"))),
    2: Row(
        "the conversion of weights deadlocks at the start",
        {host: Fault("convert", "hang") for host in ALL if host is not Host.VERL},
        {Host.VERL: "it reads weights while it builds the model, and converts nothing"},
    ),
    3: Row(
        "the first collective of a save connects at the memory peak, and fails",
        _everywhere(Fault("save", "raise", detail="nccl")),
    ),
    4: Row(
        "a group connects in the first step, where memory is full",
        _everywhere(Fault("train", "raise", detail="nccl")),
    ),
    5: Row("NCCL runs out of memory when groups are reloaded", {}, _nowhere("groups take no device memory on CPU")),
    6: Row("groups are rebuilt, and a rank is missing", _everywhere(Fault("bootstrap", "hang"))),
    7: Row("vLLM runs out of memory when it wakes up", _engine("rollout", "raise", "cuda_memory"), _NO_ENGINE),
    8: Row("an async save stores stale weights", {}, _nowhere(_NO_PROCESS + "; `rl-safe audit` compares two steps")),
    9: Row("a save dies before it is complete", _everywhere(Fault("save", "kill"))),
    10: Row("a save stands still", _everywhere(Fault("save", "stop"))),
    11: Row(
        "rank 0 runs out of GPU memory in a save", _everywhere(Fault("save", "raise", rank=0, detail="cuda_memory"))
    ),
    12: Row("the kernel kills rank 0 for its memory", _everywhere(Fault("save", "kill", rank=0))),
    13: Row("a resume fails", {host: Fault("load", "raise", detail="optimizer") for host in _LOADING}, _NO_LOAD),
    14: Row(
        "a damaged checkpoint is read", {host: Fault("load", "raise", detail="corrupt") for host in _LOADING}, _NO_LOAD
    ),
    15: Row("timeouts that the user has set do nothing", {}, _nowhere(_NO_PROCESS + "; `rl-safe plan` finds it")),
    16: Row("a weight sync never ends", _engine("sync", "hang"), _NO_ENGINE),
    17: Row("a rollout engine is dead", _engine("rollout", "kill"), _NO_ENGINE),
    18: Row("a run stands still without a word", _everywhere(Fault("train", "hang"))),
    19: Row("the storage does not answer", _everywhere(Fault("save", "storage"))),
    20: Row("the run is over, and a process stays", _everywhere(Fault("teardown", "hang"))),
    21: Row(
        "an actor dies without a reason",
        {
            Host.BUILTIN: Fault("train", "exit"),
            Host.SCRIPT: Fault("train", "crash"),
            Host.VERL: Fault("train", "crash"),
            Host.NEMO_RL: Fault("start", "raise", detail="import"),
            Host.SWIFT: Fault("train", "exit"),
        },
    ),
    22: Row("orphans hold memory after a crash", {}, _nowhere(_NO_PROCESS + "; the tests of endings look for them")),
    23: Row("a trainer never ends its part of a weight sync", {h: Fault("sync", "hang") for h in DRIVEN}, _NO_ENGINE),
    24: Row("the rollout has wrong weights", {}, _nowhere(_NO_PROCESS)),
    25: Row(
        "DeepEP times out",
        {h: Fault("logprob" if h in DRIVEN else "train", "raise", detail="deepep") for h in ALL},
    ),
}
SAMPLE = frozenset(
    {
        *((row, Host.SCRIPT) for row in (3, 12, 18, 19)),
        *((row, Host.BUILTIN) for row in (16, 21)),
        *((row, Host.VERL) for row in (10, 16)),
        *((row, Host.SWIFT) for row in (3, 18)),
    }
)
"""Cells of every CI run, by row and host."""


def all_cells() -> list[Cell]:
    """Returns every cell that has a fault."""
    return [Cell(row, host, fault) for row, of_row in ROWS.items() for host, fault in of_row.faults.items()]


def expected(cell: Cell) -> list[str]:
    """Returns the patterns that the first line has to contain."""
    fault = cell.fault
    who = [rf"\b{fault.who}\b", rf"\bphase {fault.phase}\b"]
    # The engines of these hosts are tests' doubles or vLLM's own processes: where one stands still is not known.
    place = fault.role == "trainer"
    what = {
        "hang": [r"misdeeds\.py:\d+ \(hang\)"] if place else [],
        "raise": [re.escape(TOLD.get(fault.detail, "")), r"misdeeds\.py:\d+ \(fail\)"],
        "kill": [r"\bdied\b|killed by SIGKILL"],
        "stop": [r"is stopped"],
        "exit": [r"\bdied\b|exit code 3"],
        "crash": [r"\bdied\b|SIGSEGV"],
        "storage": [r"misdeeds\.py:\d+ \(wait_for_storage\)"],
    }
    return [*who, *what[fault.act]]


_BLAMED = re.compile(
    r"((?:training|rollout) rank \d+)(?: on \S+?)?:? "
    r"(?:died|failed|is |was killed|was stopped|has |gives|hangs|did not)"
)

_MISSED = re.compile(r"arrived, ([^;]+?) did not within")
"""Everyone that a line on a hang says has not come."""


def score(cell: Cell, first_line: str) -> Score:
    """Judges the first line of a run."""
    fault = cell.fault
    blamed = _BLAMED.search(first_line)
    if blamed is not None and blamed[1] != fault.who:
        return Score.WRONG
    missed = _MISSED.search(first_line)
    if missed is not None and missed[1] not in (str(fault.rank), fault.who):
        return Score.WRONG
    return Score.RIGHT if all(re.search(pattern, first_line) for pattern in expected(cell)) else Score.INCOMPLETE
