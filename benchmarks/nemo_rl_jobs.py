"""Runs jobs of NeMo RL side by side on the same GPUs, with its script or ours, and measures them from outside."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from filelock import FileLock, Timeout

from benchmarks import host_jobs
from benchmarks.host_meter import FAULT_NAME, TURNS, Call
from benchmarks.nemo_rl_meter import FIRST_VLLM_PORT, JOB, OURS, SIDE
from rl_safe_workers.errors import ResourceError

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes" / "nemo_rl"
START = ROOT / "benchmarks" / "nemo_rl_start"
FIRST_PORT, PORTS, PLACES = 1400, 30, 20
_FIRST_VLLM_PORT, _VLLM_PORTS = 25_000, 200
"""First port and number of ports. Each job on the machine has its own ports, in the range that NeMo RL uses. So at most
20 jobs run at a time."""
_PLACES = itertools.count()
KEPT_BYTES = 300_000
"""Largest number of bytes to keep of one log."""
IS_CUT = threading.Event()
"""Set when all jobs must end."""
_POLL_S, _LEFT_AFTER_S = 0.2, 5.0
STANDS_STILL_S = 20.0
_VARIABLES = {
    "RAY_DEDUP_LOGS": "0",
    "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
    "TORCH_CUDA_ARCH_LIST": "9.0",
    # Several jobs share the cores and the memory of the machine.
    "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 16}),
    "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.01",
}
_SHARED = ("++policy.generation.vllm_kwargs.kv_cache_memory_bytes=1073741824",)
"""Overrides of all jobs. Without them, vLLM refuses to start if another job gives memory back meanwhile."""
_ERROR = re.compile(r"^(?:\([^)]*\) *)?(\w+(?:\.\w+)*(?:Error|Exception|Timeout)\b:? ?.*)$")
_MISSED = re.compile(r"the bootstrap has missed (.*)")
_TAKEN = re.compile(r"took (\d+) MiB")
_VENVS = ("nemo_rl.algorithms.async_utils.ReplayBuffer", "nemo_rl.algorithms.async_utils.AsyncTrajectoryCollector")
"""Actors for which NeMo RL always makes a Python environment with uv, unless one exists."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of a recipe.

    Example: ``Job(name="stock", side=STOCK, recipe="tiny-1train-1vllm", folder=Path("/tmp/jobs"))``
    """

    name: str
    """A short name; see `Run.ray`."""
    side: str
    recipe: str
    folder: Path
    """Folder that jobs which run at the same time share. Each job has a folder in it, and continues earlier runs."""
    overrides: Sequence[str] = ()
    fault: str = ""
    """The value of `FAULT`."""
    turns_with: str = ""
    """Name of the job with which it takes turns."""
    model: str = "tiny"
    """Name of a folder in `folder` that ``make_tiny.py`` has made."""

    @property
    def own(self) -> Path:
        """The job's working directory."""
        return self.folder / self.name


@dataclass(kw_only=True)
class Run:
    """One start of a job."""

    job: Job
    number: int
    """Number of earlier starts of the job."""
    running: host_jobs.Job
    exit_code: int | None = None
    gone_s: float | None = None
    """Unix time when the last process ended; None if some had to be killed."""
    left: list[str] = field(default_factory=list)
    """Processes that still ran some seconds after the script had ended, or when the job was cut."""
    was_cut: bool = False

    @property
    def meter(self) -> Path:
        """The folder of the meter's records."""
        return self.running.calls_folder

    @property
    def log(self) -> Path:
        """The output of the script."""
        return self.running.folder / "log"

    @property
    def ray(self) -> Path:
        """Ray's folder. Its path must be short, because the path of a socket in it may have only 107 bytes."""
        return _ray_folder(self.job, self.number)

    @property
    def calls(self) -> list[Call]:
        """All metered calls."""
        return self.running.calls()

    @property
    def fault_s(self) -> float | None:
        """Unix time of the fault; None if it has not happened."""
        return next((call.started_s for call in self.calls if call.name == FAULT_NAME), None)

    def error(self) -> str:
        """Returns the last line of the log with an error, or an empty string."""
        found = [match[1] for line in self.running.output().splitlines() if (match := _ERROR.match(line))]
        return found[-1] if found else ""

    def ray_address(self) -> str:
        """Returns the address of the job's own Ray."""
        lines = [" ".join(process.cmdline()) for process in self.running.processes()]
        return next(match[1] for line in lines if (match := re.search(r"--gcs-address=(\S+)", line)))

    def late_mib(self) -> int:
        """Returns the MiB that our watch saw collectives take after the bootstrap."""
        lines = [match[1] for match in _MISSED.finditer(self.running.output())]
        return sum(int(taken[1]) for line in lines for taken in _TAKEN.finditer(line))

    def steps(self) -> list[dict[str, float]]:
        """Returns reward and log-probability gaps of each step, from NeMo RL's own records of its batches."""
        files = self.job.own.glob("logs/**/train_data_step*.jsonl")
        return [_step(path) for path in sorted(files, key=lambda path: int(path.stem.removeprefix("train_data_step")))]


def module_search_path(*first: Path) -> str:
    """Returns ``PYTHONPATH`` with some folders and this checkout in front."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*map(str, first), str(ROOT), *filter(None, given)]))


def run_jobs(
    jobs: Sequence[Job], *, limit_s: float, cut_s: float = 120.0, look: Callable[[Run], None] | None = None
) -> list[Run]:
    """Runs jobs at the same time. Waits until none of their processes is left, and ends those that remain.

    Args:
        jobs: The jobs, with different names.
        limit_s: Seconds for all jobs.
        cut_s: Seconds within which a job must end after its fault.
        look: Is called with each run `STANDS_STILL_S` after its fault, on a thread of its own.

    Raises:
        Exception: An error that ``look`` has raised, once all jobs have ended.
        ResourceError: If other jobs on this machine have all ports.
    """
    with ExitStack() as places:
        numbers = [places.enter_context(own_place()) for _ in jobs]
        runs = [_start(job, number) for job, number in zip(jobs, numbers, strict=True)]
        began = time.time()
        with ThreadPoolExecutor(len(runs)) as pool:
            looks = [pool.submit(_look_when_still, run, look) for run in runs if look is not None]
            _await_ends(runs, began=began, limit_s=limit_s, cut_s=cut_s)
        for each in looks:
            each.result()
        return runs


@contextmanager
def own_place() -> Iterator[int]:
    """Yields the number of a range of ports that no other job on this machine has until the body ends."""
    first = next(_PLACES)
    for place in ((first + more) % PLACES for more in range(PLACES)):
        lock = FileLock(Path(tempfile.gettempdir()) / f"rl_safe_bench_ports_{place}.lock")
        try:
            held = lock.acquire(blocking=False)
        except (Timeout, PermissionError):  # the file of another user
            continue
        with held:
            yield place
        return
    raise ResourceError(f"bench nemo_rl: {PLACES} other jobs have all ports")


def _look_when_still(run: Run, look: Callable[[Run], None]) -> None:
    while run.gone_s is None and not run.was_cut:
        if run.fault_s is not None and time.time() - run.fault_s > STANDS_STILL_S:
            look(run)
            return
        time.sleep(_POLL_S)


def _await_ends(runs: Sequence[Run], *, began: float, limit_s: float, cut_s: float) -> None:
    try:
        while any(run.gone_s is None and not run.was_cut for run in runs):
            time.sleep(_POLL_S)
            for run in runs:
                if run.gone_s is None and not run.was_cut:
                    _look_at(run, cut=IS_CUT.is_set() or time.time() - began > limit_s, cut_s=cut_s)
    finally:
        for run in runs:
            run.running.end()


def keep_logs(runs: Sequence[Run], archive: Path) -> None:
    """Packs the logs and records of runs, and Ray's logs about them."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as packed:
        for run in runs:
            ray_logs = sorted(run.ray.glob("ray/session_2*/logs/*"))
            for path in [
                run.log,
                *run.running.folder.glob("explained*"),
                *run.meter.glob("*"),
                *ray_logs,
                *run.job.own.glob("logs/**/*.jsonl"),
            ]:
                if path.is_file() and path.stat().st_size:
                    _add(packed, path, f"{run.job.name}/{run.number}/{path.name}")


def _add(packed: tarfile.TarFile, path: Path, name: str) -> None:
    """Adds a file to an archive; of a long file, only its end."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - KEPT_BYTES))
        info = tarfile.TarInfo(name)
        info.size = min(path.stat().st_size, KEPT_BYTES)
        packed.addfile(info, file)


def _start(job: Job, place: int) -> Run:
    number = len(list(job.own.glob("run*")))
    source = Path(os.environ["NEMO_RL_SRC"])
    script = RECIPES / "run_grpo_safe.py" if job.side == OURS else source / "examples" / "run_grpo.py"
    overrides = [
        *_SHARED,
        f"checkpointing.checkpoint_dir={job.own}/results",
        f"logger.log_dir={job.own}/logs",
        f"cluster.master_port_range_low={FIRST_PORT + place * PORTS}",
        f"cluster.master_port_range_high={FIRST_PORT + (place + 1) * PORTS - 1}",
        *job.overrides,
    ]
    command = [sys.executable, str(script), "--config", str(RECIPES / f"{job.recipe}.yaml"), *overrides]
    variables = _variables(job, number) | {FIRST_VLLM_PORT: str(_FIRST_VLLM_PORT + place * _VLLM_PORTS)}
    folder = job.own / f"run{number}"
    return Run(job=job, number=number, running=host_jobs.Job(job.name, command, folder, variables, fault=job.fault))


def _variables(job: Job, number: int) -> dict[str, str]:
    _ray_folder(job, number).mkdir(parents=True)
    venvs = job.own / "venvs"
    for name in _VENVS:
        _take_this_python(venvs / name / "bin" / "python")
    found = {
        **_VARIABLES,
        "PYTHONPATH": module_search_path(START),
        "RAY_TMPDIR": str(_ray_folder(job, number)),
        "RL_SAFE_TINY": str(job.folder / job.model),
        "NRL_MEGATRON_CHECKPOINT_DIR": str(job.own / "converted"),
        "NEMO_RL_VENV_DIR": str(venvs),
        "HF_DATASETS_CACHE": str(job.own / "datasets"),
        "TRITON_CACHE_DIR": str(job.own / "triton"),
        SIDE: job.side,
        JOB: job.name,
    }
    if job.turns_with:
        found[TURNS] = f"{job.folder}:{job.name}:{job.turns_with}"
    return found


def _ray_folder(job: Job, number: int) -> Path:
    return job.own / f"t{number}"


def _take_this_python(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        path.chmod(0o755)


def _look_at(run: Run, *, cut: bool, cut_s: float) -> None:
    now = time.time()
    run.exit_code = run.running.poll()
    fault_s = run.fault_s if run.job.fault else None
    cut = cut or (fault_s is not None and now - fault_s > cut_s)
    if run.exit_code is None and not cut:
        return
    ended_s = run.running.ended_s
    if not run.running.processes():
        run.gone_s = now
    elif cut or (ended_s is not None and now - ended_s > _LEFT_AFTER_S and not run.left):
        run.left = run.running.left(settle_s=0)
        if cut or fault_s is None:
            run.was_cut = True
            run.running.end()


def _step(path: Path) -> dict[str, float]:
    rewards: list[float] = []
    gaps: list[float] = []
    for line in path.read_text().splitlines():
        row: Mapping[str, Any] = json.loads(line)
        rewards += _flat(row["rewards"])
        theirs, ours = _flat(row["generation_logprobs"]), _flat(row["prev_logprobs"])
        gaps += [abs(a - b) for a, b, kept in zip(theirs, ours, _flat(row["token_loss_mask"]), strict=True) if kept]
    return {"reward": mean(rewards), "mean_gap": mean(gaps), "largest_gap": max(gaps)}


def _flat(value: Any) -> list[float]:
    return [each for part in value for each in _flat(part)] if isinstance(value, list) else [float(value)]
