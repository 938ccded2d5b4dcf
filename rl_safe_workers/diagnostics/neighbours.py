"""Lets the ranks of a job on one machine find out where the others are, without a driver.

    neighbours = Neighbours(key, rank=dist.get_rank())                                 # early, on every rank
    culprits, why = blame(control.reported_failures(), silent=[1], among=neighbours)   # on each rank that fails
    neighbours.leave()                                                                 # at an orderly end

The ranks share a private folder beside other temporary files. The first rank that fails asks all others. A rank that
fails later waits until the first has its answers, because a launcher ends every process once one has failed.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from rl_safe_workers.control.deadline import Background, Deadline
from rl_safe_workers.diagnostics.answering import (
    ALIVE_EVERY_S,
    answer_when_asked,
    leave_failure,
    note_phase,
    start_thread,
)
from rl_safe_workers.diagnostics.diagnosis import Diagnosis, Reports, diagnose
from rl_safe_workers.diagnostics.exit_statuses import EndWatch
from rl_safe_workers.diagnostics.inquiry import RankProcess
from rl_safe_workers.diagnostics.log_lines import Fault
from rl_safe_workers.diagnostics.proc_facts import DISK_SLEEP, GONE, STOPPED_BY_SIGNAL
from rl_safe_workers.diagnostics.rank_files import failure_file, read_failure, read_phase, read_place, read_stays
from rl_safe_workers.diagnostics.stopped import Stop, StoppedProcess, StoppedProcessWatch, read_stops, stopped_process
from rl_safe_workers.diagnostics.verdict_file import VERDICT_FILE, KeptVerdict, read_verdict
from rl_safe_workers.errors import (
    OUTSIDE,
    RankError,
    ResourceError,
    during,
)
from rl_safe_workers.foreign_files import read_foreign
from rl_safe_workers.frames import frames_of_thread, telling_frame
from rl_safe_workers.ranks import RankId, name_ranks, trainer_id
from rl_safe_workers.reaping.processes import stat_of
from rl_safe_workers.root_cause import Spot

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""Longest wait for each of: the processes' answers, the evidence."""
_PREFIX = "rl_safe_ranks_"
_VERDICT, _DONE = "verdict", "done"
_ENDED = "ended_"
"""Prefix of the name of a symbolic link. Its target is the exit code of a process. A link is created atomically."""
_ENTRY_BYTES = 64
_LOOK_S = 0.05
_TRIES = 3
"""Number of attempts to remove the folder."""
_LIST_S = 1.0
"""Longest time, in seconds, until a rank that has joined is watched for its end."""
_NOTED_S = 3 * ALIVE_EVERY_S
"""A rank that stands at a line of code notes it again within so many seconds, unless the rank has many threads."""
_LATE = "look at that line, and at the rank that gave up: it may hold what they waited for"


class Neighbours:
    """This rank among those of its job on this machine.

    Attributes:
        folder: The folder in which they meet. Only this user may read it.
        evidence: Stacks, Flight Recorder files and ``verdict.json``, once somebody has judged.
    """

    def __init__(self, key: str, *, rank: int, stop_limit_s: float = 0.0) -> None:
        """Joins the ranks on this machine, and lets them ask this process where it is; see `answer_when_asked`.

        Each rank watches the ranks after it, up to the first one that is not stopped.

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
        """Modification time of the folder in ns when `_others` was listed."""
        self._has_left = self._watches_exit = False
        self._is_ending, self._has_spoken = threading.Event(), threading.Event()
        watch = StoppedProcessWatch(
            self.folder, stop_limit_s, self._stopped_after_me, before_end=self._judge_stop, spared=self._take_back
        )
        answer_when_asked(self.folder, trainer_id(rank), look=watch.look_or_tell if stop_limit_s > 0 else lambda: None)
        (self.folder / f"process_{rank}").write_text(f"{os.getpid()} {psutil.Process().create_time()}")
        start_thread("ends of other ranks", self._note_ends)

    def _note_ends(self) -> None:
        """Notes the exit codes of the other ranks here. Every rank does so, because the others may miss one."""
        watch, listed_ns = EndWatch(), 0
        with suppress(OSError):  # the folder is gone, or this process can open no more files
            while not self._has_left:
                if (changed_ns := self.folder.stat().st_mtime_ns) != listed_ns:
                    watch.watch(one.pid for one in _ranks_of(self.folder) if one.pid != os.getpid())
                    listed_ns = changed_ns
                for pid, code in watch.wait(_LIST_S).items():
                    with suppress(FileExistsError):
                        (self.folder / f"{_ENDED}{pid}").symlink_to(str(code))
        watch.close()

    def judge(self, reports: Reports) -> Diagnosis | None:
        """Asks the ranks here that have not reported where they are, and names the ranks that the failure began with.

        It takes at most twice `PATIENCE_S`. It kills ranks that no signal can reach, because the job is over.

        Args:
            reports: The failures that ranks have reported.

        Returns:
            The diagnosis. None if another rank has judged already, which this call waits for, or if the folder is gone.
        """
        try:
            self.evidence.mkdir(mode=0o700)
        except FileExistsError:
            self._await_judge()
            return None
        except OSError as error:  # somebody has cleaned the folder for temporary files
            logger.warning("nobody can be asked where the ranks are: %s", error)
            return None
        # A rank that has reported is on its way out, so its present line tells nothing.
        silent = [one for one in _ranks_of(self.folder) if one.rank_id not in reports]
        diagnosis = diagnose(silent, patience_s=PATIENCE_S, reports=reports, evidence=self.evidence)
        for one in silent:
            if _is_out_of_reach(one):
                # The launcher's SIGTERM does not reach it, and the launcher would wait for its end: torchrun for 30 s.
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
        with suppress(OSError):
            (self.evidence / _DONE).touch()
        return diagnosis

    def last_words(self) -> tuple[Collection[RankId], str] | None:
        """Judges the job when the launcher ends this rank. Returns the same pair as `blame.blame`.

        Returns None if no rank here has failed, or if another rank judges.
        """
        if not any(map(self._has_failed, _ranks_of(self.folder))):
            return None  # no rank has failed: the user or a scheduler ends the job
        found = self.judge({})
        return None if found is None or not found.is_told else (found.culprits, self.in_lines(found))

    def _has_failed(self, one: RankProcess) -> bool:
        if (self.folder / failure_file(one.rank_id)).exists():
            return True
        # A rank that ends well leaves the folder first, perhaps between the two checks.
        return _is_gone(one.pid) and (self.folder / f"process_{one.rank_id.rank}").exists()

    def heard(self) -> tuple[Collection[RankId], str] | None:
        """Returns the verdict of another rank here, as the same pair as `blame.blame`.

        Returns None if there is no verdict, or if it does not say where the failure began.
        """
        told = self._read_verdict()
        if told is None or not (told.culprits or told.fault == Fault.SHAPES):
            return None
        return told.culprits, "\n".join((told.verdict, told.advice, f"evidence in {self.evidence}"))

    def waiting(self) -> Mapping[RankId, Spot]:
        """Returns the places of the ranks that had not failed and waited for others when a rank here judged the job."""
        told = self._read_verdict()
        return {} if told is None else told.waiting

    def last_seen(self, rank_id: RankId) -> str:
        """Returns the last place that a rank here has noted, as the end of a sentence; empty if it has noted none."""
        place, phase = read_place(self.folder, rank_id), read_phase(self.folder, rank_id)
        return "" if place is None else f"was last seen {during(phase or OUTSIDE)} at {place}"

    def came_late(self, reports: Reports) -> tuple[Collection[RankId], str] | None:
        """Names the ranks that began their wait only after the first rank had given up. Same pair as `blame.blame`.

        The end of the first rank may have freed them. If they waited for a file lock, its holder is to blame. Returns
        None if no rank came late.
        """
        waits = {one: error for one, error in reports.items() if isinstance(error, RankError)}
        first_s = min((error.raised_at for error in waits.values()), default=0.0)
        late = {
            rank_id: stay
            for rank_id, error in waits.items()
            for stay in read_stays(self.folder, rank_id)
            if stay.since_s <= first_s <= stay.until_s + _NOTED_S and stay.place != error.place
        }
        # Their reports may be stamped within the same millisecond.
        first = min((waits[one] for one in waits.keys() - late), key=lambda error: error.raised_at, default=None)
        if first is None or not late:
            return None
        pids = {one.pid: one.rank_id for one in _ranks_of(self.folder)}
        places: dict[str, list[RankId]] = {}
        for rank_id, stay in late.items():
            holder = pids.get(stay.holder, f"process {stay.holder}")
            lock = f", and waited for a file lock of {holder}," if stay.holder else ""
            places.setdefault(f"at {stay.place}{lock} until {first.rank_id} gave up", []).append(rank_id)
        said = [
            f"{name_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {where}" for where, ranks in places.items()
        ]
        said.append(f"{first.rank_id} gave up waiting {Spot(first.phase, first.op, first.place)}")
        holders = {pids[stay.holder] for stay in late.values() if stay.holder in pids}
        return holders or late.keys(), f"{'; '.join(said)}\n{_LATE}"

    def _read_verdict(self) -> KeptVerdict | None:
        try:
            return read_verdict(self.evidence / VERDICT_FILE, within=self.evidence, uid=os.getuid())
        except (OSError, ValueError) as error:
            logger.debug("the verdict of another rank cannot be read: %s", error)
            return None

    def in_lines(self, found: Diagnosis) -> str:
        """Returns a diagnosis in lines, with the folder of its evidence."""
        return in_lines(found, self.evidence)

    def note(self, phase: str | None) -> None:
        """Notes the phase that this rank has entered; None: it is outside of phases."""
        note_phase(self.folder, trainer_id(self._rank), phase)

    def leave_failure(self, error: Exception, phase: str) -> None:
        """Writes this rank's failure to a file for the others; see `answering.leave_failure`."""
        leave_failure(self.folder, error, trainer_id(self._rank), phase)

    def say(self, culprits: Collection[RankId], why: str) -> None:
        """Logs which ranks the job's failure began with. Takes the results of `blame.blame`."""
        say(self._rank, culprits, why)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Delays SIGTERM while the body reports this rank's failure, and until the traceback is printed."""
        self._is_ending.set()
        try:
            yield
        finally:
            self._has_spoken.set()

    def speak_before_sigterm(self) -> None:
        """Makes this rank log which rank has failed before SIGTERM ends it.

        A launcher sends SIGTERM to all ranks once one has failed. A Python handler would run only when the main thread
        returns to Python, and a rank in a collective may never do that. So faulthandler's handler, which is C, wakes up
        a thread. An earlier handler runs after that.
        """
        hears, tells = os.pipe()
        os.set_blocking(tells, False)
        ends_process = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        faulthandler.register(signal.SIGTERM, file=tells, all_threads=False, chain=False)
        _let_forks_be(signal.SIGTERM)

        def end() -> None:
            os.read(hears, 1)
            try:
                if self._is_ending.is_set():
                    self._has_spoken.wait(4 * PATIENCE_S)
                    threading.main_thread().join(PATIENCE_S)
                elif (words := self.last_words()) is not None:
                    self.say(*words)
                if ends_process:
                    self.leave()
            finally:
                faulthandler.unregister(signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)

        Background(end, name="last words")

    def watch_exit(self, limit_s: float) -> None:
        """Warns once, with the line of code, if this process still runs some time after the last line of its script.

        The warning shows a handler of `atexit` that hangs, or a thread that is no daemon. The watch is a thread that
        sleeps until the main thread has ended. It cannot see what Python does after these handlers, because no thread
        runs then.

        Args:
            limit_s: Seconds that the process may take to end.
        """
        if not self._watches_exit:
            self._watches_exit = True
            start_thread("exit", self._tell_late_exit, limit_s)

    def _tell_late_exit(self, limit_s: float) -> None:
        threading.main_thread().join()  # returns before Python joins other threads and calls handlers
        threading.Event().wait(limit_s)
        held = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
        places = [
            f"its thread {one.name} is at {place}"
            for one in held
            if (place := telling_frame(frames_of_thread(one))) is not None
        ]
        main = telling_frame(frames_of_thread(threading.main_thread()))
        where = ", and ".join(places) or ("no line is known" if main is None else f"it is at {main}")
        logger.warning(
            "training rank %d does not exit, %.1f s after the end of its script: %s\n"
            "the job waits for it until its atexit handlers and threads end; to end it now: kill %d",
            self._rank,
            limit_s,
            where,
            os.getpid(),
        )

    def _stopped_after_me(self) -> list[StoppedProcess]:
        """Returns the stopped ranks between this rank and the next one that runs, in the order of ranks."""
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
            elif (stat := stat_of(one.pid)) is not None and stat.state not in GONE:
                break
        return found

    def _judge_stop(self, stop: Stop) -> None:
        """Judges the job just before a stopped rank is ended, and logs the verdict."""
        rank_id = stop.process.rank_id
        assert rank_id is not None, "a rank of this folder"
        diagnosis = self.judge({rank_id: stop.failure(rank_id)})
        if diagnosis is not None:
            self.say({rank_id}, self.in_lines(diagnosis))

    def _take_back(self) -> None:
        """Removes the verdict on a stopped rank that was continued after all, so that no rank repeats it."""
        shutil.rmtree(self.evidence, ignore_errors=True)

    def stops(self) -> Reports:
        """Returns the failures of ranks here that were ended because they were stopped."""
        found = ((stop.process.rank_id, stop) for stop in read_stops(self.folder))
        return {rank_id: stop.failure(rank_id) for rank_id, stop in found if rank_id is not None}

    def failures(self) -> Reports:
        """Returns the failures that ranks here wrote by `leave_failure`."""
        left = {one.rank_id: read_failure(self.folder, one.rank_id) for one in _ranks_of(self.folder)}
        return {rank_id: report for rank_id, report in left.items() if report is not None}

    def end_stopped(self) -> None:
        """Ends ranks here that were stopped for too long, because this rank may exit before its watch ends them.

        A launcher would wait half a minute for a stopped process to end.
        """
        for stop in read_stops(self.folder):
            stop.process.end()

    def _await_judge(self) -> None:
        deadline = Deadline.after(2 * PATIENCE_S)
        while not (self.evidence / _DONE).exists() and not deadline.expired:
            time.sleep(_LOOK_S)

    def leave(self) -> None:
        """Removes this rank from the folder; the last rank removes the folder itself. Evidence stays."""
        self._has_left = True
        (self.folder / f"process_{self._rank}").unlink(missing_ok=True)
        if not _entries(self.folder) and not self.evidence.exists():
            for _ in range(_TRIES):  # a thread of notes may write a file meanwhile, and the folder is then not empty
                if self.folder.exists():
                    shutil.rmtree(self.folder, ignore_errors=True)  # another rank may be about to do the same


def say(rank: int, culprits: Collection[RankId], why: str) -> None:
    """Logs which ranks the job's failure began with.

    Args:
        rank: This training rank.
        culprits: The ranks that `blame.blame` returns.
        why: The lines that `blame.blame` returns.
    """
    names = ", ".join(str(one.rank) for one in sorted(culprits))
    on = f" on training rank {names}" if names else ""
    logger.error("training rank %d: the job has failed%s: %s", rank, on, why)


def in_lines(found: Diagnosis, evidence: Path | None) -> str:
    """Returns a diagnosis in lines, with the folder of its evidence if there is one."""
    where = "" if evidence is None else f"\nevidence in {evidence}"
    return f"{found.verdict}\n{found.advice}{where}"


def new_evidence() -> Path:
    """Makes and returns a folder for the evidence of a rank that has not joined its neighbours yet."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX)) / _VERDICT


def _entries(folder: Path) -> list[Path]:
    """Returns the files by which ranks have joined in a folder; empty if the last rank has removed the folder."""
    try:
        return list(folder.glob("process_*"))
    except FileNotFoundError:
        return []


def _ranks_of(folder: Path) -> list[RankProcess]:
    """Returns the ranks that have joined in a folder. Leaves out a rank whose process id another process now has."""
    found = []
    for file in _entries(folder):
        with suppress(OSError, ValueError):  # it has left meanwhile
            entry = read_foreign(file, limit_bytes=_ENTRY_BYTES, within=folder, uid=os.getuid())
            pid, created_s = entry.decode().split()
            if _is_another(int(pid), float(created_s)):
                continue
            rank_id = trainer_id(int(file.name.removeprefix("process_")))
            # One that ends in order leaves the folder, and one that raises leaves its failure.
            poll = partial(_exit_code, folder, int(pid))
            found.append(RankProcess(rank_id=rank_id, pid=int(pid), folder=folder, never_ends=True, poll=poll))
    return sorted(found, key=lambda one: one.rank_id)


def _exit_code(folder: Path, pid: int) -> int | None:
    """Returns a process's exit code, if some rank has noted it; else None."""
    try:
        return int(str((folder / f"{_ENDED}{pid}").readlink()))
    except (OSError, ValueError):
        return None


def _let_forks_be(signum: signal.Signals) -> None:
    """Removes faulthandler's handler of a signal in forked children: a data loader ends its workers by SIGTERM."""
    kept, handler = threading.local(), signal.getsignal(signum)

    def hold() -> None:
        kept.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signum})

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept.mask)

    def in_child() -> None:
        if signal.getsignal(signum) == handler:  # keep a handler that was set since
            faulthandler.unregister(signum)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=in_child)


def _is_out_of_reach(one: RankProcess) -> bool:
    """Returns True if a process is stopped, or was in uninterruptible sleep at the inquiry and still is."""
    stat = stat_of(one.pid)
    if stat is None:
        return False
    return stat.state == STOPPED_BY_SIGNAL or (stat.state in DISK_SLEEP and one.status == psutil.STATUS_DISK_SLEEP)


def _is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _is_another(pid: int, created_s: float) -> bool:
    try:
        return bool(psutil.Process(pid).create_time() != created_s)
    except psutil.NoSuchProcess:
        return False


def _remove_leftovers() -> None:
    """Removes the folders of jobs that were killed. Keeps a folder that holds evidence."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or removed meanwhile
            if folder.lstat().st_uid == os.geteuid() and not (folder / _VERDICT).exists():
                is_joined = any(folder.glob("process_*"))
                if is_joined and not any(psutil.pid_exists(one.pid) for one in _ranks_of(folder)):
                    shutil.rmtree(folder)
