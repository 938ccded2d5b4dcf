"""Five joint ranks, four of them trainers whose world is carved out of the host's default group."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.workers import world_entry
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store
from rl_safe_workers.worlds.training_world import TrainingWorld
from tests.distributed import reference
from tests.distributed.ranks import Outcome, run_ranks
from tests.distributed.recording import is_connected
from tests.distributed.worker import Worker, run_config, served_store

JOINT_SIZE, TRAINERS, STEPS = 5, 4, 3
PATIENCE_S = 5.0
"""How long a collective that the fifth rank is missing from may take to fail."""
SLEEP_S = 90.0
WAYS = ("at once", "in the background", "fully parallel")
"""Ways of saving: the first two without a collective, the last by megatron-core on the training world."""
IDENTITY = {"fingerprint": "tiny", "layout": {"world_size": TRAINERS, "expert": 2}}


@dataclass(frozen=True, kw_only=True)
class Host:
    """A framework with one default group for all ranks.

    Attributes:
        sleeper: The joint rank that takes no part; the others are trainers, in order.
        carves: Whether the trainers carve a training world, or go on in the group of five.
        keeps_default: Whether the carved world stays the default group for the save.
        timeout_s: Longest wait of one collective.
    """

    sleeper: int
    carves: bool = True
    keeps_default: bool = True
    ep: int = 2
    timeout_s: float = 60.0

    @property
    def trainers(self) -> list[int]:
        return [rank for rank in range(JOINT_SIZE) if rank != self.sleeper]


def live_as(joint_rank: int, host: Host, address: StoreAddress, model: Path, root: Path) -> Any:
    store = connect_store(address, timeout=timedelta(seconds=SLEEP_S))
    dist.init_process_group(
        "gloo",
        store=PrefixStore("host", store),
        rank=joint_rank,
        world_size=JOINT_SIZE,
        timeout=timedelta(seconds=host.timeout_s),
    )
    if joint_rank == host.sleeper:
        result = sleep_long(store, host)
    else:
        try:
            result = train(carved_worker(joint_rank, host, model), host, address, root)
        finally:
            store.set(f"done/{joint_rank}", "")
    store.set(f"well/{joint_rank}", "")
    return {**result, "sums": go_on_as_the_host(store)}


def sleep_long(store: TCPStore, host: Host) -> dict[str, Any]:
    store.wait([f"done/{rank}" for rank in host.trainers])
    return {"entered_a_collective": is_connected(dist.group.WORLD), "groups": len(c10d._world.pg_map)}


def go_on_as_the_host(store: TCPStore) -> list[float]:
    """A collective of the host's default group and one of a new group; only once all five are well."""
    try:
        store.wait([f"well/{rank}" for rank in range(JOINT_SIZE)], timedelta(seconds=1))
    except DistStoreError:
        return []
    sums = []
    for group in (dist.group.WORLD, dist.new_group(timeout=timedelta(seconds=10))):
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        sums.append(one.item())
    return sums


def carved_worker(joint_rank: int, host: Host, model: Path) -> Worker:
    config = run_config(model, ep=host.ep)
    config.rl_safe.timeouts.groups = config.rl_safe.timeouts.save = host.timeout_s
    config.rl_safe.checkpoint.keep_last = 0
    return Worker(config, rank=host.trainers.index(joint_rank), size=TRAINERS)


def do_not_carve(training_joint_ranks: list[int], *, timeout: timedelta, options: object) -> TrainingWorld:
    return TrainingWorld(
        training_rank=dist.get_rank(), size=TRAINERS, joint_ranks=tuple(training_joint_ranks), host_group=None
    )


def train(worker: Worker, host: Host, address: StoreAddress, root: Path) -> dict[str, Any]:
    host_group = dist.group.WORLD
    if not host.carves:
        world_entry.carve_training_world = do_not_carve
    worker.carve_world(address, training_joint_ranks=host.trainers)
    worker.init_groups(seed=0)
    worker.bootstrap()
    worker.convert()
    batch = reference.random_batch(rows=8)
    grad_norms = [worker.step(batch)["grad_norm"] for _ in range(STEPS)]
    if not host.keeps_default:
        c10d._update_default_pg(host_group)
    digests = {way: save_and_load(worker, root, way, step=STEPS + i) for i, way in enumerate(WAYS)}
    training_rank, default = dist.get_rank(), dist.get_process_group_ranks(dist.group.WORLD)
    return {
        "training_rank": training_rank,
        "default_ranks": default,
        "grad_norms": grad_norms,
        "digests": digests,
        "failed": worker.teardown(),
        "host_group_used": is_connected(host_group),
        "groups_left": [dist.group.WORLD is host_group, dist.get_world_size(), len(c10d._world.pg_map)],
    }


def save_and_load(worker: Worker, root: Path, way: str, *, step: int) -> tuple[str, str, str]:
    """Digests of what is saved, of what a step makes of it, and of what is loaded."""
    saved = worker.digest()
    worker.safe.rl_safe.checkpoint.fully_parallel_save = way == "fully parallel"
    path = worker.save_checkpoint(root, step=step, driver_state={}, background=way == "in the background", **IDENTITY)
    worker.step(reference.random_batch(rows=8, seed=step))
    moved = worker.digest()
    worker.load_checkpoint(path, **IDENTITY)
    return saved, moved, worker.digest()


def run_host(host: Host, model: Path, root: Path) -> list[Outcome]:
    with served_store() as address:
        return run_ranks(live_as, JOINT_SIZE, host, address, model, root, timeout_s=SLEEP_S)


@dataclass(frozen=True)
class Run:
    """A carved run that went well."""

    trainers: list[dict[str, Any]]
    sleeper: dict[str, Any]
    root: Path
