"""The faults of the ground truth in jobs without this package, looked at from outside, and the page of what was seen.

    scripts/test --outside                                  runs the cells that have no kept result
    python -m tests.diagnosis.outside script|ray|verl|swift...   those of these hosts; verl and ms-swift need
                                                            environments of their own

A fault that leaves its job alive is explained by ``rl-safe explain --pid`` or ``--ray``. Of a job that has ended,
``rl-safe explain FOLDER`` reads its log, and under Ray the logs of its session. Beside it stand what py-spy prints of
all ranks, and the last line of the host's own error.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.diagnosis import verl_host
from tests.diagnosis.cells import ROWS, Host, Score
from tests.diagnosis.host import ROOT, Fault, variables
from tests.diagnosis.misdeeds import STORAGE
from tests.diagnosis.page import ACTS

KEPT = ROOT / "outputs" / "outside.json"
PAGE = ROOT / "docs" / "outside.md"
HERE = Path(__file__).parent
TOOLS = ROOT / ".venv" / "bin"
"""The tools of `scripts/setup test`: a job may have another environment."""
HOSTS = {"script": Host.SCRIPT, "ray": Host.VERL, "verl": Host.VERL, "swift": Host.SWIFT}
"""By name, whose faults of the ground truth they get."""
NAMES = {"script": "Megatron script", "ray": "actors on Ray", "verl": "verl", "swift": "ms-swift"}
PHASES = {
    "script": {"bootstrap", "convert", "load", "train", "save", "teardown"},
    "ray": {"load", "sync", "rollout", "logprob", "train", "save", "teardown"},
    "verl": {"bootstrap", "load", "sync", "rollout", "logprob", "train", "save"},
    "swift": {"bootstrap", "convert", "train", "save", "teardown"},
}
"""Phases that these jobs have a place for."""
LIVING = ("hang", "stop", "storage")
"""Acts after which a job stands still."""
SETTLED_S = 5.0
"""From a fault to the look: by then the other ranks wait."""
ON_RAY = ("ray", "verl")
STRIKES_S, ENDS_S, EXPLAINS_S = 240.0, 120.0, 120.0
HEAD = """# Diagnosis from outside

These jobs do not use this package. They have the faults of [diagnosis](diagnosis.md). If a job stands still,
`rl-safe explain` looks at the processes of torchrun's ranks, or at Ray's actors. If a job has ended, it reads the log
and, under Ray, the logs of the session. `scripts/test --outside` writes this page.

The hosts are a Megatron script of four ranks under torchrun, a job on Ray with two trainers and two rollout engines
without a model, verl's own `main_ppo` with such engines, and ms-swift's own `megatron sft`. NeMo RL's worker needs a
GPU, so it is not on this page. [Five of its jobs](nemo_rl_evidence.md#on-two-gpus) were looked at on two GPUs: four
answers are right, and one names nobody.

An answer is right if it names only the faulty process. The last column shows what a user reads without the command. For
a job that stands still, that is the output of `py-spy dump` for every rank, the faulty rank included. Ray and torchrun
print nothing then. For a job that has ended, it is the last line that names an error. The traceback of each rank is
above that line.

torch's analysis of Flight Recorder files takes no part: gloo writes no such file, and NCCL needs GPUs.
"""


class Job(NamedTuple):
    """A job of one host, once its fault has struck."""

    process: subprocess.Popen[bytes]
    folder: Path
    pids: Mapping[int, int]
    """Processes of the ranks, by rank. Empty under Ray."""

    @property
    def output(self) -> str:
        """Returns what it has printed."""
        return (self.folder / "job.log").read_text(errors="replace")


@contextmanager
def broken(host: str, fault: Fault, folder: Path) -> Iterator[Job]:
    """Starts a job, and waits until its fault has struck. Ends all its processes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RL_SAFE")}
    command, more = COMMANDS[host](folder)
    if host == "verl" and fault.phase == "load":
        save = [*command, "trainer.total_training_steps=1", "trainer.save_freq=1"]
        subprocess.run(save, cwd=folder, env=environment | more, capture_output=True, timeout=STRIKES_S, check=True)
    environment |= variables(fault, folder) | more
    with (folder / "job.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    family: set[psutil.Process] = set()
    try:
        deadline_s = time.monotonic() + STRIKES_S
        while not (folder / "struck").exists():
            assert time.monotonic() < deadline_s, (folder / "job.log").read_text(errors="replace")[-3000:]
            time.sleep(0.1)
            with suppress(psutil.Error):
                family |= set(psutil.Process(process.pid).children(recursive=True))
        yield Job(process, folder, _ranks(family))
    finally:
        with suppress(OSError):  # there is no such child
            os.close(os.open(folder / STORAGE, os.O_WRONLY | os.O_NONBLOCK))
        with suppress(psutil.Error):
            family |= set(psutil.Process(process.pid).children(recursive=True))
        for one in family:
            with suppress(psutil.Error):
                one.kill()
        process.kill()
        process.wait(timeout=30)


def _ranks(family: set[psutil.Process]) -> dict[int, int]:
    """Finds torchrun's ranks: the topmost processes that have a rank of their own."""
    found: dict[int, int] = {}
    for one in sorted(family, key=lambda process: process.pid, reverse=True):
        with suppress(psutil.Error):
            if (rank := one.environ().get("RANK")) is not None:
                found[int(rank)] = one.pid
    return found


def _script(folder: Path) -> tuple[list[str], dict[str, str]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    return [*launcher, str(HERE / "stock_script.py"), str(folder)], {}


def _ray(folder: Path) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, str(HERE / "stock_ray.py"), str(folder)], {"RAY_DEDUP_LOGS": "0"}


def _swift(folder: Path) -> tuple[list[str], dict[str, str]]:
    from tests.swift.conftest import write_inputs
    from tests.swift.jobs import CPU, ON_CPU, PLAIN, TRAINING, environment

    inputs = folder / "inputs"
    inputs.mkdir()
    write_inputs(inputs, experts=8)
    stock = environment()
    paths = os.pathsep.join((str(ROOT), stock["PYTHONPATH"]))
    arguments = [
        *("--model", str(inputs / "model"), "--dataset", str(inputs / "data.jsonl"), "--output_dir", "out"),
        *("--expert_model_parallel_size", "2", *TRAINING, "--train_iters", "2", *ON_CPU, *PLAIN),
        *("--external_plugins", str(CPU), str(HERE / "plugin" / "stock_plugin.py")),
    ]
    command = [str(Path(sys.executable).parent / "megatron"), "sft", *arguments]
    return command, {**stock, "PYTHONPATH": paths, "NPROC_PER_NODE": "2"}


def _verl(folder: Path) -> tuple[list[str], dict[str, str]]:
    from benchmarks.verl_glue import STOCK_ON_CPU

    own_ray = (f"+ray_kwargs.ray_init._temp_dir={folder}/r", "+ray_kwargs.ray_init.include_dashboard=false")
    return verl_host.command(folder, *own_ray), {
        "ENTRY": "stock",
        "DEVICE": "cpu",
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "VERL_USE_EXTERNAL_MODULES": "benchmarks.verl_glue,tests.diagnosis.outside.stock_verl",
        STOCK_ON_CPU: "1",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_ENGINE_VENDOR": "nvidia",
        "TORCHDYNAMO_DISABLE": "1",  # else a rank may compile for longer than the others wait to be looked at
        "RAY_DEDUP_LOGS": "0",
    }


COMMANDS: dict[str, Callable[[Path], tuple[list[str], dict[str, str]]]] = {
    "script": _script,
    "ray": _ray,
    "verl": _verl,
    "swift": _swift,
}


def seen(host: str, fault: Fault) -> dict[str, Any]:
    """Runs one cell. Returns the answer, whom it names, and what a user reads without it."""
    folder = Path(tempfile.mkdtemp(prefix="o"))
    try:
        with broken(host, fault, folder) as job:
            if fault.act in LIVING:
                time.sleep(SETTLED_S)
                how = ["--ray", (folder / "address").read_text()] if host in ON_RAY else ["--pid", str(job.process.pid)]
                pids = list(job.pids.values()) or [int(path.read_text()) for path in folder.glob("pid_*")]
                found, without = _explained(how, folder), _dumped(pids)
            else:
                with suppress(subprocess.TimeoutExpired):
                    job.process.wait(timeout=ENDS_S)
                found, without = _explained([str(folder)], folder), _last_error(job.output)
            names = _names(host, fault, job)
            return {
                "first_line": found["verdict"].replace(str(folder), "FOLDER"),
                "culprits": found["culprits"],
                "score": _score(found["culprits"], names),
                "without": without.replace(str(folder), "FOLDER"),
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _explained(how: Sequence[str], folder: Path) -> dict[str, Any]:
    answer = folder.parent / f"{folder.name}.json"
    try:
        command = [str(TOOLS / "python"), "-m", "rl_safe_workers", "explain", *how, "--json", str(answer)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environment, capture_output=True, timeout=EXPLAINS_S, check=False)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found
    finally:
        answer.unlink(missing_ok=True)


def _dumped(pids: Sequence[int]) -> str:
    """Returns what py-spy prints of processes, in words. It waits for one that is stopped."""
    lines = failed = 0
    for pid in pids:
        try:
            command = [str(TOOLS / "py-spy"), "dump", "--nonblocking", "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            lines += len(done.stdout.splitlines())
            failed += done.returncode != 0
        except subprocess.TimeoutExpired:
            failed += 1
    return f"py-spy: {lines} lines of {len(pids)} processes" + (f", {failed} without an answer" if failed else "")


def _last_error(output: str) -> str:
    told = [line.strip() for line in output.splitlines() if re.search(r"Error\b|exitcode|[Ss]ignal|died", line)]
    return told[-1][:200] if told else "nothing"


def _names(host: str, fault: Fault, job: Job) -> list[str]:
    """Returns the names of the faulty process, any of which is right."""
    process = f"process {(job.folder / 'culprit').read_text()}"
    return [process] if host in ON_RAY else [f"rank {fault.rank}", process]


def _score(culprits: Sequence[str], names: Sequence[str]) -> Score:
    if not culprits:
        return Score.INCOMPLETE
    is_it = [any(re.search(rf"\b{name}\b", culprit) for name in names) for culprit in culprits]
    return Score.RIGHT if all(is_it) else Score.WRONG


def cells(host: str) -> dict[str, Fault]:
    """Returns the faults of a host that its job has a place for, by name."""
    faults = {number: row.faults.get(HOSTS[host]) for number, row in ROWS.items()}
    return {f"{n:02d}-{host}": one for n, one in faults.items() if one is not None and one.phase in PHASES[host]}


def write_page(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the page."""
    lines = [HEAD]
    for title, acts in (("Jobs that stand still", LIVING), ("Jobs that have ended", tuple(set(ACTS) - set(LIVING)))):
        every = {name: fault for host in HOSTS for name, fault in cells(host).items() if fault.act in acts}
        known = {name: found[name] for name in every if name in found}
        counts = {one: sum(seen["score"] == one for seen in known.values()) for one in Score}
        of = f"{counts[Score.RIGHT]} of {len(known)} answers are right, {counts[Score.INCOMPLETE]} name nobody, and "
        lines += [f"## {title}", "", f"{of}{counts[Score.WRONG]} name another process.", ""]
        lines += ["| fault | host | answer | without it |", "|---|---|---|---|"]
        for name, seen_there in known.items():
            fault = every[name]
            what = f"{name[:2]}: {fault.who} {ACTS[fault.act]} in {fault.phase}"
            mark = "" if seen_there["score"] == Score.RIGHT else f"**{_said(seen_there['score'])}**: "
            texts = (what, NAMES[name[3:]], mark + seen_there["first_line"], seen_there["without"])
            lines.append("| " + " | ".join(text.replace("|", "/")[:400] for text in texts) + " |")
        lines.append("")
    lines.append(f"Machine: {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}.")
    PAGE.write_text("\n".join(lines) + "\n")


def _said(score: str) -> str:
    return "nobody" if score == Score.INCOMPLETE else str(score)


def main(hosts: Sequence[str]) -> None:
    """Runs the cells of hosts that have no kept result, and keeps each."""
    for host in hosts:
        for name, fault in cells(host).items():
            found = json.loads(KEPT.read_text()) if KEPT.exists() else {}
            if name not in found:
                found[name] = seen(host, fault)
                KEPT.parent.mkdir(exist_ok=True)
                KEPT.write_text(json.dumps(found, indent=1, sort_keys=True))
                sys.stdout.write(
                    textwrap.shorten(f"{name} {found[name]['score']}: {found[name]['first_line']}", 300) + "\n"
                )
                sys.stdout.flush()
            write_page(found)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main(sys.argv[1:])
