"""Whole runs as a user starts them, each in a folder of its own, and what they leave behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from filelock import FileLock

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "recipes"
MARK = "RL_SAFE_TEST_MARK"
"""Inherited by whatever a run starts, so that its processes are told from those of another run beside it."""
SHARED_MEMORY = Path("/dev/shm")
TIMEOUT_S = 200.0

SMALL = (
    "cluster.num_trainers=2",
    "data.train_batch_size=2",
    "data.max_response_length=8",
    "rollout.n=2",
    "actor.ppo_micro_batch_size_per_gpu=1",
)
"""The least that is still a run: half of its trainers and 4 short sequences a step."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    folder: Path
    """Its working directory."""
    code: int
    out: str
    err: str
    left: list[str]
    """Processes, shared memory and temporary files that outlive it."""

    @property
    def last_error(self) -> str:
        """The last line of stderr."""
        return (self.err.splitlines() or [""])[-1]

    @property
    def run_dir(self) -> Path:
        """The one folder under ``outputs``."""
        (run_dir,) = (self.folder / "outputs").iterdir()
        return run_dir

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


class Running:
    """A command in progress, in a session of its own and with temporary files of its own."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._mark = folder, uuid.uuid4().hex
        # Not under pytest's folder: the paths of Ray's sockets must stay short.
        self.temp = Path(tempfile.mkdtemp(prefix="t"))
        self._logs = Path(tempfile.mkdtemp(prefix="rl_safe_test_logs_"))
        self._shared_before = set(SHARED_MEMORY.iterdir())
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # As in a shell's background, and the command would inherit it: no Ctrl-C would reach it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        python_path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        variables = {MARK: self._mark, "TMPDIR": str(self.temp), "PYTHONPATH": python_path}
        with self._log("out").open("wb") as out, self._log("err").open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=os.environ | variables,
                start_new_session=True,
            )

    def _log(self, name: str) -> Path:
        return self._logs / name

    def processes(self) -> list[psutil.Process]:
        """Everything alive that this run started, itself included."""
        return marked_processes(self._mark)

    @property
    def out(self) -> str:
        """The text that it has printed so far."""
        return self._log("out").read_text()

    @property
    def err(self) -> str:
        """The text that it has printed to stderr so far."""
        return self._log("err").read_text()

    def has_started_a_trainer(self) -> bool:
        """Returns True if some process has become a trainer, whose imports then take seconds."""
        titles = []
        for process in self.processes():
            with suppress(psutil.Error):
                titles.append(" ".join(process.cmdline()))
        return any(title.startswith("ray::") and "Trainer" in title for title in titles)

    def has_finished_a_step(self) -> bool:
        """Returns True if the first line of metrics is written."""
        return any(file.read_text() for file in self.folder.glob("outputs/*/metrics.jsonl"))

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = 240.0) -> Self:
        """Waits for a condition while the command runs; fails if it ends before, or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended too early:\n{self.err}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition.__name__}"
            time.sleep(0.1)
        return self

    def finish(self, *, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Waits for the end. What is left is looked for at once: a run ends only when all of it has."""
        code = self.process.wait(timeout_s)
        return Outcome(
            folder=self.folder,
            code=code,
            out=self.out,
            err=self.err,
            left=[*self._processes_left(), *self._files_left()],
        )

    def _processes_left(self) -> Iterator[str]:
        for process in self.processes():
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                # Python's own helper ends by itself, once its parent's end of a pipe is closed: a moment later. Whoever
                # has no command line any more is ending.
                if not line or "multiprocessing.resource_tracker" in line:
                    with suppress(psutil.TimeoutExpired):
                        process.wait(5)
                        continue
                yield f"process {process.pid}: {line[:200]}"

    def _files_left(self) -> Iterator[str]:
        for path in sorted({*SHARED_MEMORY.iterdir()} - self._shared_before):
            # Another run may have removed it while nobody was found who uses it.
            if not is_in_use(path) and path.exists():
                yield str(path)
        for path in sorted(self.temp.rglob("*")):
            # The process that makes a model imports so much of torch that it gets a cache folder, which stays empty.
            if not (path.name.startswith("torchinductor_") and not any(path.iterdir())):
                yield str(path)

    def close(self) -> None:
        """Ends whatever is left, so that one failed test does not slow the next one."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        for folder in (self.temp, self._logs):
            shutil.rmtree(folder, ignore_errors=True)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Everything alive that has inherited a mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def is_in_use(path: Path) -> bool:
    """Returns True if some process has a file of shared memory open or mapped. It is then another run's.

    Mappings are told by their inode. glibc makes a named semaphore under another name, maps it, links it to its own
    name, and unlinks the other; the mapping keeps the other name.
    """
    try:
        inode = str(path.stat().st_ino)
    except FileNotFoundError:
        return False
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile
            mapped = (line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines())
            if any(fields[4] == inode and fields[5].startswith(f"{SHARED_MEMORY}/") for fields in mapped if fields[5:]):
                return True
            if any(descriptor.readlink() == path for descriptor in (process / "fd").iterdir()):
                return True
    return False


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[Running]:
    """Starts a command; ends it, and all it started, when the body is left."""
    run = Running(command, folder)
    try:
        yield run
    finally:
        run.close()


def rl_safe(recipe: str | Path, *overrides: str) -> list[str]:
    """The command line of a run; ``recipe`` is a file name in ``recipes/`` or a path."""
    return [sys.executable, "-m", "rl_safe_workers", "run", str(RECIPES / recipe), *overrides]


def finish(command: Sequence[str], folder: Path) -> Outcome:
    """Runs a command to its end."""
    with running(command, folder) as run:
        return run.finish()


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Outcome]) -> Outcome:
    """Returns the outcome of a run that all processes of pytest-xdist share; see `json_once`."""
    fields = json_once(factory, name, lambda folder: asdict(make(folder)))
    return Outcome(**{**fields, "folder": Path(fields["folder"])})


def json_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Any:
    """Returns what ``make`` returns, as JSON brings it back. All processes of pytest-xdist share it.

    The first that asks for it calls ``make``, with an empty folder.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    kept = base / f"{name}.json"
    with FileLock(base / f"{name}.lock"):
        if not kept.exists():
            (base / name).mkdir()
            kept.write_text(json.dumps(make(base / name), default=str))
    return json.loads(kept.read_text())


def files_under(folder: Path) -> Mapping[str, bytes]:
    """Every file with its contents, and every folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}
