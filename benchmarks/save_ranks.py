"""Runs one rank of the benchmark ``save``: ``python -m benchmarks.save_ranks RANK PORT JOB FOLDER``.

It runs one job. Rank 0 prints its seconds as JSON: for each timed thing, a list with the slowest rank's time of each
repetition.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

RANKS = 4
EP, EXPERT_DP = 2, 2
LATER = 3
"""Number of saves after the first."""
PATIENCE = timedelta(seconds=550)
OURS = "ours_0/global_step_1/dist_ckpt"
"""The shards of our first save."""


class Ranks:
    """The shared state of the jobs: the rank, a clock, and both ways to save."""

    def __init__(self, rank: int, port: int, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        from rl_safe_workers.checkpoint.load.loader import Loader
        from rl_safe_workers.checkpoint.save.save_plan import Replicas
        from rl_safe_workers.checkpoint.save.saver import Saver
        from rl_safe_workers.control.deadline import Deadline
        from rl_safe_workers.control.plane import ControlPlane
        from rl_safe_workers.control.shared_secret import SharedSecret
        from rl_safe_workers.platforms import cpu
        from rl_safe_workers.ranks import trainer_ids

        torch.set_num_threads(1)
        cpu.apply()
        self.rank, self.folder = rank, folder
        self.store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=PATIENCE)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("ranks", self.store), rank=rank, world_size=RANKS, timeout=PATIENCE
        )
        replicas = Replicas(dense=RANKS, expert=EXPERT_DP, optimizer=True)
        deadline = Deadline.after(PATIENCE)
        shared = SharedSecret(self.store, rank=rank, size=RANKS, phase="world", deadline=deadline)
        members = trainer_ids(range(RANKS))
        control = ControlPlane(self.store, world="bench", rank=rank, members=members, secret=shared.secret)
        control.barrier("world", deadline)
        shared.withdraw()
        self.saver, self.loader = Saver(control, replicas=replicas), Loader(control)
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """Times work that all ranks begin together, until the last rank has finished it."""
        import torch.distributed as dist

        dist.barrier()
        started_s = time.perf_counter()
        value = work()
        self.record(name, time.perf_counter() - started_s)
        return value

    def record(self, name: str, seconds: float) -> None:
        """Records the longest of the ranks' times."""
        import torch.distributed as dist

        everyone: list[float] = [0.0] * RANKS
        dist.all_gather_object(everyone, seconds)
        self.seconds[name].append(max(everyone))

    def save(self, state: dict[str, Any], name: str, *, background: bool = False) -> None:
        """Saves in our way, to a new directory."""
        from rl_safe_workers.checkpoint.folders.manifest import SHARDS, Manifest
        from rl_safe_workers.checkpoint.folders.ownership import INCOMPLETE
        from rl_safe_workers.checkpoint.folders.retention import commit, prune, start_save
        from rl_safe_workers.checkpoint.save.writer import file_records

        root = self.folder / name
        pending = root / f"global_step_1{INCOMPLETE}"

        def commit_it(files: Any, notes: Any) -> str:
            manifest = Manifest(
                step=1,
                model_fingerprint="bench",
                layout={},
                saved_at=time.time(),
                versions={},
                files=file_records(pending, files),
                driver_state={},
                digests={},
            )
            path = commit(pending, manifest, durable=files)
            prune(root, keep_last=2, but=path)
            return str(path)

        self.saver.begin(
            state,
            pending / SHARDS,
            content_metadata={},
            prepare=lambda: start_save(root, 1),
            commit=commit_it,
            timeout=PATIENCE,
            background=background,
        )
        if not background:
            self.saver.finish(PATIENCE)

    def save_as_peer(self, state: dict[str, Any], name: str) -> None:
        """Saves as the frameworks do: fully parallel, with validation."""
        import torch.distributed as dist
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), dist.group.WORLD)
        dist_checkpointing.save(state, str(self.make(name)), strategy, validate_access_integrity=True)

    def load_as_peer(self, state: dict[str, Any], name: str) -> dict[str, Any]:
        """Loads as megatron-core does by default. A fully-parallel load would add a broadcast per tensor."""
        from megatron.core import dist_checkpointing

        loaded: dict[str, Any] = dist_checkpointing.load(state, str(self.folder / name), validate_access_integrity=True)
        return loaded

    def make(self, name: str) -> Path:
        """Makes a directory on rank 0; returns its path once it exists for all ranks."""
        import torch.distributed as dist

        directory = self.folder / name
        if self.rank == 0:
            directory.mkdir(parents=True)
        dist.barrier()
        return directory

    def remove(self, name: str) -> None:
        """Removes a directory on rank 0 once all ranks are done with it."""
        import shutil

        import torch.distributed as dist

        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder / name)
        dist.barrier()


def ours(ranks: Ranks) -> None:
    """Times our saves and load of workload A. The first save is also the first save of the process."""
    from benchmarks.inventory import MoeInventory

    inventory = MoeInventory()

    def fresh() -> dict[str, Any]:
        return dict(inventory.shards(ranks.rank, ep=EP, expert_dp=EXPERT_DP))

    state = fresh()
    for i in range(1 + LATER):
        described = _described_anew(state)
        ranks.timed("later" if i else "first", partial(ranks.save, described, f"ours_{i}"))
    for i in range(1 + LATER):
        _save_in_background(ranks, state, f"background_{i}")
    target = _zeroed(fresh())
    ranks.timed("load", lambda: ranks.loader.load(lambda: target, ranks.folder / OURS, timeout=PATIENCE))


def _described_anew(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the same tensors in new descriptions, as a trainer makes them for each save. This must not be timed."""
    from dataclasses import replace

    return {key: replace(shard) for key, shard in state.items()}


def _save_in_background(ranks: Ranks, state: dict[str, Any], name: str) -> None:
    import torch.distributed as dist

    described = _described_anew(state)
    dist.barrier()
    started_s = time.perf_counter()
    ranks.save(described, name, background=True)
    blocked_s = time.perf_counter() - started_s
    while ranks.saver.in_flight:
        time.sleep(0.02)
        started_s = time.perf_counter()
        ranks.saver.poll()
        blocked_s += time.perf_counter() - started_s
    ranks.record("blocked", blocked_s)


def peer(ranks: Ranks) -> None:
    """Times the peer's saves and load of workload A."""
    from benchmarks.inventory import MoeInventory

    inventory = MoeInventory()

    def fresh() -> dict[str, Any]:
        return dict(inventory.shards(ranks.rank, ep=EP, expert_dp=EXPERT_DP))

    state = fresh()
    for i in range(2):
        described = _described_anew(state)
        ranks.timed("later" if i else "first", partial(ranks.save_as_peer, described, f"peer_{i}"))
    target = _zeroed(fresh())
    ranks.timed("load", lambda: ranks.load_as_peer(target, "peer_0"))


def _zeroed(state: dict[str, Any]) -> dict[str, Any]:
    for shard in state.values():
        shard.data.zero_()
    return state


def interop(ranks: Ranks) -> None:
    """Counts checkpoints of A that load bit-equal, both ways, at EP2, EP4 and EP1. Runs after `ours` and `peer`."""
    import torch

    from benchmarks.inventory import MoeInventory

    inventory = MoeInventory()
    for ep in (2, 4, 1):
        wanted = inventory.shards(ranks.rank, ep=ep, expert_dp=RANKS // ep)
        described = {"ours": "peer_0", "peer": OURS}
        for reader, name in described.items():
            target = _zeroed({key: _copy(shard) for key, shard in wanted.items()})
            if reader == "ours":
                loaded = ranks.loader.load(lambda t=target: t, ranks.folder / name, timeout=PATIENCE)  # type: ignore[misc]
            else:
                loaded = ranks.load_as_peer(target, name)
            equal = all(torch.equal(loaded[key], shard.data) for key, shard in wanted.items())
            ranks.record("different", 0.0 if equal else 1.0)


def _copy(shard: Any) -> Any:
    from dataclasses import replace

    return replace(shard, data=shard.data.clone())


def experts(ranks: Ranks) -> None:
    """Times saves of workload C. Then times our loads, and megatron-core's of our save and of its own, in turns."""
    from benchmarks.inventory import MoeInventory

    inventory = MoeInventory(layers=2, experts=64, hidden=512)
    state = dict(inventory.shards(ranks.rank, ep=EP, expert_dp=EXPERT_DP))
    for i in range(1 + LATER):
        label = "later" if i else "first"
        ranks.timed(f"ours {label}", partial(ranks.save, _described_anew(state), f"ours_{i}"))
        ranks.timed(f"peer {label}", partial(ranks.save_as_peer, _described_anew(state), f"peer_{i}"))
        for name in ("ours", "peer") if i else ():
            ranks.remove(f"{name}_{i}")
    target = _zeroed({key: _copy(shard) for key, shard in state.items()})
    for i in range(1 + LATER):
        for label, name in (("peer loads ours", OURS), ("peer loads its own", "peer_0")):
            # The first load imports modules.
            ranks.timed(label if i else "warm up", partial(ranks.load_as_peer, _described_anew(target), name))
        described = _described_anew(target)
        load = partial(ranks.loader.load, lambda state=described: state, ranks.folder / OURS, timeout=PATIENCE)
        ranks.timed("ours loads" if i else "warm up", load)


def large(ranks: Ranks) -> None:
    """Times workload B in turns: our save, and the same bytes by plain torch.save and fsync."""
    import torch

    from benchmarks.inventory import large_tensors

    state = dict(large_tensors(ranks.rank, ranks=RANKS, count=16, mib=64))

    def plainly(directory: Path) -> None:
        with (directory / f"{ranks.rank}.pt").open("wb") as file:
            torch.save({key: shard.data for key, shard in state.items()}, file)
            file.flush()
            os.fsync(file.fileno())

    for i in range(5):
        for name in ("ours", "plain") if i % 2 else ("plain", "ours"):
            folder = f"{name}_{i}"
            # The very first save depends on the earlier state of the disk's cache.
            label = name if i else "warm_up"
            if name == "ours":
                ranks.timed(label, partial(ranks.save, _described_anew(state), folder))
            else:
                ranks.timed(label, partial(plainly, ranks.make(folder)))
            ranks.remove(folder)


def scaling(ranks: Ranks) -> None:
    """Times later saves of A with fewer and with more layers and experts."""
    from benchmarks.inventory import MoeInventory

    for layers, experts in [(24, 128), (48, 128), (96, 128), (48, 64), (48, 256)]:
        name = f"{layers}x{experts}"
        state = dict(MoeInventory(layers=layers, experts=experts).shards(ranks.rank, ep=EP, expert_dp=EXPERT_DP))
        ranks.save(_described_anew(state), "warm_up")
        ranks.remove("warm_up")
        for _ in range(7):
            ranks.timed(name, partial(ranks.save, _described_anew(state), "again"))
            ranks.remove("again")


JOBS: dict[str, Callable[[Ranks], None]] = {
    "ours": ours,
    "peer": peer,
    "interop": interop,
    "experts": experts,
    "large": large,
    "scaling": scaling,
}


def main() -> None:
    """Runs this process's part of a job."""
    rank, port, job, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    warnings.simplefilter("ignore")
    ranks = Ranks(rank, port, folder)
    JOBS[job](ranks)
    import torch.distributed as dist

    dist.barrier()
    if rank == 0:
        sys.stdout.write(json.dumps(ranks.seconds) + "\n")
        sys.stdout.flush()
    dist.barrier()
    # Megatron-core's own saves leave a helper process behind. An ordinary exit would wait for it.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
