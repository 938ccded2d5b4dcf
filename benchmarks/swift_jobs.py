"""Runs jobs of ms-swift's ``megatron`` command, as users start them, with and without our plugin, side by side."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.host_jobs import OFFLINE, Job
from benchmarks.host_meter import FAULT_NAME, Call, runs
from rl_safe_workers.adapters.swift.__main__ import PLUGIN

ROOT = Path(__file__).parents[1]
METER = Path(__file__).parent / "swift_meter" / "meter_plugin.py"
BUILD, SETUP, STEP, SAVE = "build", "setup", "step", "save"
SHARDS, TRAINED, PLOT, EXPORT = "shards", "trained", "plot", "export"
GENERATE, SYNC = "generate", "sync"
"""Names of the calls that the meter watches."""
FIRST_STEPS = 3
RECORD = "record"
"""Prefix of the file that records the memory that collectives have taken on a rank."""
ON_CPU = os.environ.get("RL_SAFE_BENCH_DEVICE") == "cpu"
"""True to run on gloo with the tests' stand-ins, to try the benchmark itself."""
TOGETHER = 2 if ON_CPU else 4
"""Number of nodes of all jobs that run at a time. With more, a tiny model's first step took a minute on 32 cores."""
STOP = threading.Event()
"""If set, no more jobs start, and running jobs are cut."""
TRAINED_STEPS = 3
_STEPS = str(TRAINED_STEPS)
MODEL = ("--template", "qwen3", "--use_hf", "true", "--check_model", "false")
GRPO = (
    *("--rlhf_type", "grpo", "--reward_funcs", "brief", "--num_generations", "2", "--max_completion_length", "32"),
    *("--offload_model", "true", "--offload_optimizer", "true", "--sleep_level", "1"),
)
"""Arguments of ``rlhf``, with vLLM on the trainers' GPUs."""
VLLM = {
    "vllm_gpu_memory_utilization": 0.15,
    "vllm_max_model_len": 128,
    "vllm_enforce_eager": True,
    "vllm_engine_kwargs": {"kv_cache_memory_bytes": 2**29},
}
"""Arguments of the engines. Without a given cache size, vLLM measures memory, and counts memory of other jobs, too."""
COLOCATED = (
    *("--vllm_mode", "colocate"),
    *(part for name, value in VLLM.items() for part in (f"--{name}", json.dumps(value))),
)
REWARD = ROOT / "recipes" / "swift" / "tiny_reward.py"
TRAINING = (
    *("--micro_batch_size", "1", "--global_batch_size", "8", "--max_length", "64", "--padding_free", "false"),
    *("--train_iters", _STEPS, "--save_steps", _STEPS, "--eval_iters", "0", "--logging_steps", "1", "--lr", "1e-3"),
    *("--lr_warmup_fraction", "0.1", "--attention_backend", "unfused", "--moe_grouped_gemm", "true"),
    *("--dataset_num_proc", "1", "--dataloader_num_workers", "0", "--report_to", "tensorboard"),
    *("--add_version", "false", "--save_safetensors", "false"),
)
RANKS_OF_NODE = 2
SECONDS_TO_VANISH = 2.0
"""Seconds that the kernel may take to remove the last process."""
_PROCESS = {
    "TOKENIZERS_PARALLELISM": "false",
    # Without this, each rank starts one process per core to compile kernels.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "rl_safe_bench_kernels"),
}
_POLL_S = 0.05
_ports = itertools.count(15_000 + os.getpid() % 1000 * 12)
"""Ports below the range that the system uses for connections."""


@dataclass(kw_only=True)
class SwiftJob:
    """A job, while it runs and afterwards.

    Example: ``SwiftJob(name="ours 1", folder=folder, command="sft", args=["--model", "..."])``
    """

    name: str
    folder: Path
    command: str
    """ms-swift's command: ``sft``, ``pt`` or ``export``."""
    args: Sequence[str]
    ours: bool = True
    nodes: int = 1
    """Number of torchrun agents, each with two ranks. If there are several, NCCL believes that each is a host."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Our settings."""
    fault: str = ""
    """The fault, in the meter's form."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More environment variables."""
    config: Mapping[str, Any] | None = None
    """For Ray mode: keys of its YAML, in addition to ``args``."""
    started_s: float = 0.0
    """Unix time."""
    statuses: list[int | None] = field(default_factory=list)
    """Exit status of each node's command; None while it runs, and if it was cut."""
    ended_s: float = 0.0
    """Unix time of the end of the last command, or of the cut."""
    rank_ended_s: dict[int, float] = field(default_factory=dict)
    """Unix time of the end of each process that the meter knows, by process id."""
    left: int = 0
    """Number of processes of the job that still ran after the commands had ended."""
    _commands: list[Job] = field(default_factory=list)

    @property
    def output(self) -> Path:
        """ms-swift's ``output_dir``."""
        return self.folder / "out"

    @property
    def log(self) -> str:
        """The output of all commands."""
        return "\n".join(command.output() for command in self._commands)

    @property
    def losses(self) -> list[float]:
        """The loss of each step from ms-swift's log; empty if the log has no loss."""
        path = self.output / "logging.jsonl"
        return [line["loss"] for line in (read_lines(path) if path.exists() else []) if "loss" in line]

    @property
    def is_clean(self) -> bool:
        """True if every command has ended with status 0 and left no process."""
        return self.statuses == [0] * self.nodes and self.left == 0

    @property
    def fault_s(self) -> float | None:
        """Unix time of the fault; None before it."""
        return next((call.started_s for call in self.calls(FAULT_NAME)), None)

    def calls(self, name: str) -> list[Call]:
        """Returns the records of calls with a name."""
        return [call for command in self._commands for call in command.calls(name)]

    def records(self) -> list[dict[str, Any]]:
        """Returns each training rank's record of the memory that collectives have taken."""
        paths = sorted(path for command in self._commands for path in command.calls_folder.glob(f"{RECORD}*.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def exit_s(self, *of: str) -> float:
        """Returns the seconds from the end of the last call with these names on any rank to the last process's end."""
        done = [call for name in of for call in self.calls(name)]
        if not done or len(self.rank_ended_s) < len({call.pid for call in done}):
            return float("nan")
        return max(self.rank_ended_s.values()) - max(call.started_s + call.seconds for call in done)

    def start(self) -> None:
        """Starts the commands of all nodes."""
        self.started_s = time.time()
        self.folder.mkdir(parents=True)
        args = [*self.args, *MODEL, *([] if "--output_dir" in self.args else ["--output_dir", str(self.output)])]
        plugins = [*([PLUGIN] if self.ours else []), *([REWARD] if self.command == "rlhf" else []), METER]
        if ON_CPU:
            from tests.swift import jobs

            plugins = [jobs.CPU, *([jobs.ENGINE] if self.command == "rlhf" else []), *plugins]
            args += jobs.ON_CPU
        command = [sys.executable, "-m", "swift.cli._megatron.main", self.command]
        if self.config is None:
            command += [*args, "--external_plugins", *map(str, plugins)]
        else:
            options = dict(zip((name.removeprefix("--") for name in args[::2]), args[1::2], strict=True))
            config = {name: yaml.safe_load(value) for name, value in options.items()} | dict(self.config)
            config |= {"external_plugins": list(map(str, plugins)), "dataset": [config["dataset"]]}
            (self.folder / "job.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
            command += ["--use_ray", "true", "--config", str(self.folder / "job.yaml")]
        variables = {
            **variables_of_ranks(),
            "HF_HOME": str(self.folder / "hf"),
            "MODELSCOPE_CACHE": str(self.folder / "modelscope"),
            "RL_SAFE_SWIFT": json.dumps(self.settings),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            **self.variables,
        }
        if self.config is None:
            variables |= {"NPROC_PER_NODE": str(RANKS_OF_NODE), "NNODES": str(self.nodes)}
        for node in range(self.nodes):
            own = {"NODE_RANK": str(node)}
            if self.nodes > 1:
                own |= {"NCCL_HOSTID": f"host{node}", "NCCL_SOCKET_IFNAME": "lo"}
            folder = self.folder / f"node{node}"
            self._commands.append(Job(self.name, command, folder, variables | own, fault=self.fault))

    def look(self) -> bool:
        """Notes which processes have ended; returns True once all commands and all their processes have ended."""
        for command in self._commands:
            for path in command.calls_folder.glob("*.jsonl"):
                if (pid := int(path.stem)) not in self.rank_ended_s and not runs(pid):
                    self.rank_ended_s[pid] = time.time()
        self.statuses = [command.poll() for command in self._commands]
        if None in self.statuses:
            return False
        self.ended_s = self.ended_s or time.time()
        self.left = sum(len(command.processes()) for command in self._commands)
        return not self.left or time.time() - self.ended_s > SECONDS_TO_VANISH

    def end(self) -> None:
        """Ends the remaining processes of the job."""
        self.ended_s = self.ended_s or time.time()
        for command in self._commands:
            command.end()


def run_jobs(jobs: Sequence[SwiftJob], report: Callable[[str], None], *, limit_s: float, cut_s: float = 120.0) -> None:
    """Runs jobs to their ends, some side by side. Once `STOP` is set, it starts no more.

    Args:
        jobs: The jobs, not started yet.
        report: Takes a line for each job that has ended, and the end of its log if it should have succeeded.
        limit_s: Seconds after which a job is cut.
        cut_s: Seconds after its fault after which a job is cut.
    """
    waiting, running = list(jobs), list[SwiftJob]()
    try:
        while running or (waiting and not STOP.is_set()):
            while waiting and not STOP.is_set() and sum(job.nodes for job in (*running, waiting[0])) <= TOGETHER:
                running.append(waiting.pop(0))
                running[-1].start()
            time.sleep(_POLL_S)
            for job in list(running):
                ended, now = job.look(), time.time()
                struck_s = job.fault_s if job.fault and not ended else None
                is_late = now - job.started_s > limit_s or (struck_s is not None and now - struck_s > cut_s)
                if ended or is_late or STOP.is_set():
                    running.remove(job)
                    job.end()
                    seconds = job.ended_s - job.started_s
                    report(f"{job.name}: statuses {job.statuses} after {seconds:.1f} s, {job.left} left")
                    if not job.is_clean and not job.fault:
                        report(job.log.strip()[-1500:])
    finally:
        for job in running:
            job.end()


def variables_of_ranks() -> dict[str, str]:
    """Returns the environment variables for every process of this benchmark."""
    variables, paths = {**OFFLINE, **_PROCESS}, [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if ON_CPU:
        from tests.swift import jobs

        variables |= jobs.environment()
        paths.insert(0, variables["PYTHONPATH"])
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file with one JSON object per line. Skips the last line if it is incomplete."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def free_port() -> int:
    """Returns a port that nobody listens on, a different one in each call."""
    for port in _ports:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there is always another one")
