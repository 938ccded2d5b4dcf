"""The writes of a save, their ranks, and the outcome of each failure on every rank."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from rl_safe_workers.checkpoint.folders.manifest import SHARDS, complete_checkpoints
from rl_safe_workers.checkpoint.format.index import read_index
from rl_safe_workers.checkpoint.load import loader
from rl_safe_workers.checkpoint.save import balance, save_plan, saver
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError, PhaseTimeoutError
from rl_safe_workers.platforms import cpu
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.ranks import Outcome, run_ranks, values
from tests.distributed.recording import recorded_collectives
from tests.distributed.shards import EXPERTS, LAYERS, SIZE, Saving, differences, emptied, state_of
from tests.distributed.stock_saves import keep_results_in_process
from tests.distributed.worker import served_store

STEPS = (1, 2, 3)


def _run(function: Any, *args: Any) -> list[Outcome]:
    with served_store() as address:
        return run_ranks(function, SIZE, address, *args)


def _save_and_reshard(rank: int, address: StoreAddress, root: Path, joined_bytes: int) -> dict[str, Any]:
    cpu.apply()
    save_plan.JOINED_BYTES = loader.LARGE_BYTES = joined_bytes
    balance.CUT_BYTES = min(balance.CUT_BYTES, joined_bytes)
    saving = Saving(rank, address)
    found: dict[str, Any] = {}
    with recorded_collectives() as collectives:
        for step in STEPS:
            saving.save(state_of(rank, step=step), root, step=step, background=step == STEPS[-1])
        for step in STEPS:
            loaded = saving.load(emptied(state_of(rank, step=step)), root / f"global_step_{step}")
            found[f"step {step}"] = differences(loaded, state_of(rank, step=step))
        for ep in (1, 4):
            loaded = saving.load(emptied(state_of(rank, step=1, ep=ep)), root / "global_step_1")
            found[f"ours at EP{ep}"] = differences(loaded, state_of(rank, step=1, ep=ep))
    found["collectives"] = len(collectives)
    return {**found, **_exchange_with_stock(saving, root)}


def _exchange_with_stock(saving: Saving, root: Path) -> dict[str, list[str]]:
    """Megatron-core reads ours, and we read megatron-core's, in its frameworks' default form; each resharded too."""
    directory, found = root / "stock", {}
    if saving.rank == 0:
        directory.mkdir()
    torch.distributed.barrier()
    strategy = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1), torch.distributed.group.WORLD
    )
    keep_results_in_process()
    dist_checkpointing.save(state_of(saving.rank, step=1), str(directory), strategy)
    for ep in (2, 1, 4):
        wanted = state_of(saving.rank, step=1, ep=ep)
        asked = emptied(state_of(saving.rank, step=1, ep=ep))
        theirs = dist_checkpointing.load(asked, str(root / "global_step_1" / SHARDS))
        found[f"stock reads ours at EP{ep}"] = differences(theirs, wanted)
        asked = emptied(state_of(saving.rank, step=1, ep=ep))
        found[f"stock's at EP{ep}"] = differences(
            saving.loader.load(lambda a=asked: a, directory, timeout=saving.timeout), wanted
        )
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """A directory with a checkpoint of each step, and what came back from it on each rank."""
    root = tmp_path_factory.mktemp("saved")
    return root, values(_run(_save_and_reshard, root, save_plan.JOINED_BYTES))


@pytest.fixture(scope="module")
def saved_apart(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """The same, with experts too large to be joined, and a replicated tensor that is cut."""
    root = tmp_path_factory.mktemp("saved_apart")
    return root, values(_run(_save_and_reshard, root, 0))


def test_every_step_comes_back_bit_for_bit_also_resharded_and_across_megatron_core(saved, saved_apart) -> None:
    for found in saved[1] + saved_apart[1]:
        assert len(found) == len(STEPS) + 2 + 6 + 1
        assert all(not different for different in found.values()), found


def test_no_collective_is_issued(saved) -> None:
    assert [found["collectives"] for found in saved[1]] == [0] * SIZE


def test_the_experts_of_a_rank_are_one_chunk_under_megatrons_key_and_shape(saved) -> None:
    index = read_index(saved[0] / "global_step_1")
    for layer in range(LAYERS):
        entry = index.tensors[f"decoder.layers.{layer}.mlp.experts.experts.linear_fc1.weight"]
        assert entry.shape == (EXPERTS, 16, 8)
        assert sorted((chunk.offsets, chunk.sizes) for chunk in entry.chunks) == [
            ((0, 0, 0), (4, 16, 8)),
            ((4, 0, 0), (4, 16, 8)),
        ]


def test_each_half_of_a_large_expert_is_a_chunk(saved_apart) -> None:
    index = read_index(saved_apart[0] / "global_step_1")
    assert len(index.tensors["embedding"].chunks) > SIZE  # the ranks share it
    for layer in range(LAYERS):
        entry = index.tensors[f"decoder.layers.{layer}.mlp.experts.experts.linear_fc1.weight"]
        assert sorted((chunk.offsets, chunk.sizes) for chunk in entry.chunks) == [
            ((expert, row, 0), (1, 8, 8)) for expert in range(EXPERTS) for row in (0, 8)
        ]


def test_equal_extra_states_of_all_experts_share_one_blob_per_rank(saved) -> None:
    objects = read_index(saved[0] / "global_step_1").objects
    extra = [place for key, place in objects.items() if "_extra_state" in key]
    assert len(extra) == LAYERS * 2 * EXPERTS
    assert len(set(extra)) == 2


def _plans(rank: int, address: StoreAddress) -> tuple[int, Counter[str]]:
    from benchmarks.inventory import MoeInventory

    shards = list(MoeInventory(layers=3, experts=16, hidden=32).shards(rank, ep=2, expert_dp=2).values())
    replicas = save_plan.Replicas(dense=SIZE, expert=2, optimizer=True)
    made = save_plan.make_plan(shards, [], replicas)
    return made.size_bytes, Counter(entry.key for entry in made.holdings.entries for _ in entry.chunks)


def test_bytes_are_even_and_every_tensor_has_its_writers_without_any_exchange() -> None:
    plans = values(_run(_plans))
    sizes = [size for size, _ in plans]
    assert max(sizes) <= 1.1 * sum(sizes) / SIZE
    chunks = sum((counter for _, counter in plans), Counter[str]())
    assert {count for key, count in chunks.items() if ".experts." in key} == {2}
    assert {count for key, count in chunks.items() if ".experts." not in key} == {1}


def _save_something_else(rank: int, address: StoreAddress, root: Path, what: str) -> float:
    state = state_of(rank, step=2)
    saving = Saving(rank, address)
    saving.save(state_of(rank, step=1), root, step=1)
    if rank == 2 and what == "shape":
        state["embedding"] = ShardedTensor.from_rank_offsets("embedding", torch.zeros(65, 8), replica_id=(0, 0, rank))
    if rank == 2 and what == "dtype":
        state["cut"].data, state["cut"].dtype = state["cut"].data.bfloat16(), torch.bfloat16
    if rank == 2 and what == "missing":
        del state["cut"]
    started_s = time.monotonic()
    with pytest.raises(CheckpointError, match=SAID[what]):
        saving.save(state, root, step=2)
    # The ranks go on together: what follows is no worse for it.
    saving.save(state_of(rank, step=3), root, step=3)
    return time.monotonic() - started_s


SAID = {
    "shape": r"embedding is torch.float32 \[65, 8\] on training rank 2 and torch.float32 \[64, 8\] on training rank 0",
    "dtype": r"cut is torch.bfloat16 \[12, 8\] on training rank 2 and torch.float32 \[12, 8\] on training rank 0",
    "missing": r"cut: 72 of 96 elements would be written \(by what training rank 0-1, 3 holds of it\)",
}


@pytest.mark.parametrize("what", SAID)
def test_a_rank_with_other_tensors_fails_the_save_everywhere_at_once(what: str, tmp_path: Path) -> None:
    assert max(values(_run(_save_something_else, tmp_path, what))) < 10
    assert [manifest.step for _, manifest in complete_checkpoints(tmp_path)] == [3, 1]


def _hit_a_limit(rank: int, address: StoreAddress, root: Path) -> None:
    """The kernel refuses a rank's writes past a few bytes, as on a full disk."""
    saving = Saving(rank, address)
    saving.save(state_of(rank, step=1), root, step=1)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
    saving.save(state_of(rank, step=2), root, step=2)


def _lose_the_directory(rank: int, address: StoreAddress, root: Path) -> None:
    saving = Saving(rank, address)
    saving.save(state_of(rank, step=1), root, step=1)
    write_items = saver.write_items

    def write_nowhere(path: Path, items: Any) -> Any:
        # At once: removing it file by file would race with the other ranks, which go on writing into it.
        path.parent.rename(root.with_name("lost"))
        return write_items(path, items)

    if rank == 3:
        saver.write_items = write_nowhere
    saving.save(state_of(rank, step=2), root, step=2)


def _have_no_room(rank: int, address: StoreAddress, root: Path) -> None:
    saving = Saving(rank, address)
    saving.save(state_of(rank, step=1), root, step=1)
    usage = shutil.disk_usage(root)
    saver.shutil.disk_usage = lambda path: usage._replace(free=1000)
    saving.save(state_of(rank, step=2), root, step=2)


def _write_where_nobody_can(rank: int, address: StoreAddress, root: Path) -> None:
    saving = Saving(rank, address)
    saving.save(state_of(rank, step=1), root, step=1)
    saving.save(state_of(rank, step=2), Path("/proc/checkpoints"), step=2)


FAILURES = {
    "a full disk": (_hit_a_limit, "training rank 1: OSError: [Errno 27] File too large", {1}),
    "a vanished directory": (_lose_the_directory, "FileNotFoundError", {0, 1, 2, 3}),
    "no room": (_have_no_room, "bytes to save, 1000 free in", {0}),
    "a read-only directory": (_write_where_nobody_can, "training rank 0: FileNotFoundError: [Errno 2]", {0}),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_one_before_stays(failure: str, tmp_path: Path) -> None:
    function, said, culprits = FAILURES[failure]
    outcomes = _run(function, tmp_path)
    for outcome in outcomes:
        assert isinstance(outcome.error, CheckpointError), outcome.trace
        # The rank that failed raises what it met, the others name it.
        assert said.split(": ", 1)[-1] in str(outcome.error)
    # A driver is told whom they only follow; who finds a directory gone first is left to chance.
    (culprit,) = {outcome.error.culprit for outcome in outcomes} - {None}
    assert culprit in trainer_ids(culprits)
    assert all(outcome.error.culprit == culprit for rank, outcome in enumerate(outcomes) if trainer_id(rank) != culprit)
    assert [manifest.step for _, manifest in complete_checkpoints(tmp_path)] == [1]
    assert all(not found for found in values(_run(_load_step, tmp_path, 1)))


def _load_step(rank: int, address: StoreAddress, root: Path, step: int) -> list[str]:
    loaded = Saving(rank, address).load(emptied(state_of(rank, step=step)), root / f"global_step_{step}")
    return differences(loaded, state_of(rank, step=step))


LATE_S = 3.0
"""How long the writer sleeps first: more than any rank needs to begin."""


def _change_after_the_save_returns(rank: int, address: StoreAddress, root: Path) -> list[float]:
    saving, state = Saving(rank, address), state_of(rank, step=1)
    written = saver.write_items

    def write_late(path: Path, items: Any) -> Any:
        time.sleep(LATE_S)
        return written(path, items)

    saver.write_items = write_late
    started_s = time.monotonic()
    saving.save(state, root, step=1, background=True, finish=False)
    for value in state.values():
        if isinstance(value, ShardedTensor):
            value.data.fill_(-7)
    begun_s = time.monotonic() - started_s
    while saving.saver.poll():
        time.sleep(0.05)
    assert saving.saver.finish(saving.timeout) is None
    return [begun_s, time.monotonic() - started_s]


def test_a_save_in_the_background_holds_what_was_when_it_began(tmp_path: Path) -> None:
    for begun_s, done_s in values(_run(_change_after_the_save_returns, tmp_path)):
        assert begun_s < LATE_S <= done_s
    assert all(not found for found in values(_run(_load_step, tmp_path, 1)))


def _one_never_writes(rank: int, address: StoreAddress, root: Path) -> None:
    saving = Saving(rank, address, timeout_s=2.0)
    saving.save(state_of(rank, step=1), root, step=1, background=True, finish=False)
    if rank == 3:
        os._exit(0)
    if rank == 2:
        time.sleep(0.2)  # so that it hears of rank 0's failed wait before its own is over
    saving.saver.finish(saving.timeout)


def test_a_rank_that_never_says_it_has_written_is_named_at_the_deadline(tmp_path: Path) -> None:
    *others, _dead = _run(_one_never_writes, tmp_path)
    for outcome in others:
        assert isinstance(outcome.error, PhaseTimeoutError), outcome.trace
        assert outcome.error.missing == {trainer_id(3)}
        assert re.search(r"rank 3 of training world did not arrive within \d+\.\d s", str(outcome.error))
    assert complete_checkpoints(tmp_path) == []


def _ask_for_other_keys(rank: int, address: StoreAddress, root: Path) -> list[str]:
    saving = Saving(rank, address)
    saving.save(state_of(rank, step=1), root, step=1)
    said = []
    for change in ("missing", "unexpected", "shape"):
        asked = emptied(state_of(rank, step=1))
        if change == "missing":
            asked["new"] = ShardedTensor.from_rank_offsets("new.weight", torch.zeros(2), replica_id=(0, 0, rank))
        elif change == "unexpected":
            del asked["cut"], asked["embedding"]
        else:
            wider = torch.zeros(64, 9)
            asked["embedding"] = ShardedTensor.from_rank_offsets("embedding", wider, replica_id=(0, 0, rank))
        with pytest.raises(CheckpointMismatchError) as raised:
            saving.load(asked, root / "global_step_1")
        said.append(str(raised.value))
    asked = emptied(state_of(rank, step=1))
    del asked["cut"]
    assert "embedding" in saving.load(asked, root / "global_step_1", strict=False)
    return said


def test_missing_and_unexpected_keys_are_listed_on_every_rank(tmp_path: Path) -> None:
    for missing, unexpected, shape in values(_run(_ask_for_other_keys, tmp_path)):
        assert missing.endswith("does not fit the model: missing: new.weight")
        assert unexpected.endswith("unexpected: cut, embedding")
        assert shape.endswith("of another shape: embedding is [64, 8] there, [64, 9] here")
