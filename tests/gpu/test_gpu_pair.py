"""Real GPU memory shared by two processes, and NCCL's groups beside a store whose door is shut."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.ranks import joint_ids
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.gpu_pair import GpuPair
from rl_safe_workers.worlds.joint_group import joint_world
from rl_safe_workers.worlds.store import connect_store, serve_store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PATIENCE = timedelta(seconds=60)
BUFFER_BYTES = 64 * 2**20
SIZES = (1, 5000, BUFFER_BYTES, BUFFER_BYTES - 3, 77)
"""Bytes of the buckets of a round. Their number is odd, so that each goes through several buffers."""
ROUNDS = 3
SLOW_CYCLES = 20_000_000
"""Cycles that a GPU is busy before it fills a buffer: some 10 ms."""


def _contents(number: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(number)
    return torch.randint(256, (SIZES[number],), dtype=torch.uint8, generator=random)


def _pair(rank: int, address: StoreAddress, device: torch.device) -> GpuPair:
    return GpuPair(_control(rank, address), generation=0, timeout=PATIENCE, device=device)


def _control(rank: int, address: StoreAddress) -> ControlPlane:
    store = connect_store(address, timeout=PATIENCE)
    members = joint_ids(trainers=1, size=2)
    return ControlPlane(store, world=joint_world(0), rank=rank, members=members, secret=address.secret)


def _pass_round(pair: GpuPair, device: torch.device, *, ahead: int) -> bool:
    """Passes all buckets, which the reader copies while the next one arrives. Returns True if they arrive unchanged.

    Args:
        pair: One side of the pair.
        device: The GPU.
        ahead: Number of buffers for which the reader has called ``broadcast`` when it copies one, besides that one.
    """
    ready = [_contents(number).to(device) for number in range(len(SIZES))]
    buffers = pair.buffers(BUFFER_BYTES)
    waits = deque[Callable[[], None]]()
    copies: list[torch.Tensor] = []
    arriving = deque[tuple[torch.Tensor, Callable[[], None]]]()
    for number, size in enumerate(SIZES):
        buffer = buffers[number % len(buffers)][:size]
        if pair.sends:
            # A reader that is told too early copies the buffer before the GPU fills it.
            torch.cuda._sleep(SLOW_CYCLES)
            buffer.copy_(ready[number])
            waits.append(pair.broadcast(buffer, source=0))
            if len(waits) >= len(buffers):
                waits.popleft()()
        else:
            arriving.append((buffer, pair.broadcast(buffer, source=0)))
            if len(arriving) > ahead:
                copies.append(_copy(*arriving.popleft()))
    copies += [_copy(*one) for one in arriving]
    del buffers, buffer, arriving
    pair.flush()
    return all(torch.equal(copy.cpu(), _contents(number)) for number, copy in enumerate(copies))


def _copy(buffer: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
    wait()
    return buffer.clone()


def _pass_on(rank: int, address: StoreAddress, folder: str) -> None:
    device = torch.device("cuda", 0)
    pair = _pair(rank, address, device)
    same = [_pass_round(pair, device, ahead=ahead) for ahead in range(2) for _ in range(ROUNDS)]
    Path(folder, f"{rank}").write_text(str(same))
    store = connect_store(address, timeout=PATIENCE)
    store.add("done", 1)
    while store.add("done", 0) < 2:  # the memory is the trainer's
        time.sleep(0.01)


def test_weights_pass_bit_for_bit_through_shared_gpu_memory(tmp_path: Path) -> None:
    server, address, _ = serve_store("127.0.0.1", timeout=PATIENCE)
    spawn(_pass_on, args=(address, str(tmp_path)), nprocs=2)
    assert server.num_keys() > 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [str([True] * 2 * ROUNDS)] * 2


def _offer_forged(rank: int, address: StoreAddress, folder: str) -> None:
    text = f"cposix\nsystem\n(S'touch {Path(folder, 'ran')}'\ntR."

    class Forger(GpuPair):
        def _offer(self, shared: torch.Tensor) -> None:
            self._send("memory", text.encode().hex().encode())

    device, store = torch.device("cuda", 0), connect_store(address, timeout=PATIENCE)
    pair = (GpuPair if rank else Forger)(_control(rank, address), generation=0, timeout=PATIENCE, device=device)
    if rank == 0:
        assert pair.buffers(BUFFER_BYTES)
        store.wait(["refused"], PATIENCE)
        return
    with pytest.raises(WeightSyncError, match="holds no handle of the pair's memory"):
        pair.buffers(BUFFER_BYTES)
    store.set("refused", "")


def test_a_forged_handle_is_refused_and_not_run(tmp_path: Path) -> None:
    server, address, _ = serve_store("127.0.0.1", timeout=PATIENCE)
    spawn(_offer_forged, args=(address, str(tmp_path)), nprocs=2)
    assert server.num_keys() > 0
    assert not (tmp_path / "ran").exists()


def _make_groups(rank: int, address: StoreAddress, folder: str) -> None:
    # As ranks of different hosts: NCCL takes no two ranks of one host on one GPU.
    os.environ["NCCL_HOSTID"] = f"host{rank}"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store: Any = connect_store(address, timeout=PATIENCE)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    store.add("arrived", 1)
    store.wait(["shut"], PATIENCE)
    values = []
    for _ in range(3):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
        value = torch.ones(4, device=device)
        dist.all_reduce(value, group=group)
        values.append(float(value.sum()))
        dist.destroy_process_group(group)
    Path(folder, f"{rank}").write_text(str(values))
    dist.barrier()
    dist.destroy_process_group()


def test_nccl_groups_are_made_while_the_door_of_the_store_is_shut(tmp_path: Path) -> None:
    store, address, door = serve_store("127.0.0.1", timeout=PATIENCE)
    context = spawn(_make_groups, args=(address, str(tmp_path)), nprocs=2, join=False)
    while store.add("arrived", 0) < 2:
        time.sleep(0.01)
    door.shut()
    store.set("shut", "")
    while not context.join(timeout=5):
        continue
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [str([8.0] * 3)] * 2
