"""The joint group over NCCL: a long sync, and the end of one whose peer does not receive."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import spawn

from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.ranks import joint_ids
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.joint_group import JointGroup, joint_world
from rl_safe_workers.worlds.store import connect_store, serve_store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

PATIENCE, SYNC = timedelta(seconds=120), timedelta(seconds=10)
MANY, LAUNCHES = 1000, 5
"""Buckets of a sync, and launches for each: far more than a CUDA stream takes while it waits."""


def _join(rank: int, address: StoreAddress) -> JointGroup:
    store = connect_store(address, timeout=PATIENCE)
    members = joint_ids(trainers=1, size=2)
    control = ControlPlane(store, world=joint_world(0), rank=rank, members=members, secret=address.secret)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return JointGroup(control, generation=0, timeout=PATIENCE, device=device, sync_timeout=SYNC)


def _send_many(rank: int, address: StoreAddress, folder: str, receives: bool) -> None:
    group, store = _join(rank, address), connect_store(address, timeout=PATIENCE)
    buffers, began_s, told = group.buffers(4096), time.monotonic(), "sent"
    try:
        for number in range(MANY if rank == 0 or receives else 0):
            buffer = buffers[number % 2]
            if rank == 0:
                for _ in range(LAUNCHES):
                    buffer.fill_(number % 256)
            group.broadcast(buffer, source=0)()
        if rank == 0 or receives:
            group.flush()
            told = f"sent {int(buffers[1][0])}"
    except WeightSyncError as error:
        told = str(error)
    Path(folder, f"{rank}").write_text(f"{time.monotonic() - began_s:.1f} {told}")
    store.set(f"done/{rank}", "")
    store.wait([f"done/{1 - rank}"], PATIENCE)


@pytest.mark.parametrize("receives", [True, False])
def test_a_long_sync_ends_with_and_without_its_peer(receives: bool, tmp_path: Path) -> None:
    server, address, _ = serve_store("127.0.0.1", timeout=PATIENCE)
    spawn(_send_many, args=(address, str(tmp_path), receives), nprocs=2)
    assert server.num_keys() > 0
    seconds, told = (tmp_path / "0").read_text().split(" ", 1)
    if receives:
        assert told == (tmp_path / "1").read_text().split(" ", 1)[1] == f"sent {(MANY - 1) % 256}"
    else:
        assert "a peer is gone" in told
        assert float(seconds) < 2 * SYNC.total_seconds()
