"""Colocated pairs: weights pass from a trainer to the rollout rank on its GPU, here through a file that both map."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed import Store

from rl_safe_workers.errors import CommunicatorError, PhaseTimeoutError, WeightSyncError, foreign_cause
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.worlds import gpu_pair
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.joint_group import joint_world
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.file_pair import FilePair
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import control_plane, served_store

BUFFER_BYTES, PAIRS, SIZE = 1024, 2, 4
ROUNDS = 6
PATIENCE = timedelta(seconds=60)
READ_S = 0.01
"""Seconds before a rollout rank reads a buffer. A trainer that did not wait for it would fill the buffer meanwhile."""
SHORT = timedelta(seconds=1)
SIZES = (5, 0, BUFFER_BYTES, BUFFER_BYTES - 1, 1)
"""Bytes of the buckets of a round. Their number is odd, so that each goes through several buffers."""


def _join(
    joint_rank: int,
    address: StoreAddress,
    folder: Path,
    *,
    size: int = SIZE,
    generation: int = 0,
    timeout: timedelta = PATIENCE,
    sync_timeout: timedelta | None = None,
    pair: type[FilePair] = FilePair,
) -> FilePair:
    pair.folder = folder
    control = control_plane(address, rank=joint_rank, size=size, trainers=size // 2, world=joint_world(generation))
    return pair(
        control,
        generation=generation,
        timeout=timeout,
        device=torch.device("cpu"),
        sync_timeout=sync_timeout,
    )


def _contents(pair: int, turn: int) -> list[bytes]:
    """Random bytes that no other pair or turn has."""
    random = Random(100 * pair + turn)
    return [random.randbytes(size) for size in SIZES]


def _pass(group: FilePair, contents: list[bytes], *, ahead: int = 1) -> list[bytes]:
    """Passes a round; returns what each buffer held once the call allowed its use.

    Like an engine, a rollout rank reads a buffer only after it has called `broadcast` for the next one. With ``ahead``
    0 it reads each buffer at once.
    """
    buffers = group.buffers(BUFFER_BYTES)
    held, waits = [], deque[Callable[[], None]]()
    arriving: list[tuple[torch.Tensor, Callable[[], None]]] = []
    for number, content in enumerate(contents):
        buffer = buffers[number % len(buffers)][: len(content)]
        if group.sends:
            buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else buffer)
            waits.append(group.broadcast(buffer, source=0))
            if len(waits) >= len(buffers):
                waits.popleft()()
            held.append(buffer.numpy().tobytes())
            continue
        arriving.append((buffer, group.broadcast(buffer, source=0)))
        if len(arriving) > ahead:
            held.append(_read(*arriving.pop(0)))
    held += [_read(*one) for one in arriving]
    del buffers, buffer, arriving
    group.flush()
    return held


def _read(buffer: torch.Tensor, wait: Callable[[], None]) -> bytes:
    wait()
    time.sleep(READ_S)
    return buffer.numpy().tobytes()


def _meet(store: Store, name: str, times: int) -> None:
    """Waits until every rank has come here as often. One key, whatever the number of times."""
    store.add(name, 1)
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while store.add(name, 0) < times * SIZE:
        assert time.monotonic() < deadline, f"not everyone came to {name}"
        time.sleep(0.005)


def _pass_on(joint_rank: int, address: StoreAddress, folder: Path) -> dict[str, Any]:
    """Passes several rounds on; between them, while everyone waits, each rank counts the store's keys."""
    store = connect_store(address, timeout=PATIENCE)
    group = _join(joint_rank, address, folder)
    received, keys = [], []
    for name in ("counting", "counted"):
        _meet(store, name, 1)
    for turn in range(ROUNDS):
        keys.append(store.num_keys())
        _meet(store, "counted", 2 + turn)
        sent = _contents(joint_rank % PAIRS, turn)
        received.append(_pass(group, sent if joint_rank < PAIRS else [bytes(len(one)) for one in sent]))
        _meet(store, "counting", 2 + turn)
    return {"received": received, "keys": [*keys, store.num_keys()], "is_open": group.is_open}


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two pairs after several rounds, by joint rank."""
    with served_store() as address:
        return values(run_ranks(_pass_on, SIZE, address, tmp_path_factory.mktemp("pairs")))


@pytest.mark.parametrize("pair", range(PAIRS))
def test_every_tensor_arrives_bit_for_bit_round_after_round(passed: list[dict[str, Any]], pair: int) -> None:
    expected = [_contents(pair, turn) for turn in range(ROUNDS)]
    assert passed[pair + PAIRS]["received"] == expected
    assert passed[pair + PAIRS]["is_open"]


def test_nothing_is_left_in_the_store_once_it_is_flushed(passed: list[dict[str, Any]]) -> None:
    for rank in passed:
        before, *after = rank["keys"]
        assert after == [before] * ROUNDS


def _read_at_once(joint_rank: int, address: StoreAddress, folder: Path) -> list[bytes]:
    sent = _contents(0, 0)
    return _pass(
        _join(joint_rank, address, folder, size=2), sent if joint_rank == 0 else [bytes(len(s)) for s in sent], ahead=0
    )


def test_a_rollout_rank_need_not_read_ahead(address: StoreAddress, tmp_path: Path) -> None:
    assert values(run_ranks(_read_at_once, 2, address, tmp_path))[1] == _contents(0, 0)


def _pass_alone(joint_rank: int, address: StoreAddress, folder: Path, absent: int, stays: bool) -> list[Any]:
    """One of the pair does no more once both have the buffers, or ends; the other goes on."""
    group = _join(joint_rank, address, folder, size=2, sync_timeout=SHORT if stays else PATIENCE)
    buffer, *_ = group.buffers(BUFFER_BYTES)
    store = connect_store(address, timeout=PATIENCE)
    if joint_rank == absent:
        if stays:
            store.wait(["over"], PATIENCE)
        return []
    start_s = time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        group.broadcast(buffer, source=0)()
    waited_s = time.monotonic() - start_s
    store.set("over", "")
    with pytest.raises(WeightSyncError, match="the pair is closed"):
        group.broadcast(buffer, source=0)
    return [str(caught.value), foreign_cause(caught.value), waited_s, group.is_open]


@pytest.mark.parametrize("stays", [True, False], ids=["silent", "ended"])
@pytest.mark.parametrize("absent", [1, 0], ids=["no_reader", "no_sender"])
def test_the_loss_of_one_side_fails_the_other(address: StoreAddress, tmp_path: Path, absent: int, stays: bool) -> None:
    """Within the timeout if it is silent, and at once if it has ended."""
    outcomes = values(run_ranks(_pass_alone, 2, address, tmp_path, absent, stays))
    message, foreign, waited_s, is_open = outcomes[1 - absent]
    assert message.startswith(f"joint rank {1 - absent}: its pair did not keep up: ")
    assert foreign is (ForeignCause.TIMEOUT if stays else ForeignCause.PEER_LOST)
    assert waited_s < PATIENCE.total_seconds() / 2
    assert not stays or waited_s > SHORT.total_seconds() * 0.9
    assert not is_open


def _join_impatiently(joint_rank: int, address: StoreAddress, folder: Path) -> None:
    _join(joint_rank, address, folder, generation=4, timeout=4 * SHORT)


def test_a_rank_that_does_not_join_is_named(address: StoreAddress, tmp_path: Path) -> None:
    for outcome in run_ranks(_join_impatiently, SIZE, address, tmp_path, ranks=[0, 1, 3]):
        assert isinstance(outcome.error, PhaseTimeoutError), outcome.trace
        assert outcome.error.missing == {RankId(Role.ROLLOUT, 0)}
        assert "joint group 4" in str(outcome.error)
        assert "rl_safe.timeouts.joint" in str(outcome.error)


def _cannot_connect(*_: object) -> None:
    raise CommunicatorError("there is no way")


def _join_without_a_way(joint_rank: int, address: StoreAddress, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if joint_rank == SIZE - 1:
            patch.setattr(gpu_pair.LocalChannel, "connect", _cannot_connect)
        _join(joint_rank, address, folder, timeout=4 * SHORT)


def test_a_pair_that_cannot_connect_fails_all_ranks_and_is_named(address: StoreAddress, tmp_path: Path) -> None:
    for rank, outcome in enumerate(run_ranks(_join_without_a_way, SIZE, address, tmp_path)):
        assert isinstance(outcome.error, WeightSyncError), outcome.trace
        assert str(outcome.error) == f"joint rank {SIZE - 1} could not join the joint group: there is no way"
        assert outcome.error.culprit == (None if rank == SIZE - 1 else RankId(Role.ROLLOUT, 1))


class UnsharedPair(FilePair):
    """A trainer whose device does not share memory."""

    def _offer(self, shared: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: not supported\nmore about it")


def _share_in_vain(joint_rank: int, address: StoreAddress, folder: Path) -> None:
    _join(joint_rank, address, folder, size=2, timeout=4 * SHORT, pair=UnsharedPair).buffers(BUFFER_BYTES)


def test_memory_that_cannot_be_shared_fails_both_sides(address: StoreAddress, tmp_path: Path) -> None:
    trainer, rollout = run_ranks(_share_in_vain, 2, address, tmp_path)
    assert isinstance(trainer.error, WeightSyncError), trainer.trace
    assert isinstance(rollout.error, WeightSyncError), rollout.trace
    assert str(trainer.error) == "joint rank 0: could not share memory with its pair: CUDA error: not supported"
    assert str(rollout.error).startswith("joint rank 1: could not share memory with its pair: ")


def _close_and_rejoin(joint_rank: int, address: StoreAddress, folder: Path) -> list[Any]:
    """The reader leaves before the first broadcast."""
    first = _join(joint_rank, address, folder, size=2, sync_timeout=SHORT)
    buffer, *_ = first.buffers(BUFFER_BYTES)
    if joint_rank == 0:
        wait = first.broadcast(buffer, source=0)
        with pytest.raises(WeightSyncError, match="did not keep up"):
            wait()
    first.close()
    first.close()
    with pytest.raises(WeightSyncError, match=f"joint rank {joint_rank}: the pair is closed"):
        first.broadcast(buffer, source=0)
    second = _join(joint_rank, address, folder, size=2, generation=1)
    held = _pass(second, [b"x"] if joint_rank == 0 else [b"-"])
    return [first.is_open, second.is_open, held]


def test_close_is_idempotent_and_the_next_generation_works(address: StoreAddress, tmp_path: Path) -> None:
    assert values(run_ranks(_close_and_rejoin, 2, address, tmp_path)) == [[False, True, [b"x"]]] * 2
