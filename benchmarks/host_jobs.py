"""Runs jobs of host frameworks, each in its own folder. Ends them in time, and measures them from outside."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks import host_meter
from rl_safe_workers.config import SeededModelConfig

_MARK = "RL_SAFE_BENCH_JOB"
"""Environment variable that every process of a job inherits."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RES_OPTIONS": "attempts:0",
    "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "rl_safe_bench_inductor"),
    # Without this, each training process starts one compiling process per core.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "WANDB_MODE": "disabled",
}
"""Environment variables of a job on a machine without a network. All jobs share the cache of torch's compiler."""
LOGS = "RL_SAFE_BENCH_LOGS"
"""Environment variable: a folder that keeps the logs of the jobs."""
_SETTLE_S = 20.0
"""Seconds that Ray may take to end its own processes after the command has ended."""
WIDE_MODEL = SeededModelConfig(
    num_hidden_layers=2,
    hidden_size=4096,
    intermediate_size=8192,
    moe_intermediate_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    num_experts=4,
    num_experts_per_tok=2,
)
"""A model of 0.5 B parameters in two wide layers, for timed steps. With 16,000 tokens at a time, a layer keeps a GPU
busy for longer than Python takes to launch it."""


_NODES, _DEVICES = Path("/sys/devices/system/node"), Path("/sys/bus/pci/devices")
_CPU_LIST = re.compile(r"(\d+)(?:-(\d+))?")


@contextmanager
def on_one_numa_node() -> Iterator[int]:
    """Keeps the jobs that this thread starts on the CPUs of one NUMA node. Yields the number of these CPUs.

    The jobs' memory is then on that node, too, while it has room, so that jobs can be compared. A job may choose other
    CPUs itself. The node is that of the first GPU, if the kernel tells it; else the node with most CPUs.
    """
    before = os.sched_getaffinity(0)
    nodes = {
        int(path.parent.name.removeprefix("node")): cpus_in(path.read_text()) & before
        for path in _NODES.glob("node[0-9]*/cpulist")
    }
    chosen = nodes.get(_node_of_first_gpu()) or max(nodes.values(), key=len, default=set()) or before
    os.sched_setaffinity(0, chosen)
    try:
        yield len(chosen)
    finally:
        os.sched_setaffinity(0, before)


def cpus_in(text: str) -> set[int]:
    """Returns the CPUs of a list such as ``0-3,8``."""
    return {cpu for first, last in _CPU_LIST.findall(text) for cpu in range(int(first), int(last or first) + 1)}


def _node_of_first_gpu() -> int:
    """Returns the NUMA node of this process's first GPU. Without a GPU, or if the kernel names no node, returns -1."""
    import torch

    if not torch.cuda.device_count():
        return -1
    gpu = torch.cuda.get_device_properties(0)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    path = _DEVICES / address / "numa_node"
    return int(path.read_text()) if path.exists() else -1


class Job:
    """One run of a command. Its records are in ``folder/calls``, its output in ``folder/log``."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, variables: Mapping[str, str], *, fault: str = ""
    ) -> None:
        """Starts the job.

        Args:
            name: Name in the table.
            command: The command line.
            folder: A folder that does not exist.
            variables: Environment variables, added to `OFFLINE`.
            fault: The value of `host_meter.FAULT`.
        """
        self.name, self.folder, self._mark = name, folder, uuid.uuid4().hex
        self.calls_folder = folder / "calls"
        self.calls_folder.mkdir(parents=True)
        environment = {
            **os.environ,
            **OFFLINE,
            _MARK: self._mark,
            host_meter.FOLDER: str(self.calls_folder),
            host_meter.FAULT: fault,
            **variables,
        }
        self.started_s = time.time()
        self.ended_s: float | None = None
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def poll(self) -> int | None:
        """Returns the exit status of the command, or None while it runs."""
        status = self.process.poll()
        if status is not None and self.ended_s is None:
            self.ended_s = time.time()
        return status

    def processes(self) -> list[psutil.Process]:
        """Returns the living processes of the job."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def left(self, settle_s: float = _SETTLE_S) -> list[str]:
        """Returns the command lines of the processes that outlive the command by more than ``settle_s``."""
        deadline = time.monotonic() + settle_s
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        lines = []
        for process in found:
            with suppress(psutil.Error):
                lines.append(" ".join(process.cmdline())[:100])
        return lines

    def end(self) -> None:
        """Kills the remaining processes of the job, and copies its log to the folder in `LOGS`, if that is set."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=30)
        if LOGS in os.environ:
            Path(os.environ[LOGS]).mkdir(parents=True, exist_ok=True)
            shutil.copy(self.folder / "log", Path(os.environ[LOGS]) / f"{self.folder.name}.log")

    def output(self) -> str:
        """Returns what the job printed, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", (self.folder / "log").read_text(errors="replace"))

    def calls(self, name: str = "") -> list[host_meter.Call]:
        """Returns the records of the job, or only those with a name."""
        return [call for call in host_meter.read_calls(self.calls_folder) if name in ("", call.name)]
