"""Runs jobs of verl, stock and ours, with one small recipe, on two GPUs, or on CPU to try the benchmark itself."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import rl_safe_workers
from benchmarks import host_meter, verl_glue
from benchmarks.host_jobs import WIDE_MODEL, Job
from rl_safe_workers import env
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import ResourceError
from rl_safe_workers.models.seeded import Family, create_seeded_model
from rl_safe_workers.reaping.processes import socket_folder

ON_CPU = os.environ.get("RL_SAFE_BENCH_DEVICE") == "cpu"
"""True to run on gloo with engines without a model, to try the benchmark itself."""
ROOT = Path(rl_safe_workers.__file__).parents[1]
STOCK, OURS, GIVING = "stock", "ours", "ours, release_comms"
JOB_S = float(os.environ.get("RL_SAFE_BENCH_JOB_S", "420"))
"""Seconds after which a job is ended."""
AT_ONCE = int(os.environ.get("RL_SAFE_BENCH_AT_ONCE", "2" if ON_CPU else "8"))
"""Number of jobs that run at the same time. Each starts about ten processes that import torch."""
MIB = 2**20
ACTOR = "actor_rollout_ref.actor"
PLUGIN = "rl_safe_workers.adapters.verl.plugin"
_SMALL_MODEL = SeededModelConfig(
    num_hidden_layers=2,
    hidden_size=256,
    intermediate_size=1024,
    moe_intermediate_size=512,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=8,
)
_MANY = _SMALL_MODEL.model_copy(
    update={"num_hidden_layers": 24, "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
)
"""A model of 24 layers with 64 experts: some 4,800 small tensors. verl took more than four minutes to load 18,867."""
_MODELS = {
    "wide_moe": (Family.QWEN3, SeededModelConfig() if ON_CPU else WIDE_MODEL),
    "many_moe": (Family.QWEN3, SeededModelConfig() if ON_CPU else _MANY),
    "small_moe": (Family.QWEN3, SeededModelConfig() if ON_CPU else _SMALL_MODEL),
    "small_dense": (Family.QWEN2, _SMALL_MODEL.model_copy(update={"num_experts": 0})),
}
"""Family and sizes of the seeded models."""
_LONGEST_TOKENS = 4096
"""Largest number of tokens of prompt and response together."""
_COMMON = (
    "actor_rollout_ref.rollout.ignore_eos=true",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "data.dataloader_num_workers=0",
    "ray_kwargs.ray_init.num_cpus=8",
    "+ray_kwargs.ray_init.include_dashboard=false",
)
_OF_DEVICE = (
    ("actor_rollout_ref.rollout.free_cache_engine=true",)
    if ON_CPU
    else (
        f"{ACTOR}.megatron.vanilla_mbridge=false",
        "actor_rollout_ref.model.use_remove_padding=true",
        # verl asks for FlashAttention, which is not installed. cuDNN's attention also accepts packed sequences.
        f"++{ACTOR}.megatron.override_transformer_config.attention_backend=auto",
        # Gradient accumulation fusion needs APEX.
        f"++{ACTOR}.megatron.override_transformer_config.gradient_accumulation_fusion=false",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.06",
        # Without this, vLLM measures free memory, and fails if another job allocates memory meanwhile.
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes={512 * MIB}",
    )
)
WITHOUT_VLLM = ("actor_rollout_ref.model.external_lib=tests.verl.echo_rollout",)
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""Variables of jobs whose steps are not timed, stock and ours. They start faster because they do not compile."""
_OF_STOCK_ON_CPU = {verl_glue.STOCK_ON_CPU: "1", "VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"}
_FIRST_PORT, _PORTS = 20_000, 3000
"""First port, and number of ports for each benchmark on a machine. The system uses ports from 32,768 on for
connections."""
_RAY_FOLDERS = f"/tmp/r{os.getpid()}"
"""Prefix of Ray's folders. It is short, because the paths of Ray's sockets must be short."""
_STOCK = f"bench{os.getpid()}"
"""Prefix of the ids by which stock jobs get sockets of their own, as our jobs have."""
_POLL_S = 0.2


class Watch:
    """Observes a job while it runs, and once after it has ended."""

    def look(self, job: Job) -> None:
        """Is called repeatedly while the job runs. May end the job."""

    def ended(self, job: Job, *, in_a_hurry: bool) -> None:
        """Is called once the job's command has ended."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A job to run.

    Example: ``Wanted(name="stock saves", who=STOCK, overrides=["trainer.save_freq=1"])``
    """

    name: str
    """A name that no other job has."""
    who: str
    """`STOCK`, `OURS` or `GIVING`."""
    overrides: Sequence[str] = ()
    """Overrides of verl's configuration."""
    model: str = "small_moe"
    """One of `_MODELS`."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    fault: str = ""
    """The value of `host_meter.FAULT`."""
    watch: Watch = field(default_factory=Watch)


class Jobs:
    """Runs verl's jobs, several at a time, and ends them when the time is up."""

    def __init__(self, folder: Path, report: Callable[[str], None], *, at_once: int = AT_ONCE) -> None:
        self.folder, self.report = folder, report
        self.is_quiet = threading.Event()
        """Set when no other part runs beside timed steps."""
        self._is_stopped = threading.Event()
        self._places = threading.Semaphore(at_once)
        self._making = threading.Lock()
        self._numbers = itertools.count(1)
        self._ports: tuple[int, socket.socket] | None = None

    def stop(self) -> None:
        """Ends all jobs and starts no more. `run` then returns the jobs that were started."""
        self._is_stopped.set()
        self.is_quiet.set()
        self._places.release(1000)

    def clean(self) -> None:
        """Removes the folders that Ray leaves, and those of stock jobs' sockets."""
        for prefix in (Path(_RAY_FOLDERS), socket_folder(_STOCK)):
            for path in prefix.parent.glob(f"{prefix.name}_*"):
                shutil.rmtree(path, ignore_errors=True)

    def run(self, wanted: Sequence[Wanted]) -> dict[str, Job]:
        """Runs jobs until each has ended; returns those that were started, by name."""
        with ThreadPoolExecutor(len(wanted)) as pool:
            done = list(pool.map(self._run_one, wanted))
        return {job.name: job for job in done if job is not None}

    def _run_one(self, wanted: Wanted) -> Job | None:
        with self._places:
            if self._is_stopped.is_set():
                self.report(f"{wanted.name}: not started, the time is up")
                return None
            job = self._start(wanted)
            try:
                while job.poll() is None:
                    if self._is_stopped.is_set() or time.time() > job.started_s + JOB_S:
                        self.report(f"{job.name}: ended after {time.time() - job.started_s:.0f} s, the time is up")
                        break
                    wanted.watch.look(job)
                    time.sleep(_POLL_S)
                else:
                    wanted.watch.ended(job, in_a_hurry=self._is_stopped.is_set())
            finally:
                job.end()
        self.report(f"{job.name}: status {job.poll()} after {time.time() - job.started_s:.0f} s")
        if job.poll() != 0:
            self.report(end_of(job))  # at once, because the time may be up before other jobs end
        return job

    def model(self, name: str) -> Path:
        """Returns the folder of a seeded model of `_MODELS`. Makes the model on the first call."""
        path = self.folder / name
        family, spec = _MODELS[name]
        with self._making:
            if not path.exists():
                settings = {"max_position_embeddings": _LONGEST_TOKENS}
                create_seeded_model(path, spec, dtype="bfloat16", family=family, settings=settings)
        return path

    def _start(self, wanted: Wanted) -> Job:
        folder = self.folder_of(wanted.name)
        model = self.model(wanted.model)
        with self._making:
            number = next(self._numbers)
            self._ports = self._ports or _hold_ports()
        stock = wanted.who == STOCK
        glue = verl_glue.__name__
        command = [
            "bash",
            str(ROOT / "recipes/verl/quickstart.sh"),
            *_OF_DEVICE,
            *_COMMON,
            f"hydra.run.dir={folder}/hydra",
            f"trainer.default_local_dir={folder}/checkpoints",
            f"+ray_kwargs.ray_init._temp_dir={_RAY_FOLDERS}_{number}",
            *(["actor_rollout_ref.rl_safe.release_comms=true"] if wanted.who == GIVING else []),
            *wanted.overrides,
        ]
        variables = {
            "DEVICE": "cpu" if ON_CPU else "cuda",
            "HYDRA_FULL_ERROR": "1",
            "MODEL": str(model),
            "PYTHON": sys.executable,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "VERL_USE_EXTERNAL_MODULES": glue if stock else f"{PLUGIN},{glue}",
            verl_glue.PORTS: str(self._ports[0] + number * verl_glue.PORTS_OF_JOB),
            verl_glue.SAME_BATCHES: "1",
            **({"ENTRY": "stock", env.RUN_ID: f"{_STOCK}_{number}"} if stock else {}),
            **(_OF_STOCK_ON_CPU if stock and ON_CPU else {}),
        }
        return Job(wanted.name, command, folder, {**variables, **wanted.variables}, fault=wanted.fault)

    def folder_of(self, name: str) -> Path:
        """Returns the folder of a job, whether or not it has begun."""
        return self.folder / re.sub(r"\W+", "_", name)


def _hold_ports() -> tuple[int, socket.socket]:
    """Returns the first port of a range that no other benchmark uses, and a listener on that port to reserve it."""
    for first in range(_FIRST_PORT, 32_000, _PORTS):
        listener = socket.socket()
        try:
            listener.bind(("127.0.0.1", first))
        except OSError:
            listener.close()
            continue
        return first, listener
    raise ResourceError(
        f"bench verl: ports {_FIRST_PORT}, and each {_PORTS} after it, are taken; end what listens there"
    )


def checkpoints_of(jobs: Jobs, name: str) -> Path:
    """Returns the folder of a job's checkpoints."""
    return jobs.folder_of(name) / "checkpoints"


def metrics_of(output: str) -> dict[int, dict[str, float]]:
    """Returns the metrics that verl's console logger printed, by step."""
    found = {}
    for line in output.splitlines():
        if match := re.search(r"step:(\d+) - (.*)", line):
            items = re.findall(r"([\w/@.]+):([-+.\de]+)", match[2])
            found[int(match[1])] = {name: float(value) for name, value in items}
    return found


def slowest(job: Job | None, name: str, *, net: bool = False) -> list[float]:
    """Returns the seconds of each call on its slowest rank; empty for a job that was not started.

    Args:
        job: The job.
        name: Name of the calls.
        net: As for `host_meter.slowest`.
    """
    return host_meter.slowest(job.calls(name) if job else (), net=net)


def memory_of(job: Job | None) -> dict[str, float]:
    """Returns device memory outside of torch after each call and before the first update, on the rank with most."""
    found: dict[str, float] = {}
    last: dict[int, float] = {}
    for call in job.calls() if job else ():
        if call.outside_torch is None:
            continue
        name = call.name if call.name == "init_model" else f"{call.name} {call.call}"
        if name == "update_actor 0":
            found["update_actor 0 begins"] = max(found.get("update_actor 0 begins", 0), last.get(call.rank, 0))
        found[name] = max(found.get(name, 0), call.outside_torch)
        last[call.rank] = call.outside_torch
    return found


def end_of(job: Job) -> str:
    """Returns the last lines of a failed job's output, each shortened."""
    return "\n".join([job.name, *(line[:400] for line in job.output().splitlines()[-12:])])
