"""Times how four trainers bring all weights to each other, as a weight sync of verl's does: one by one, and packed.

On CPU with gloo, at EP4. The peer is the export of the bridge library that is installed: Megatron-Bridge, or ours over
mbridge.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.table import Row, at_most, machine_in_words
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.versions import installed_versions
from rl_safe_workers.workers.packed_export import PackedExport
from rl_safe_workers.worlds.address import StoreAddress

TRAINERS, ROUNDS, BUCKET_BYTES = 4, 6, 256 * 2**20
MODEL = SeededModelConfig(num_hidden_layers=4, num_experts=128)
"""A model of 1,575 small weights."""


def measure(report: Callable[[str], None]) -> list[Row]:
    """Times both ways in turns. Takes about two minutes.

    Args:
        report: Takes a line with the seconds of each round.
    """
    from tests.distributed.ranks import run_ranks, values
    from tests.distributed.worker import served_store

    with tempfile.TemporaryDirectory() as folder, served_store() as address:
        create_seeded_model(Path(folder) / "model", MODEL)
        of_ranks = values(run_ranks(_in_turns, TRAINERS, address, Path(folder) / "model", timeout_s=600.0))
    weights, buckets, exports, packed = of_ranks[0]
    library = "Megatron-Bridge" if find_spec("megatron.bridge") else "mbridge"
    report(f"{weights} weights in {buckets} buckets: {packed} s; {library}'s export: {exports} s")
    facts: dict[str, Any] = {"machine": machine_in_words(), "versions": installed_versions()}
    return [
        Row(name=f"{weights} weights to every trainer, against {library}'s export", unit="s",
            ours=median(packed[1:]), peer=median(exports[1:]), goal=at_most(0.2), runs=ROUNDS - 1, **facts),
    ]  # fmt: skip


def _in_turns(rank: int, address: StoreAddress, model: Path) -> tuple[int, int, list[float], list[float]]:
    """Returns the numbers of weights and of buckets, and the seconds of each export and of each packed one."""
    from tests.distributed.families import LIBRARIES
    from tests.distributed.worker import Worker, run_config

    config = run_config(model, ep=TRAINERS)
    config.model.bridge = LIBRARIES[0]  # type: ignore[assignment]
    worker = Worker(config, rank=rank, size=TRAINERS)
    worker.start(address)
    worker.convert()
    own = worker.own_hf_weights()
    assert own is not None, "this model's weights can be built alone"
    export = PackedExport(own, training_rank=rank, bucket_bytes=BUCKET_BYTES)
    weights, exports, packed = 0, [], []
    for _ in range(ROUNDS):
        seconds, weights = _timed(worker.export_hf_weights())
        exports.append(seconds)
        packed.append(_timed(export.tensors(torch.device("cpu")))[0])
    assert worker.teardown() == {}
    return weights, len(export.buckets), exports, packed


def _timed(items: Iterator[Any]) -> tuple[float, int]:
    dist.barrier()
    started_s = time.perf_counter()
    count = sum(1 for _ in items)
    return round(time.perf_counter() - started_s, 4), count
