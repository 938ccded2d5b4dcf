"""Trainers and rollout ranks of a weight sync that fails, and of the next one."""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import RlSafeError, WeightSyncError
from rl_safe_workers.rollout.protocol import plan_buckets
from rl_safe_workers.workers import weight_sync
from rl_safe_workers.workers.outgoing import Outgoing
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.joint_group import JointGroup, joint_world
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.file_pair import FilePair
from tests.distributed.worker import Worker, control_plane
from tests.unpacking import unpack

TRAINERS, FAILING = 2, 1
BUCKET_BYTES = 200_000
SYNC_S, SOON_S = 6.0, 2.0
PATIENCE = timedelta(seconds=60)


_kept: list[Any] = []
"""Groups of ranks that read no more. Otherwise the group would close, and the other side would notice at once."""
Hinder = Callable[[Worker, pytest.MonkeyPatch], None]
"""Called on training rank ``FAILING``, in its own process, before the first sync."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two trainers whose first sync fails, and whose second does not."""

    colocated: bool = False
    tp: int = 1
    hinder: Hinder | None = None
    reads: int | None = None
    """Buckets that the rollout rank beside training rank ``FAILING`` reads of the first sync; None: all."""
    stays: bool = True
    """True if it lives on when it reads no more."""
    again: bool = True
    """True if the world is used after the first sync."""

    @property
    def rollouts(self) -> int:
        """Rollout ranks of each generation."""
        return TRAINERS if self.colocated else 1


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One trainer's record."""

    error: RlSafeError | None
    """The error of the first sync."""
    waited_s: float
    left: bool
    """True if it is out of the joint group after that."""
    packed: int
    """Buckets that it began to pack in it."""
    summed: float | None
    """Over the world, of 1 from each trainer."""
    prints: dict[str, str]
    """Prints of the weights that it exports after the second sync."""


def _prints(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Digest of every bit, by name."""
    return {n: hashlib.sha256(w.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest() for n, w in weights}


def _fail_once(worker: Worker, case: Case) -> dict[str, Any]:
    packed, pack = [], Outgoing.pack

    def counted(*args: Any, **kwargs: Any) -> None:
        packed.append(None)
        pack(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if case.hinder is not None and worker.safe.training_rank == FAILING:
            case.hinder(worker, patch)
            pack = Outgoing.pack
        patch.setattr(Outgoing, "pack", counted)
        start_s, error = time.monotonic(), None
        try:
            worker.send_weights(bucket_bytes=BUCKET_BYTES)
        except RlSafeError as caught:
            error = caught
        waited_s = time.monotonic() - start_s
    left = worker.safe.weights.joint_group is None
    return {"error": error, "waited_s": waited_s, "left": left, "packed": len(packed)}


def _train(worker: Worker, address: StoreAddress, case: Case) -> Seen:
    worker.start(address)
    worker.convert()
    specs, size = worker.weight_specs(), TRAINERS + case.rollouts
    worker.safe.store.set("specs", pickle.dumps(specs))
    worker.join(size, generation=0, colocated=case.colocated)
    first = _fail_once(worker, case)
    worker.safe.store.set("over", "")
    if not case.again:
        return Seen(**first, summed=None, prints={})
    summed = torch.ones(1)
    dist.all_reduce(summed, group=dist.group.WORLD)
    worker.join(size, generation=1, colocated=case.colocated)
    worker.send_weights(bucket_bytes=BUCKET_BYTES)
    prints = _prints(worker.export_hf_weights())
    assert worker.teardown() == {}
    return Seen(**first, summed=summed.item(), prints=prints)


def _receive(
    joint_rank: int, address: StoreAddress, case: Case, *, generation: int, reads: int | None = None
) -> dict[str, str]:
    """Joins and receives so many buckets, or all; returns what has arrived."""
    store = connect_store(address, timeout=PATIENCE)
    size = TRAINERS + case.rollouts
    control = control_plane(address, rank=joint_rank, size=size, trainers=TRAINERS, world=joint_world(generation))
    kind = FilePair if case.colocated else JointGroup
    group = kind(control, generation=generation, timeout=PATIENCE, device=torch.device("cpu"))
    received = {}
    buckets = plan_buckets(pickle.loads(store.get("specs")), bucket_bytes=BUCKET_BYTES)
    buffers = group.buffers(max(bucket.size_bytes for bucket in buckets))
    for number, bucket in enumerate(buckets[:reads]):
        buffer = buffers[number % len(buffers)][: bucket.size_bytes]
        group.broadcast(buffer, source=bucket.source)()
        received.update(_prints(unpack(bucket, buffer)))
    if reads is None:
        group.flush()
    else:
        _kept.append(group)
    return received


def _receive_in_vain(joint_rank: int, address: StoreAddress, case: Case) -> None:
    """Receives what there is of the first sync, until the trainers know how it went."""
    stops = case.reads is not None and joint_rank == TRAINERS + FAILING
    reads = case.reads if stops else None

    def receive() -> None:
        with suppress(WeightSyncError):
            _receive(joint_rank, address, case, generation=0, reads=reads)

    reading = Thread(target=receive, daemon=True)
    reading.start()
    if stops and not case.stays:
        reading.join()
        os._exit(1)
    connect_store(address, timeout=PATIENCE).wait(["over"])


def joint_rank(rank: int, address: StoreAddress, config: RunConfig, folder: Path, case: Case) -> Any:
    FilePair.folder, weight_sync.GpuPair = folder, FilePair
    if rank < TRAINERS:
        return _train(Worker(config, rank=rank, size=TRAINERS), address, case)
    if rank < TRAINERS + case.rollouts:
        return _receive_in_vain(rank, address, case)
    return _receive(rank - case.rollouts, address, case, generation=1)
