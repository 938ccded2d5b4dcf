"""A save, good or failed, leaves a checkpoint or nothing, and no rank that waits for another in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from rl_safe_workers.checkpoint.folders.manifest import complete_checkpoints
from rl_safe_workers.checkpoint.save import saver
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.ranks import Outcome, run_ranks, values
from tests.distributed.shards import SIZE, Saving, state_of
from tests.distributed.worker import served_store

FOR_EVER_S = 600.0
"""Longer than a test may take: who waits for a timeout of this does not get to the end."""
VICTIM = 2


def _run(function: Callable[..., Any], *args: Any) -> list[Outcome]:
    with served_store() as address:
        return run_ranks(function, SIZE, address, *args, timeout_s=60)


def _left_behind(root: Path) -> list[str]:
    """Threads, processes and open files of this rank."""
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    processes = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    files = [file.path for file in psutil.Process().open_files() if Path(file.path).is_relative_to(root)]
    return [*threads, *processes, *files]


def _save_again_and_again(rank: int, address: StoreAddress, root: Path) -> tuple[list[int], list[str]]:
    saving, keys = Saving(rank, address), []
    for step in range(1, 11):
        state = state_of(rank, step=step)
        if step in (5, 6) and rank == VICTIM:
            state["embedding"] = ShardedTensor.from_rank_offsets("embedding", torch.zeros(1), replica_id=(0, 0, rank))
        if step in (5, 6):
            with pytest.raises(CheckpointError, match="do not match"):
                saving.save(state, root, step=step)
        else:
            saving.save(state, root, step=step, background=step % 2 == 0)
            keys.append(saving.store.num_keys())
        # A rank that goes on to its next save adds keys.
        dist.barrier()
    return keys, _left_behind(root)


def test_neither_the_store_nor_anything_else_grows_from_save_to_save(tmp_path: Path) -> None:
    for keys, left in values(_run(_save_again_and_again, tmp_path)):
        # The first has its holdings in the store, and so has the one after failures.
        assert len(set(keys[1:4] + keys[5:])) == 1
        assert left == []
    assert len(complete_checkpoints(tmp_path)) == 8


def _fail_to_write(saving: Saving, root: Path) -> None:
    def write_half(path: Path, items: Any) -> None:
        with path.open("xb") as file:
            file.write(b"half")
            raise OSError(5, "Input/output error")

    saver.write_items = write_half


def _fail_to_copy(saving: Saving, root: Path) -> None:
    def no_memory(*args: Any) -> None:
        raise MemoryError("no host memory for a copy")

    saving.saver._staging.copy = no_memory  # type: ignore[method-assign]


FAILURES = {
    "to write": (_fail_to_write, "training rank 2: OSError: [Errno 5] Input/output error"),
    "to copy": (_fail_to_copy, "training rank 2: MemoryError: no host memory for a copy"),
}


def _fail_in_the_background(rank: int, address: StoreAddress, root: Path, failure: str) -> list[str]:
    function, said = FAILURES[failure]
    saving = Saving(rank, address, timeout_s=FOR_EVER_S)
    if rank == VICTIM:
        function(saving, root)
    saving.save(state_of(rank), root, step=1, background=True, finish=False)
    with pytest.raises(CheckpointError) as raised:
        saving.saver.finish(saving.timeout)
    assert str(raised.value).endswith(said)
    return _left_behind(root)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_rank_that_fails_in_the_background_leaves_nothing_running_on_any(failure: str, tmp_path: Path) -> None:
    assert values(_run(_fail_in_the_background, tmp_path, failure)) == [[]] * SIZE
    assert complete_checkpoints(tmp_path) == []


def _be_slow(rank: int, address: StoreAddress, root: Path) -> None:
    saving = Saving(rank, address, timeout_s=FOR_EVER_S)
    if rank == VICTIM:
        saver.write_items = lambda *args: threading.Event().wait()
    saving.save(state_of(rank), root, step=1, background=True, finish=False)
    saving.saver.finish(timedelta(seconds=0.5) if rank == VICTIM else saving.timeout)


def test_a_rank_whose_time_to_write_is_up_tells_the_others(tmp_path: Path) -> None:
    outcomes = _run(_be_slow, tmp_path)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, CheckpointError), outcome
        who = "training rank 2" if rank == VICTIM else "training rank 2:"
        assert f"{who} has not done its part of the save of {tmp_path}" in str(outcome.error)


def _have_nothing_to_save(rank: int, address: StoreAddress, root: Path) -> None:
    saving = Saving(rank, address, timeout_s=FOR_EVER_S)
    if rank == VICTIM:
        saving.saver.fail(MemoryError("no room for the optimizer"), saving.timeout)
    saving.save(state_of(rank), root, step=1)


def test_a_rank_that_cannot_describe_its_state_tells_the_others(tmp_path: Path) -> None:
    for outcome in _run(_have_nothing_to_save, tmp_path):
        assert isinstance(outcome.error, CheckpointError), outcome
        assert "MemoryError: no room for the optimizer" in str(outcome.error)


def _have_another_default_group(rank: int, address: StoreAddress, root: Path) -> None:
    store = dist.PrefixStore("host", connect_store(address, timeout=timedelta(seconds=20)))
    dist.init_process_group("gloo", store=store, rank=SIZE - 1 - rank, world_size=SIZE)
    Saving(rank, address).save(state_of(rank), root, step=1)


def test_a_default_group_in_which_megatron_would_store_no_common_state_is_refused(tmp_path: Path) -> None:
    for outcome in _run(_have_another_default_group, tmp_path):
        assert isinstance(outcome.error, CheckpointError), outcome
        assert "is rank 3 of the default group" in str(outcome.error)
