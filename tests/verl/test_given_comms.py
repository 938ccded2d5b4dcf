"""Communicators whose memory goes to the rollout: dropped for it, back before they are needed, and no bit changes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.comms.release import releasable_groups
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.lifecycle import Phase
from tests.verl.host import batch, show, state_of, syncing_worker, train, training_worker
from tests.verl.ranks import run_verl_ranks, values

SIZE, STEPS = 4, 3
LAYOUTS = {
    "ep2": {},
    "tp2_ep2": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "pp2_ep2": {"pipeline_model_parallel_size": 2},
}


class _Rollout:
    """Notes how many communicators there are when it may allocate its KV cache."""

    def __init__(self) -> None:
        self.at_cache: list[set[str]] = []
        self.weights: list[float] = []

    async def resume(self, tags: list[str]) -> None:
        if tags == ["kv_cache"]:
            self.at_cache.append({str(group.state) for group in releasable_groups()})

    async def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], **_: Any) -> None:
        self.weights.append(sum(float(weight.double().abs().sum()) for _, weight in weights))


def _worker(model: Path, layout: dict[str, Any], *, releases: bool, **settings: Any) -> Any:
    os.environ["RL_SAFE_VERL"] = json.dumps({"release_comms": releases, "timeouts": {"sync": 20, "bootstrap": 20}})
    return syncing_worker(training_worker(model, ours=True, **layout, **settings), _Rollout())


def _refusal() -> str:
    """Returns what a collective of the host's is told that comes too early, or nothing."""
    try:
        dist.all_reduce(torch.ones(1), group=parallel_state.get_data_parallel_group())
    except CommunicatorError as error:
        return str(error)
    return ""


def _train_mini_batch(trained: Any, seed: int) -> dict[str, Any]:
    """One update as verl's trainers call it; returns metrics on ranks that have any."""
    from verl.utils import tensordict_utils as tu

    rows = batch(seed)
    tu.assign_non_tensor(rows, mini_batch_size=len(rows) * parallel_state.get_data_parallel_world_size())
    output = trained.train_mini_batch(rows)
    return {} if output is None else dict(tu.get(output, "metrics"))


def _steps(rank: int, model: Path, layout: dict[str, Any], releases: bool, root: Path) -> dict[str, Any]:
    worker = _worker(model, layout, releases=releases)
    trained, process = worker.actor, worker.actor.engine.process
    asyncio.run(worker.update_weights(global_steps=0))
    losses, norms, refusals, metrics = [], [], [], []
    for step in range(STEPS):
        refusals.append(_refusal() if releases else "")
        metrics.append(process.metrics())
        if step % 2:  # an update that comes first has a collective before its phase
            trained.infer_batch(batch(step))
        found = _train_mini_batch(trained, step)
        losses.append(found.get("loss"))
        norms.append(found.get("grad_norm"))
        asyncio.run(worker.update_weights(global_steps=step + 1))
    refusals.append(_refusal() if releases else "")
    trained.save_checkpoint(str(root / "global_step_1" / "actor"), global_step=1)
    late = process.trainer.comms.late_allocations()
    asyncio.run(worker.update_weights(global_steps=STEPS))
    started_s = time.monotonic()
    # As a run ends: right after a sync.
    verdict = process.trainer.teardown()
    return {
        "losses": losses,
        "norms": norms,
        "state": state_of(trained),
        "sent": worker.rollout.weights,
        "at_cache": worker.rollout.at_cache,
        "refusals": refusals,
        "late": late,
        "metrics": metrics,
        "teardown": (verdict, time.monotonic() - started_s),
        "groups": len(releasable_groups()),
    }


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.every_case) if name == "ep2" else name for name in LAYOUTS]
)
def test_a_run_that_gives_its_communicators_is_bit_for_bit_one_that_keeps_them(layout, tiny_moe, tmp_path) -> None:
    kept, given = (
        values(run_verl_ranks(_steps, SIZE, tiny_moe, LAYOUTS[layout], releases, tmp_path / str(releases)))
        for releases in (False, True)
    )
    for one, other in zip(kept, given, strict=True):
        for same in ("losses", "norms", "state", "sent", "late"):
            assert other[same] == one[same], same
        assert one["late"] == []
        assert one["at_cache"] == [set()] * (STEPS + 2)
        assert other["at_cache"] == [{"released"}] * (STEPS + 2), "all groups, each time, before the cache"
        assert one["refusals"] == [""] * (STEPS + 1)
        assert all("call train_mode() or eval_mode() of an engine first" in text for text in other["refusals"])
        assert one["teardown"][0] == other["teardown"][0] == {}
        assert other["teardown"][1] < 20
        assert all("timing_s/rl_safe_release" in metrics for metrics in other["metrics"])
        assert not any("timing_s/rl_safe_release" in metrics for metrics in one["metrics"])
    assert any(norm is not None for of_rank in kept for norm in of_rank["norms"])
    show(layout, kept[0]["losses"], [f"{m['timing_s/rl_safe_release']:.2f} s" for m in given[0]["metrics"]])


def _engines_alone(rank: int, model: Path) -> tuple[bool, set[str], str]:
    os.environ["RL_SAFE_VERL"] = json.dumps({"release_comms": True})
    worker = syncing_worker(training_worker(model), _Rollout())
    asyncio.run(worker.update_weights(global_steps=0))
    train(worker.actor, 1)
    return worker.actor.engine.process.trainer.offloader.releases_comms, worker.rollout.at_cache[0], _refusal()


def test_groups_of_verls_own_backend_keep_their_communicators_where_nccl_suspends_none(tiny_moe) -> None:
    assert values(run_verl_ranks(_engines_alone, 2, tiny_moe)) == [(False, set(), "")] * 2


def _missing(rank: int, model: Path) -> str:
    worker = _worker(model, {}, releases=True)
    asyncio.run(worker.update_weights(global_steps=0))
    process = worker.actor.engine.process
    process.trainer.rl_safe.timeouts.__dict__["bootstrap"] = 4.0
    if rank == 1:
        time.sleep(8)
        return ""
    started_s = time.monotonic()
    try:
        worker.actor.infer_batch(batch(0))
    except Exception as error:
        return f"{time.monotonic() - started_s:.1f} {error}"
    return "no error"


def test_a_rank_that_does_not_come_to_the_taking_back_is_named(tiny_moe) -> None:
    text = values(run_verl_ranks(_missing, 2, tiny_moe))[0]
    assert f"phase {Phase.BOOTSTRAP}: rank 1 of training world did not arrive within 4.0 s" in text
    assert float(text.split()[0]) < 8
