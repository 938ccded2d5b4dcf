"""The ranks of a job on one machine. Each can find out where the others are, so that no driver is needed.

    neighbours = Neighbours(key, rank=dist.get_rank())                                 # early, on every rank
    culprits, why = blame(control.reported_failures(), silent=[1], among=neighbours)   # on each rank that fails
    neighbours.leave()                                                                 # at an orderly end

They meet in a folder of their own beside other temporary files. The first rank to fail asks all of them; the others
wait until it has their answers, because a launcher ends every process once the first has failed.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.diagnostics.answering import answer_when_asked
from rl_safe_workers.diagnostics.diagnosis import Diagnosis, Reports, diagnose, told_of_stop
from rl_safe_workers.diagnostics.inquiry import RankProcess
from rl_safe_workers.diagnostics.stopped import Stop, StoppedProcess, StopWatch, read_stops, stopped_process
from rl_safe_workers.errors import RankError, ResourceError, Stopped, first_line
from rl_safe_workers.foreign_files import read_foreign
from rl_safe_workers.ranks import RankId, trainer_id, trainer_ids
from rl_safe_workers.reaping.processes import stat_of
from rl_safe_workers.root_cause import root_cause

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""Longest wait for each of: the processes' answers, the evidence."""
_PREFIX = "rl_safe_ranks_"
_VERDICT, _DONE = "verdict", "done"
_ENTRY_BYTES = 64
_ZOMBIE = "Z"
_LOOK_S = 0.05


class Neighbours:
    """This rank among those of its job on this machine.

    Attributes:
        folder: The folder in which they meet. Only this user may read it.
        evidence: Stacks, Flight Recorder files and ``verdict.json``, once somebody has judged.
    """

    def __init__(self, key: str, *, rank: int, stop_limit_s: float = 0.0) -> None:
        """Joins them, and lets them ask this process where it is; see `answer_when_asked`.

        Each rank looks after the next one that is not stopped, and after the stopped ones between the two.

        Args:
            key: Names the job: the same on each rank, and secret.
            rank: The training rank.
            stop_limit_s: Seconds after which a rank that is stopped is ended; 0: no rank is watched.

        Raises:
            ResourceError: If the folder is another user's.
        """
        self._rank = rank
        self.folder = Path(tempfile.gettempdir()) / f"{_PREFIX}{key}"
        self.evidence = self.folder / _VERDICT
        _remove_leftovers()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ResourceError(f"{self.folder} is not a private folder of this user; remove it")
        self._others: list[RankProcess] = []
        self._listed_ns = 0
        """When the folder was changed that the others were listed in."""
        self._has_left = False
        watch = StopWatch(self.folder, stop_limit_s, self._stopped_after_me, before_end=self._judge_stop)
        answer_when_asked(self.folder, trainer_id(rank), look=watch.look if stop_limit_s > 0 else lambda: None)
        (self.folder / f"process_{rank}").write_text(f"{os.getpid()} {psutil.Process().create_time()}")

    def judge(self, reports: Reports) -> Diagnosis | None:
        """Asks the ranks here that have not reported where they are; says with which one the failure began.

        It takes twice `PATIENCE_S` at most.

        Args:
            reports: The failures that ranks have reported.

        Returns:
            None if another rank has judged before, which has ended then, or if the folder is gone.
        """
        try:
            self.evidence.mkdir(mode=0o700)
        except FileExistsError:
            self._await_judge()
            return None
        except OSError as error:  # somebody has cleaned the folder for temporary files
            logger.warning("nobody can be asked where the ranks are: %s", error)
            return None
        # A rank that has reported is on its way out: where it is now says nothing.
        silent = [one for one in _ranks_of(self.folder) if one.rank_id not in reports]
        diagnosis = diagnose(silent, patience_s=PATIENCE_S, reports=reports, evidence=self.evidence)
        with suppress(OSError):
            (self.evidence / _DONE).touch()
        return diagnosis

    def _stopped_after_me(self) -> list[StoppedProcess]:
        """Returns the stopped ranks between this one and the next that works, in the order of ranks."""
        found: list[StoppedProcess] = []
        if self._has_left:
            return found
        with suppress(FileNotFoundError):  # somebody has cleaned the folder for temporary files
            changed_ns = self.folder.stat().st_mtime_ns
            if changed_ns != self._listed_ns:
                ranks = _ranks_of(self.folder)
                self._others = [one for one in ranks if one.rank_id.rank > self._rank]
                self._others += [one for one in ranks if one.rank_id.rank < self._rank]
                self._listed_ns = changed_ns
        for one in self._others:
            if (stopped := stopped_process(one.pid, one.rank_id)) is not None:
                found.append(stopped)
            elif (stat := stat_of(one.pid)) is not None and stat.state != _ZOMBIE:
                break
        return found

    def _judge_stop(self, stop: Stop) -> None:
        """Judges the job while a rank that is about to be ended is still there, and says what has happened."""
        rank_id = stop.process.rank_id
        assert rank_id is not None, "a rank of this folder"
        diagnosis = self.judge({rank_id: stop.failure(rank_id)})
        if diagnosis is not None:
            said = f"{diagnosis.verdict}\n{diagnosis.advice}\nevidence in {self.evidence}"
            logger.error("rank %d: the job has failed on rank %d: %s", self._rank, rank_id.rank, said)

    def stops(self) -> Reports:
        """Returns the stops of ranks here that were ended for them, as their failures."""
        found = ((stop.process.rank_id, stop) for stop in read_stops(self.folder))
        return {rank_id: stop.failure(rank_id) for rank_id, stop in found if rank_id is not None}

    def _await_judge(self) -> None:
        deadline = Deadline.after(2 * PATIENCE_S)
        while not (self.evidence / _DONE).exists() and not deadline.expired:
            time.sleep(_LOOK_S)

    def leave(self) -> None:
        """Takes this rank out; the last one removes the folder. Evidence stays."""
        self._has_left = True
        (self.folder / f"process_{self._rank}").unlink(missing_ok=True)
        if not any(self.folder.glob("process_*")) and not self.evidence.exists():
            shutil.rmtree(self.folder, ignore_errors=True)  # another rank may be about to do the same


def blame(
    reports: Reports, *, silent: Collection[int], among: Neighbours | None = None
) -> tuple[Collection[RankId], str]:
    """Says with which ranks a job's failure began, and what they did.

    Args:
        reports: The failures that ranks have reported, at least one.
        silent: The training ranks that have said nothing.
        among: Where to ask if the culprits have not told what they did; None: nowhere.

    Returns:
        The ranks, none if nobody knows; and a line, which a second one about what to do may follow.
    """
    reports = {**reports, **({} if among is None else among.stops())}
    cause = root_cause(reports, pending=trainer_ids(silent))
    if among is not None and not (cause.is_told and cause.culprits <= reports.keys()):
        diagnosis = among.judge(reports)
        if diagnosis is not None and diagnosis.culprits:
            return diagnosis.culprits, f"{diagnosis.verdict}\n{diagnosis.advice}\nevidence in {among.evidence}"
    if isinstance(cause.error, RankError) and isinstance(cause.error.cause, Stopped):
        return cause.culprits, told_of_stop(cause.error)
    return cause.culprits, first_line(cause.error) if cause.is_told else "hangs, or is gone: it has said nothing"


def _ranks_of(folder: Path) -> list[RankProcess]:
    """Returns the ranks that have joined in a folder; none whose process number is another process's by now."""
    found = []
    for file in folder.glob("process_*"):
        with suppress(OSError, ValueError):  # it has left meanwhile
            entry = read_foreign(file, limit_bytes=_ENTRY_BYTES, within=folder, uid=os.getuid())
            pid, created_s = entry.decode().split()
            if _is_another(int(pid), float(created_s)):
                continue
            rank_id = trainer_id(int(file.name.removeprefix("process_")))
            found.append(RankProcess(rank_id=rank_id, pid=int(pid), folder=folder))
    return sorted(found, key=lambda one: one.rank_id)


def _is_another(pid: int, created_s: float) -> bool:
    try:
        return bool(psutil.Process(pid).create_time() != created_s)
    except psutil.NoSuchProcess:
        return False


def _remove_leftovers() -> None:
    """Removes the folders of jobs that were killed. One with evidence stays for its reader."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or removed meanwhile
            if folder.lstat().st_uid == os.geteuid() and not (folder / _VERDICT).exists():
                is_joined = any(folder.glob("process_*"))
                if is_joined and not any(psutil.pid_exists(one.pid) for one in _ranks_of(folder)):
                    shutil.rmtree(folder)
