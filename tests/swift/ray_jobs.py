"""Jobs of ms-swift's Ray mode: its own command, with real Ray, two training actors and two of the engine double."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_safe_workers.adapters.swift.__main__ import PLUGIN
from tests.swift.commands import CUT_S, End, run
from tests.swift.jobs import BREAK, CPU, ENGINE, GRPO, ON_CPU, PLAIN, TRAINING, WATCH

LORA = {"tuner_type": "lora", "target_modules": ["all-linear"], "lora_rank": 4, "merge_lora": False}
"""With full training, stock ms-swift exports weights from memory that it has freed, and crashes."""


def options(args: Sequence[str]) -> dict[str, Any]:
    """Arguments of a command as keys of a YAML."""
    pairs = iter(args)
    return {key.removeprefix("--"): yaml.safe_load(value) for key, value in zip(pairs, pairs, strict=True)}


def run_ray(
    folder: Path,
    inputs: Path,
    *,
    ours: bool,
    settings: dict[str, Any] | None = None,
    tuner: dict[str, Any] | None = None,
    ranks: int = 2,
    more: dict[str, Any] | None = None,
    plugins: Sequence[Path] = (),
    limit_s: float = CUT_S,
    **env: str,
) -> End:
    """Runs ``megatron rlhf --use_ray`` to its end.

    Args:
        folder: Where it runs and writes.
        inputs: The folder with the model and the data.
        ours: Whether our plugin is among the job's.
        settings: Ours.
        tuner: What is trained; `LORA` unless given.
        ranks: How many training actors there are, each with an engine.
        more: More keys of the YAML.
        plugins: More plugins, after ours.
        limit_s: As for `run`.
        **env: More variables. With ``BREAK`` or ``BREAK_ENGINE``, something breaks.
    """
    folder.mkdir(parents=True)
    breaks = {"BREAK", "BREAK_ENGINE"} & env.keys()
    plugins = [CPU, ENGINE, *([PLUGIN] if ours else []), BREAK if breaks else WATCH, *plugins]
    job = {
        **options([*ON_CPU, *PLAIN, *TRAINING, *GRPO]),
        **(LORA if tuner is None else tuner),
        "reward_funcs": ["sum"],
        "expert_model_parallel_size": ranks,
        "model": str(inputs / "model"),
        "dataset": [str(inputs / "data.jsonl")],
        "output_dir": str(folder / "out"),
        "external_plugins": list(map(str, plugins)),
        "colocate_groups": [["train", "rollout"]],
        "train": {"gpus": ranks},
        "rollout": {"gpus": ranks, "vllm_tensor_parallel_size": 1},
        **(more or {}),
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    with tempfile.TemporaryDirectory(prefix="ray") as session:  # sockets need a short path
        return run(
            folder,
            ["rlhf", "--use_ray", "true", "--config", "job.yaml"],
            settings=settings or {},
            breaks=bool(breaks),
            limit_s=limit_s,
            **{
                "RAY_TMPDIR": session,
                "RAY_DEDUP_LOGS": "0",
                "RAY_USAGE_STATS_ENABLED": "0",
                "SWIFT_RAY_WEIGHT_BUCKET_MB": "4",
                "BREAK": "never:",
                "RECORDS": str(folder),
                **env,
            },
        )
