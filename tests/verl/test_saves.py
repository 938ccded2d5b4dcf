"""Saves through verl's checkpoint manager, stock against ours: collectives, a killed rank, time; saves that wait."""

from __future__ import annotations

import functools
import json
import os
import signal
import statistics
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.verl.host import show, state_of, train, training_worker
from tests.verl.ranks import run_verl_ranks, values

SIZE, VICTIM = 4, 2
COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


def _count_calls() -> Counter[str]:
    """Counts this process's collectives from now on: by name on the default group, else as ``subgroup``."""
    found: Counter[str] = Counter()

    def counted(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
            found["subgroup" if groups and groups[0] is not dist.group.WORLD else name] += 1
            return original(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counted(name, getattr(dist, name)))
    return found


def _counted_save(rank: int, model: Path, root: Path, settings: dict[str, Any]) -> dict[str, int]:
    worker = training_worker(model, **settings)
    train(worker, 1)
    calls = _count_calls()
    worker.save_checkpoint(str(root / "global_step_1" / "actor"), global_step=1)
    return {name: count for name, count in calls.items() if name != "subgroup"}


@pytest.mark.parametrize("settings", [{"shards": True}, {}], ids=["shards", "hf_weights"])
def test_a_save_takes_no_collective_of_the_default_group_but_verls_barrier_of_hf_weights(
    settings, tiny_moe, tmp_path
) -> None:
    ours = values(run_verl_ranks(_counted_save, SIZE, tiny_moe, tmp_path / "ours", settings))
    stock = values(run_verl_ranks(_counted_save, SIZE, tiny_moe, tmp_path / "stock", settings, stock=True))
    show("ours", ours[0], "stock", stock[0])
    assert ours == [{} if settings else {"barrier": 1}] * SIZE
    assert min(sum(calls.values()) for calls in stock) > 10


def _killed_save(rank: int, model: Path, root: Path) -> None:
    os.environ["RL_SAFE_VERL"] = json.dumps({"timeouts": {"save": 6}})
    worker = training_worker(model, shards=True)
    train(worker, 1)
    worker.save_checkpoint(str(root / "global_step_1" / "actor"), global_step=1)
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    manager = worker.engine.checkpoint_mananager
    described = manager._build_extra_state_dict

    def killed() -> Any:
        if rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        return described()

    manager._build_extra_state_dict = killed
    started_s = time.monotonic()
    try:
        worker.save_checkpoint(str(root / "global_step_2" / "actor"), global_step=2)
    except Exception as error:
        raise RuntimeError(f"{time.monotonic() - started_s:.1f} s, {type(error).__name__}: {error}") from error


def test_a_rank_killed_during_a_save_is_named_within_the_timeout_and_the_save_before_stays(tiny_moe, tmp_path) -> None:
    outcomes = run_verl_ranks(_killed_save, SIZE, tiny_moe, tmp_path)
    survivors = [outcome for outcome in outcomes if outcome.rank != VICTIM]
    show(*(outcome.error for outcome in survivors))
    assert all(outcome.finished and "rank 2 of training world" in str(outcome.error) for outcome in survivors)
    assert all(float(str(outcome.error).split()[0]) < 20 for outcome in survivors)
    assert not (tmp_path / "global_step_2" / "actor" / "ckpt_contents.json").exists()
    assert (tmp_path / "global_step_1" / "actor" / "ckpt_contents.json").exists()


@pytest.mark.every_case
def test_stock_verl_names_no_rank_that_was_killed_during_a_save(tiny_moe, tmp_path) -> None:
    outcomes = run_verl_ranks(_killed_save, SIZE, tiny_moe, tmp_path, stock=True, timeout_s=100)
    survivors = [outcome for outcome in outcomes if outcome.rank != VICTIM]
    show(*((outcome.finished, outcome.error) for outcome in survivors))
    assert not any("rank 2" in str(outcome.error) for outcome in survivors)


def _background_save(rank: int, model: Path, root: Path) -> tuple[bool, bool, dict[str, str]]:
    worker = training_worker(model, shards=True, checkpoint={"async_save": True})
    train(worker, 1)
    before = state_of(worker)
    worker.save_checkpoint(str(root / "global_step_1" / "actor"), global_step=1)
    for seed in range(2, 9):
        train(worker, seed)
        time.sleep(0.2)
    dist.barrier()
    manifest, tracker = (
        root / "global_step_1" / "actor" / "ckpt_contents.json",
        root / "latest_checkpointed_iteration.txt",
    )
    is_seen_while_training = manifest.exists()
    dist.barrier()
    worker.save_checkpoint(str(root / "global_step_4" / "actor"), global_step=4)
    assert worker.engine.process.trainer.teardown() == {}
    dist_ended = (root / "global_step_4" / "actor" / "ckpt_contents.json").exists() and tracker.read_text() == "4"
    return is_seen_while_training, dist_ended, before


def _load_state(rank: int, model: Path, path: Path) -> dict[str, str]:
    worker = training_worker(model, shards=True)
    worker.load_checkpoint(str(path))
    return state_of(worker)


def test_a_save_in_the_background_is_finalised_by_training_on_and_by_the_teardown(tiny_moe, tmp_path) -> None:
    found = values(run_verl_ranks(_background_save, SIZE, tiny_moe, tmp_path))
    assert [(seen, ended) for seen, ended, _ in found] == [(True, True)] * SIZE
    loaded = values(run_verl_ranks(_load_state, SIZE, tiny_moe, tmp_path / "global_step_1" / "actor"))
    assert loaded == [before for *_, before in found], "what was saved is the state at the save, not after it"


def _uploaded_save(rank: int, model: Path, root: Path) -> dict[str, Any]:
    from verl.utils import hdfs_io

    from rl_safe_workers.adapters.verl import checkpoint

    os.environ["RL_SAFE_VERL"] = json.dumps({"timeouts": {"save": 60}})
    warned, uploaded, copy = [], [], hdfs_io.copy
    checkpoint.logger.warning = lambda text, *args, **_: warned.append(text % args)  # type: ignore[method-assign]
    worker = training_worker(model, shards=True, checkpoint={"async_save": True, "save_contents": ["model", "extra"]})
    process = worker.engine.process

    def seen(src: str, dst: str, **kwargs: Any) -> bool:
        uploaded.append((process.trainer.lifecycle.current, 0 < process.trainer.remaining().total_seconds() <= 60))
        return bool(copy(src, dst, **kwargs))

    hdfs_io.copy = seen
    folder, remote = root / "local" / "global_step_1", root / "remote" / "global_step_1"
    remote.mkdir(parents=True, exist_ok=True)
    worker.save_checkpoint(str(folder / "actor"), str(remote / "actor"), global_step=1)
    found = {
        "uploaded": list(uploaded),
        "warned": [text for text in warned if "uploaded" in text],
        "in background": process.metrics()["rl_safe/saves_in_background"],
        "complete": (folder / "actor" / "ckpt_contents.json").exists(),
    }
    worker.save_checkpoint(str(root / "local" / "global_step_2" / "actor"), global_step=2)
    found["without upload"] = process.metrics()["rl_safe/saves_in_background"]
    assert process.trainer.teardown() == {}
    found["named"] = (root / "local" / "latest_checkpointed_iteration.txt").read_text()
    return found


def test_a_save_with_an_upload_ends_in_its_phase_whatever_async_save_says(tiny_moe, tmp_path) -> None:
    first, second = values(run_verl_ranks(_uploaded_save, 2, tiny_moe, tmp_path))
    assert (first.pop("uploaded"), second.pop("uploaded")) == ([("save", True)], [])
    (warning,), none = first.pop("warned"), second.pop("warned")
    assert "do not go on in the background, whatever async_save says" in warning
    assert none == []
    assert first == second == {"in background": 0, "complete": True, "without upload": 1, "named": "2"}
    assert (tmp_path / "remote" / "global_step_1" / "actor").is_dir()


LAYERS = int(os.environ.get("RL_SAFE_INVENTORY_LAYERS", "12"))


def _timed_saves(rank: int, model: Path, root: Path, layers: int) -> list[tuple[float, float]]:
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    from benchmarks.inventory import MoeInventory
    from rl_safe_workers.lifecycle import Phase

    worker = training_worker(model, shards=True)
    manager, process = worker.engine.checkpoint_mananager, worker.engine.process
    manager._step_folder = root  # as save_checkpoint has it, which builds a state of its own
    state = dict(MoeInventory(layers=layers).shards(rank, ep=2, expert_dp=2))

    def timed(save: Any, name: str) -> float:
        described = {key: replace(shard) for key, shard in state.items()}
        path = root / name / "model" / "dist_ckpt"
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        started_s = time.perf_counter()
        save(str(path), described)
        dist.barrier()
        return time.perf_counter() - started_s

    def ours(path: str, described: dict[str, Any]) -> None:
        with process.trainer.phase(Phase.SAVE):
            manager._save_dist_checkpoint(path, described)

    stock = functools.partial(MegatronCheckpointManager._save_dist_checkpoint, manager)
    return [(timed(ours, f"ours_{i}"), timed(stock, f"stock_{i}")) for i in range(3)]


@pytest.mark.every_case
def test_a_save_of_many_experts_takes_less_than_three_tenths_of_stocks_time(tiny_moe, tmp_path) -> None:
    pairs = values(run_verl_ranks(_timed_saves, SIZE, tiny_moe, tmp_path, LAYERS, timeout_s=280))[0]
    show("ours and stock, seconds:", pairs)
    ours, stock = (statistics.median(column) for column in zip(*pairs, strict=True))
    assert ours / stock <= 0.3
