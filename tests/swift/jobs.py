"""Jobs of ms-swift's on gloo: its own commands, with and without our plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rl_safe_workers.adapters.swift.__main__ import PLUGIN
from rl_safe_workers.ports import port_to_listen_on

HERE = Path(__file__).parent
CPU = HERE / "cpu" / "cpu_plugin.py"
WATCH = HERE / "watch" / "watch_plugin.py"
BREAK = HERE / "breaking" / "break_plugin.py"
ENGINE = HERE / "engine" / "engine_plugin.py"
ON_CPU = [
    *("--ddp_backend", "gloo", "--attention_backend", "unfused", "--padding_free", "false"),
    *("--gradient_accumulation_fusion", "false", "--moe_permute_fusion", "false", "--apply_rope_fusion", "false"),
    *("--cross_entropy_loss_fusion", "false", "--masked_softmax_fusion", "false", "--moe_grouped_gemm", "true"),
]
"""Turns off kernels that CPU tensors lack."""
TRAINING = [
    *("--micro_batch_size", "1", "--global_batch_size", "4", "--train_iters", "4", "--max_length", "64"),
    *("--lr", "1e-3", "--lr_warmup_fraction", "0.1", "--save_steps", "2", "--eval_iters", "0", "--logging_steps", "1"),
    *("--dataset_num_proc", "1", "--dataloader_num_workers", "0", "--report_to", "tensorboard"),
    *("--check_model", "false", "--add_version", "false", "--save_safetensors", "false"),
]
GRPO = [
    *("--rlhf_type", "grpo", "--num_generations", "2", "--max_completion_length", "16", "--reward_funcs", "sum"),
    *("--offload_model", "true", "--offload_optimizer", "true"),
]
PLAIN = ["--use_hf", "true", "--template", "qwen3"]


def environment(**more: str) -> dict[str, str]:
    """The environment of a rank."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "standins"), str(HERE.parents[1])]),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "MODELSCOPE_CACHE": "/nonexistent",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCHDYNAMO_DISABLE": "1",
        **more,
    }


@dataclass(frozen=True, kw_only=True)
class Job:
    """One that has ended."""

    folder: Path
    statuses: list[int | None]
    """None for a rank that had to be killed."""
    ended: list[float]
    """Unix time of the end of each rank."""

    @property
    def output(self) -> Path:
        """ms-swift's ``output_dir``."""
        return self.folder / "out"

    @property
    def losses(self) -> list[float]:
        """The loss of each step, as ms-swift logs it."""
        return [line["loss"] for line in self._logged]

    @property
    def proofs(self) -> list[tuple[float, float, float]]:
        """Weights of each step that a sync has proved, weights that it has not, and 1 if it was redone."""
        names = [f"rl_safe/sync_{name}" for name in ("proved", "not_proved", "redone")]
        return [(line[names[0]], line[names[1]], line[names[2]]) for line in self._logged]

    @property
    def _logged(self) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.output / "logging.jsonl").read_text().splitlines())
        return [line for line in lines if "loss" in line]

    def log(self, rank: int) -> str:
        """The output of a rank."""
        return (self.folder / f"rank{rank}.log").read_text()

    def record(self, rank: int) -> dict[str, Any]:
        """The record that the watching plugin has made of a rank."""
        record: dict[str, Any] = json.loads((self.folder / f"record{rank}.json").read_text())
        return record

    def collectives_of_saves(self, rank: int) -> list[tuple[int, int]]:
        """The collectives of each save, on the default group and on any."""
        return [(save["world"], save["all"]) for save in self.record(rank)["saves"]]

    def check(self) -> Self:
        """Fails with the end of a rank's output, unless every rank has ended with status 0."""
        for rank, status in enumerate(self.statuses):
            assert status == 0, f"rank {rank} ended with {status}:\n{self.log(rank)[-4000:]}"
        return self


class Forge:
    """Runs jobs one after the other, with ranks forked from a process that has ms-swift imported."""

    def __enter__(self) -> Self:
        """Starts that process."""
        self._zygote = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self._zygote.stdout is not None
        assert self._zygote.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *error: object) -> None:
        """Ends it."""
        self._zygote.kill()
        self._zygote.wait()

    def run(
        self,
        folder: Path,
        command: str,
        args: Sequence[str],
        *,
        ranks: int = 2,
        ours: bool = True,
        settings: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        plugins: Sequence[Path] = (),
        limit_s: float = 150.0,
        rest_s: float = 150.0,
    ) -> Job:
        """Runs a job to its end.

        Args:
            folder: Where its ranks run and log.
            command: ms-swift's: ``sft``, ``pt`` or ``export``.
            args: Of that command; ``--output_dir out`` is added unless they have one.
            ranks: How many.
            ours: Whether our plugin is among the job's.
            settings: Ours.
            env: More variables.
            plugins: More plugins, after ours.
            limit_s: Ranks that live longer are killed.
            rest_s: Seconds that a rank may live longer than another one.
        """
        folder.mkdir(parents=True, exist_ok=True)
        own = [*([ENGINE] if "--rlhf_type" in args else []), *([PLUGIN] if ours else [])]
        output = [] if "--output_dir" in args else ["--output_dir", str(folder / "out")]
        job = {
            "command": command,
            "args": [
                *args,
                *ON_CPU,
                *PLAIN,
                *output,
                "--external_plugins",
                *map(str, (CPU, *own, WATCH, *plugins)),
            ],
            "ranks": ranks,
            "port": port_to_listen_on("127.0.0.1"),
            "folder": str(folder),
            "env": {"RL_SAFE_SWIFT": json.dumps(settings or {}), **(env or {})},
            "limit_s": limit_s,
            "rest_s": rest_s,
        }
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(job) + "\n")
        self._zygote.stdin.flush()
        return Job(folder=folder, **json.loads(self._zygote.stdout.readline()))

    def export(self, folder: Path, *args: str, **options: Any) -> Job:
        """Runs ``megatron export`` with expert parallelism 2."""
        sizes = ["--expert_model_parallel_size", "2"]
        return self.run(folder, "export", [*args, *sizes, "--check_model", "false"], **options)

    def train(self, folder: Path, inputs: Path, *more: str, **options: Any) -> Job:
        """Runs ``megatron sft`` of the tiny model."""
        args = ["--model", str(inputs / "model"), "--dataset", str(inputs / "data.jsonl"), *TRAINING, *more]
        return self.run(folder, "sft", args, **options)

    def grpo(self, folder: Path, inputs: Path, *more: str, **options: Any) -> Job:
        """Runs ``megatron rlhf --rlhf_type grpo`` of the tiny model, with the engine double in each rank."""
        args = ["--model", str(inputs / "model"), "--dataset", str(inputs / "data.jsonl"), *TRAINING, *GRPO, *more]
        if "--vllm_mode" not in more:
            args += ["--vllm_mode", "colocate", "--sleep_level", "1"]
        return self.run(folder, "rlhf", args, **{"limit_s": 400.0, **options})
