"""The files that a rank leaves in a folder of the run on its own machine, and how others read them.

Up to nine files for each rank:

    request_<role>_<rank>.pipe a reader writes one byte here to ask for the next two files
    stack_<role>_<rank>.txt    the stacks of all threads, added each time that somebody asks, or at `STACK_SIGNAL`
    flight_gloo_<rank>         of trainers: torch's Flight Recorder record of gloo's groups
    place_<role>_<rank>.txt    the last line of code that the rank noted, its process id, and the last lines at which it
                               stood for long; outlives the process
    phase_<role>_<rank>.txt    the phase that the rank is in, if its host calls `note_phase`; outlives the process
    kills_<role>_<rank>.json   the number of OOM kills in its control group when it began
    failure_<role>_<rank>.json what the rank has failed with, if its host calls `leave_failure`
    exit_<role>_<rank>.txt     the status that the process passed to `os._exit`, and the line of code of that call
    fatal_<role>_<rank>.txt    the stacks at a signal such as SIGSEGV that ends the process, if faulthandler was off

`diagnostics.answering` writes them, and has the names above. torch itself writes the Flight Recorder's file for NCCL.
Text from these files is data: a reader accepts only files of its own user, of bounded size.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rl_safe_workers.errors import RunError
from rl_safe_workers.foreign_files import printable, read_foreign
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.root_cause import report_from_text

logger = logging.getLogger(__name__)

GLOO_FLIGHTS = "flight_gloo_"
"""The start of the names of gloo's Flight Recorder files."""
NOTED = "Noted: "
"""The start of a line about an event, after the stacks."""
STAY_S = 2.0
"""A rank notes a line of code if it stands there for at least so many seconds."""
PLACE_BYTES = 4096
"""Largest size of a file with a rank's place or exit."""
PHASE_BYTES = 256
"""Size of a file with a rank's phase: its name, filled up with spaces."""
_PLACES = {role: re.compile(rf"place_{role}_(\d+)\.txt") for role in Role}
_PIPES = {role: re.compile(rf"request_{role}_(\d+)\.pipe") for role in Role}
_FAILURE_BYTES = 2**20
_FATAL_BYTES = 2**20


def stack_file(rank_id: RankId) -> str:
    """Returns the name of the file that a rank writes its stacks to."""
    return f"stack_{rank_id.role}_{rank_id.rank}.txt"


def request_pipe(rank_id: RankId) -> str:
    """Returns the name of the pipe by which others ask a rank for its stacks and its Flight Recorder's record."""
    return f"request_{rank_id.role}_{rank_id.rank}.pipe"


def place_file(rank_id: RankId) -> str:
    """Returns the name of the file in which a rank notes where it is."""
    return f"place_{rank_id.role}_{rank_id.rank}.txt"


def phase_file(rank_id: RankId) -> str:
    """Returns the name of the file in which a rank notes its phase."""
    return f"phase_{rank_id.role}_{rank_id.rank}.txt"


def kills_file(rank_id: RankId) -> str:
    """Returns the name of the file in which a rank notes the OOM kills of its control group when it begins."""
    return f"kills_{rank_id.role}_{rank_id.rank}.json"


def failure_file(rank_id: RankId) -> str:
    """Returns the name of the file that holds what a rank has failed with."""
    return f"failure_{rank_id.role}_{rank_id.rank}.json"


def exit_file(rank_id: RankId) -> str:
    """Returns the name of the file in which a rank notes that it calls `os._exit`."""
    return f"exit_{rank_id.role}_{rank_id.rank}.txt"


def fatal_file(rank_id: RankId) -> str:
    """Returns the name of the file that a rank writes its stacks to when a signal like SIGABRT ends it."""
    return f"fatal_{rank_id.role}_{rank_id.rank}.txt"


def rank_of_place(name: str) -> RankId | None:
    """Returns the rank whose `place_file` has a name; None if it is no such file."""
    return _rank_of(name, _PLACES)


def rank_of_pipe(name: str) -> RankId | None:
    """Returns the rank whose `request_pipe` has a name; None if it is no such pipe."""
    return _rank_of(name, _PIPES)


def _rank_of(name: str, patterns: Mapping[Role, re.Pattern[str]]) -> RankId | None:
    for role, pattern in patterns.items():
        if (found := pattern.fullmatch(name)) is not None:
            return RankId(role, int(found[1]))
    return None


@dataclass(frozen=True, slots=True)
class Stay:
    """A line of code at which a rank stood for at least `STAY_S`, as its notes show."""

    since_s: float
    """Unix time in seconds at which the rank first noted the line."""
    until_s: float
    """Unix time in seconds at which the rank last noted the line."""
    holder: int
    """The process that held a file lock for which the rank waited there; 0 if none did."""
    place: str

    def __str__(self) -> str:
        return f"{self.since_s:.3f} {self.until_s:.3f} {self.holder} {self.place}"

    @property
    def is_long(self) -> bool:
        """True if it lasted for `STAY_S`."""
        return self.until_s - self.since_s >= STAY_S


def read_place(folder: Path, rank_id: RankId) -> str | None:
    """Returns the line of code that a rank was last seen at, e.g. ``"train.py:12 (step)"``; None if nobody knows.

    Args:
        folder: The folder that was passed to `answering.answer_when_asked`.
        rank_id: The rank, dead or alive.
    """
    return _read(folder, place_file(rank_id)).partition("\n")[0].strip() or None


def read_stays(folder: Path, rank_id: RankId) -> list[Stay]:
    """Returns the last lines of code at which a rank stood for long, oldest first.

    Args:
        folder: The folder that was passed to `answering.answer_when_asked`.
        rank_id: The rank, dead or alive.
    """
    found = []
    with suppress(ValueError):
        for line in _read(folder, place_file(rank_id)).split("\n")[2:-1]:
            since, until, holder, place = line.split(" ", 3)
            found.append(Stay(float(since), float(until), int(holder), place))
    return found


def ranks_by_process(folder: Path) -> dict[int, RankId]:
    """Returns the ranks that have noted where they are, by the ids of their processes, dead or alive.

    Args:
        folder: The folder that was passed to `answering.answer_when_asked`.
    """
    found = {}
    for file in folder.glob("place_*.txt"):
        rank_id, pid = rank_of_place(file.name), _read(folder, file.name).split("\n")[1:2]
        if rank_id is not None and pid and pid[0].isdecimal():
            found[int(pid[0])] = rank_id
    return found


def last_alive_s(folder: Path, rank_id: RankId) -> float | None:
    """Returns the Unix time, in seconds, of a rank's last sign of life; None if there was none.

    If the process has ended, it ended less than `answering.ALIVE_EVERY_S` after this time, unless it was stopped
    before. Its last note of where it was may be older: a process with many threads makes notes less often, because they
    cost more.
    """
    with suppress(OSError):
        return (folder / place_file(rank_id)).lstat().st_mtime
    return None


def read_phase(folder: Path, rank_id: RankId) -> str | None:
    """Returns the phase that a rank has noted; None if it was outside of phases, or nobody knows.

    Args:
        folder: The folder that was passed to `answering.answer_when_asked`.
        rank_id: The rank, dead or alive.
    """
    return _read(folder, phase_file(rank_id)).rstrip() or None


def read_failure(folder: Path, rank_id: RankId) -> RunError | None:
    """Reads the failure that `leave_failure` has written for a rank. Returns None if it has written none.

    A file that cannot be read counts as none, and is logged.

    Args:
        folder: The folder that was passed to `answering.answer_when_asked`.
        rank_id: The rank, dead or alive.
    """
    file = folder / failure_file(rank_id)
    try:
        return report_from_text(read_foreign(file, limit_bytes=_FAILURE_BYTES, within=folder, uid=os.getuid()))
    except FileNotFoundError:
        return None  # it has left none
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read: %s", file, error)
        return None


def read_exit(folder: Path, rank_id: RankId) -> tuple[int, str] | None:
    """Returns the status that a rank passed to `os._exit`, and the line of code of the call; None without a call.

    Args:
        folder: The folder that was passed to `answering.answer_when_asked`.
        rank_id: The rank.
    """
    status, _, place = _read(folder, exit_file(rank_id)).partition("\n")
    with suppress(ValueError):
        return int(status), printable(place)
    return None


def read_fatal(folder: Path, rank_id: RankId) -> str:
    """Returns the stacks that a rank wrote when a signal ended it. Returns an empty text if it wrote none.

    Args:
        folder: The folder that was passed to `answering.answer_when_asked`.
        rank_id: The rank, dead or alive.
    """
    return _read(folder, fatal_file(rank_id), limit_bytes=_FATAL_BYTES)


def events_of(text: str) -> list[str]:
    """Returns the events that a rank has kept by `answering.note_event`, oldest first, from the text of its stacks."""
    return [line.removeprefix(NOTED) for line in text.splitlines() if line.startswith(NOTED)]


def _read(folder: Path, name: str, limit_bytes: int = PLACE_BYTES) -> str:
    """Returns the text of a rank's file; an empty one if it is not there, or cannot be read."""
    with suppress(OSError):
        text = read_foreign(folder / name, limit_bytes=limit_bytes, within=folder, uid=os.getuid())
        return text.decode("utf-8", errors="replace")
    return ""
