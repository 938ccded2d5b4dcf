"""The joint group is built anew after a rollout rank has died in a sync. Nothing of the training world takes part."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from rl_safe_workers.compat import torch_groups
from rl_safe_workers.config import RunConfig
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.ranks import joint_ids
from rl_safe_workers.rollout.protocol import plan_buckets
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.joint_group import JointGroup, joint_world
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config
from tests.unpacking import unpack

TRAINERS, BUCKET_BYTES = 2, 200_000
PATIENCE = timedelta(seconds=30)
GENERATIONS = ([0, 1], [0], [0, 1], [0, 1])
"""Rollout ranks of each joint group. Rank 1 dies in the first sync. Another process has its number later."""
STAYS, DIES, COMES = range(TRAINERS, TRAINERS + 3)

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One trainer's record of the torch groups of its process, and of the joint groups in the run's store."""

    groups: list[int]
    """Number of groups that torch has counted, before the first join and after each sync."""
    generations: set[str]
    """Generations of which a key is left at the end."""
    exported: Weights


def _train(worker: Worker, address: StoreAddress) -> Seen:
    worker.start(address)
    worker.convert()
    store = worker.safe.store
    store.set("specs", pickle.dumps(worker.weight_specs()))
    groups = [torch_groups.group_count()]
    for generation, rollout_ranks in enumerate(GENERATIONS):
        worker.join(TRAINERS + len(rollout_ranks), generation=generation, rollout_ranks=rollout_ranks)
        if generation == 0:
            with pytest.raises(WeightSyncError):
                worker.send_weights(bucket_bytes=BUCKET_BYTES)
        else:
            worker.send_weights(bucket_bytes=BUCKET_BYTES)
        groups.append(torch_groups.group_count())
    found = (re.match(r"joint(?: group )?/?(\d+)/", key) for key in store.list_keys())  # type: ignore[attr-defined]
    left = {match[1] for match in found if match is not None}
    exported = dict(worker.export_hf_weights())
    assert worker.teardown() == {}
    return Seen(groups=groups, generations=left, exported=exported)


def _receive(rollout_rank: int, address: StoreAddress, generation: int, *, dies: bool = False) -> Weights:
    store, ranks = connect_store(address, timeout=PATIENCE), GENERATIONS[generation]
    members = joint_ids(trainers=TRAINERS, size=TRAINERS + len(ranks), rollout_ranks=ranks)
    control = ControlPlane(
        store,
        world=joint_world(generation),
        rank=TRAINERS + ranks.index(rollout_rank),
        members=members,
        secret=address.secret,
    )
    group = JointGroup(control, generation=generation, timeout=PATIENCE, device=torch.device("cpu"))
    received: Weights = {}
    for number, bucket in enumerate(plan_buckets(pickle.loads(store.get("specs")), bucket_bytes=BUCKET_BYTES)):
        if dies and number == 1:
            os._exit(1)
        buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8)
        group.broadcast(buffer, source=bucket.source)()
        received.update({name: tensor.clone() for name, tensor in unpack(bucket, buffer)})
    group.close()
    return received


def _rank(rank: int, address: StoreAddress, config: RunConfig) -> Seen | list[Weights]:
    if rank == DIES:
        return [_receive(1, address, 0, dies=True)]
    if rank == COMES:
        return [_receive(1, address, generation) for generation in (2, 3)]
    if rank == STAYS:
        with pytest.raises(WeightSyncError):
            _receive(0, address, 0)
        return [_receive(0, address, generation) for generation in (1, 2, 3)]
    return _train(Worker(config, rank=rank, size=TRAINERS), address)


def test_rebuilt_joint_group_needs_no_training_group(address: StoreAddress, seeded_models: dict[str, Path]) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    outcomes = run_ranks(_rank, COMES + 1, address, config, timeout_s=90)
    first, second, stays, comes = values([outcomes[rank] for rank in (0, 1, STAYS, COMES)])
    for seen in (first, second):
        assert len(set(seen.groups)) == 1
    assert first.generations == {str(len(GENERATIONS) - 1)}
    for received in [*stays, *comes]:
        assert received.keys() == first.exported.keys()
        assert all(torch.equal(received[name], weight) for name, weight in first.exported.items())
