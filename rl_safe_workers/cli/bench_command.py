"""Implements ``rl-safe bench NAME``: measures on this machine if a performance goal is met."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

import rl_safe_workers
from rl_safe_workers.cli.terminal import to_path
from rl_safe_workers.errors import ConfigError

BENCHMARKS: Mapping[str, str] = {
    "quickstart": "the main job for three seeds: learning, agreement, seconds, memory",
    "engine_layouts": "the main job with each layout of trainers and engines: agreement, and every sync proved",
    "gpu": "the main job on 2 or 4 GPUs, and a larger model's sync, steps, offload and saves, against plain ones",
    "comms": "communicators on 2 or 4 GPUs: memory and seconds of the bootstrap, against what others do",
    "layers": "Transformer Engine's layers on 2 GPUs, bf16 and 8 bits: the main job, saves, a larger model's steps",
    "script": "a plain Megatron script on 2 GPUs: memory and steps with our functions, against the script alone",
    "suspend": "communicators that NCCL suspends for a rollout on 2 GPUs, against ones that are made again",
    "exits": "the end of ranks with every communicator alive, on 2 or 4 GPUs, against torch's own",
    "comms_limits": "limits of NCCL's channels on 2 or 4 GPUs: bandwidth and memory of each",
    "swift": "ms-swift's jobs on 2 GPUs with our plugin and without: exits, exports, late communicators, failures",
    "verl": "verl's job on 2 GPUs with its engines and with ours: steps in turns, memory, saves, resumes and faults",
    "installs": "pins of verl, ms-swift and NeMo RL that an installation of the wheel would move",
    "control": "operations of the control plane over the store, signed and unsigned",
    "nemo_rl": "NeMo RL's own script on 2 GPUs, with our workers: runs, steps, refits and failures, against its own",
    "weight_sync": "weight syncs into vLLM on 2 GPUs, of many names and of many bytes, against a broadcast and a copy",
    "packed_export": "the weights of four trainers brought to all of them in buckets, against the bridge's export",
    "sync_delta": "the weights that a GRPO step changes in bf16, and what a sync of these alone would save",
    "sync_proof": "500 clean proved weight syncs: false alarms and seconds; the speed of digests, against a copy's",
    "watch": "what the watch of ranks costs a plain Megatron script: its threads, its memory, and steps in turns",
    "verdict": "the verdict on a failed job of 1,024 and of 4,096 ranks: seconds, memory, and how they grow",
    "save": "saves, loads and audits of a checkpoint of 6,144 experts, against megatron-core's own",
}
"""Help line of each benchmark, by its name. Its module in ``benchmarks`` has the same name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    about = "; ".join(f"{name}: {text}" for name, text in sorted(BENCHMARKS.items()))
    parser.description = f"{about}. Exit code 0: every goal is met; 3: one is not."
    parser.add_argument("name", metavar="NAME", choices=BENCHMARKS, help=f"one of {', '.join(BENCHMARKS)}")
    parser.add_argument("--json", metavar="FILE", type=to_path, help="write the rows there too")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more than warnings")
    parser.set_defaults(execute=run_bench)


def run_bench(arguments: argparse.Namespace) -> int:
    """Runs a benchmark, prints its table and returns the exit code.

    Raises:
        ConfigError: If this is not a checkout, or the JSON file cannot be written. Raised before anything is measured.
    """
    json_file: Path | None = arguments.json
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_file}: there is no folder {json_file.absolute().parent}; make it first")
    _find_benchmarks()
    from benchmarks.table import Row, exit_code, print_table, write_json

    # Only the named benchmark is imported, because some need packages that others do not.
    module = importlib.import_module(f"benchmarks.{arguments.name}")
    progress = Console(file=sys.stderr, highlight=False)
    rows: list[Row] = module.measure(lambda line: progress.print(line, soft_wrap=True, markup=False))
    print_table(rows, Console(force_interactive=False))
    if json_file is not None:
        write_json(rows, json_file)
    return exit_code(rows)


def _find_benchmarks() -> None:
    """Puts the folder of ``benchmarks`` on the module path, because the wheel does not contain it."""
    checkout = Path(rl_safe_workers.__file__).parents[1]
    if not (checkout / "benchmarks" / "table.py").is_file():
        raise ConfigError("rl-safe bench runs in a checkout of the repository: clone it and run scripts/setup there")
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
