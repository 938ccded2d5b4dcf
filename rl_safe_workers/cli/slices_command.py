"""Implements ``rl-safe slices``: finds the bytes of a checkpoint that one host needs, and copies only these."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from rich.table import Table

from rl_safe_workers import env
from rl_safe_workers.checkpoint.folders.manifest import Manifest, check_fingerprint, model_fingerprint, read_manifest
from rl_safe_workers.checkpoint.ranges import Ranges, materialise, sizes_of
from rl_safe_workers.cli.terminal import to_path
from rl_safe_workers.config import RunConfig
from rl_safe_workers.driver.inputs.preflight import layout_of
from rl_safe_workers.errors import ConfigError, Raised, RankError, RlSafeError, RunError, UsageError
from rl_safe_workers.foreign_files import printable
from rl_safe_workers.lifecycle import unix_now
from rl_safe_workers.models.hf_directory import read_hf_directory
from rl_safe_workers.plain_console import PlainConsole
from rl_safe_workers.ranks import format_ranks, trainer_id
from rl_safe_workers.recipe import load_settings
from rl_safe_workers.topology.layout import WORLD_KEY, check_layout, check_model

DESCRIPTION = """
Lists the files and byte ranges that host K reads to resume from a checkpoint of ours, under the layout that the keys
set. So you need not copy the whole checkpoint to every host. It needs model.path (its config.json is enough) and no
GPU: it builds the model from shapes, without memory for weights. Training rank r is on host r // gpus-per-node.
Default of cluster.num_trainers: the number of ranks that saved. The host also needs every other file in its full size,
as a hole: --copy-to makes them. A copy serves host K under this layout only.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.description = DESCRIPTION
    parser.add_argument("directory", metavar="DIR", type=to_path, help="global_step_N")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="dotted key, YAML value: model.path=DIR megatron.tensor_model_parallel_size=2 cluster.num_trainers=8",
    )
    parser.add_argument("--node", metavar="K", type=int, required=True, help="the host, counted from 0")
    parser.add_argument("--gpus-per-node", metavar="N", type=int, default=8, help="trainers of each host (default 8)")
    parser.add_argument("--recipe", metavar="FILE", help="take model and layout from a recipe")
    parser.add_argument("--json", action="store_true", help="print {file: [[start, stop], ...]}, in bytes")
    parser.add_argument(
        "--copy-to",
        metavar="TARGET",
        type=to_path,
        help="copy these bytes to a new directory, to resume from as from DIR",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more than warnings")
    parser.set_defaults(execute=run_slices)


def run_slices(arguments: argparse.Namespace) -> int:
    """Prints the byte ranges that a host needs, as a table or JSON. With ``--copy-to``, also copies them.

    Raises:
        UsageError: If there is no such directory or host, or the layout does not divide the trainers or the model.
        CheckpointError: If the checkpoint is not complete.
        RunError: If the model cannot be built.
    """
    checkpoint: Path = arguments.directory
    if not checkpoint.is_dir():
        raise UsageError(f"{checkpoint} is not a directory; give that of a checkpoint")
    config, manifest = load_settings(arguments.recipe, arguments.overrides, name="slices"), read_manifest(checkpoint)
    if arguments.recipe is None and not any(text.startswith(f"{WORLD_KEY}=") for text in arguments.overrides):
        config.cluster.num_trainers = manifest.layout.get("world_size", config.cluster.num_trainers)
    _check_model(config, manifest, checkpoint)
    ranks = ranks_of(arguments.node, trainers=config.cluster.num_trainers, per_node=arguments.gpus_per_node)
    ranges = _find_ranges(config, checkpoint, ranks, rng=manifest.layout == asdict(layout_of(config)))
    sizes = sizes_of(checkpoint, ranges)
    copied = None if arguments.copy_to is None else materialise(checkpoint, arguments.copy_to, ranges)
    if arguments.json:
        print(json.dumps(ranges, indent=1))
        return 0
    print(f"host {arguments.node}: training rank {format_ranks(ranks)} of {config.cluster.num_trainers}")
    _print_table(ranges, sizes)
    if copied is not None:
        print(printable(f"copied {copied} bytes to {arguments.copy_to}"))
    return 0


def ranks_of(node: int, *, trainers: int, per_node: int) -> range:
    """Returns the training ranks of a host.

    >>> ranks_of(1, trainers=6, per_node=4)
    range(4, 6)

    Raises:
        ConfigError: If there is no such host.
    """
    if per_node < 1:
        raise ConfigError(f"--gpus-per-node {per_node}: a host has at least one")
    nodes = -(-trainers // per_node)
    if not 0 <= node < nodes:
        raise ConfigError(
            f"--node {node} does not exist: {trainers} trainers with --gpus-per-node {per_node} use hosts "
            f"{format_ranks(range(nodes))}; change --node, --gpus-per-node or {WORLD_KEY}"
        )
    return range(node * per_node, min((node + 1) * per_node, trainers))


def _check_model(config: RunConfig, manifest: Manifest, checkpoint: Path) -> None:
    """Refuses a layout that does not divide, and a model other than the checkpoint's if the model's weights exist."""
    if not config.model.path:
        raise ConfigError("slices: give model.path=DIR, the model that the checkpoint was trained from")
    layout, model = layout_of(config), Path(config.model.path)
    check_layout(layout)
    check_model(layout, read_hf_directory(model, has_weights=False))
    if any(model.glob("*.safetensors")):
        check_fingerprint(manifest, path=checkpoint, fingerprint=model_fingerprint(model))


def _find_ranges(config: RunConfig, checkpoint: Path, ranks: Sequence[int], *, rng: bool) -> Ranges:
    """Returns the ranges from a child process, because it imports torch and builds a model under fake groups."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_enter_child) as pool:
        try:
            return pool.submit(_find_ranges_in_child, config, checkpoint, list(ranks), rng).result()
        except BrokenProcessPool as error:
            raise RunError("slices: the process that builds the model was killed: is the host short of memory?") from (
                error
            )


def _enter_child() -> None:
    env.become_gpuless()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with ours
    warnings.simplefilter("ignore")  # warnings of libraries matter only for training


def _find_ranges_in_child(config: RunConfig, checkpoint: Path, ranks: Sequence[int], rng: bool) -> Ranges:
    from rl_safe_workers.trainer.needs import find_ranges

    try:
        return find_ranges(config, checkpoint, ranks, rng=rng)
    except RlSafeError:
        raise
    except Exception as error:
        text, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        raise RankError(
            rank_id=trainer_id(ranks[0]), phase="load", cause=Raised(), text=text, trace=trace, raised_at=unix_now()
        ) from None


def _print_table(ranges: Ranges, sizes: Mapping[str, int]) -> None:
    """Prints a line for each file, and the totals. Bytes are exact, so that a copy can be planned from them."""
    needed = {name: sum(stop - start for start, stop in parts) for name, parts in ranges.items()}
    table = Table(show_footer=True)
    table.add_column("file", "total", overflow="fold")
    for heading, total in (
        ("bytes needed", sum(needed.values())),
        ("bytes in all", sum(sizes.values())),
        ("ranges", sum(map(len, ranges.values()))),
    ):
        table.add_column(heading, str(total), justify="right")
    for name, parts in sorted(ranges.items()):
        table.add_row(name, str(needed[name]), str(sizes[name]), str(len(parts)))
    PlainConsole(force_interactive=False).print(table)
