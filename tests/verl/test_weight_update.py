"""verl's weight sync as a phase: who is named when a rank or a rollout engine does not answer, and how soon."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_safe_workers.adapters.verl import coroutine_update
from rl_safe_workers.lifecycle import Phase
from tests.verl.host import show, syncing_worker, training_worker
from tests.verl.ranks import Outcome, run_verl_ranks, values

SIZE, VICTIM = 2, 1
TIMEOUT_S = 4.0
ALLOWED_S = TIMEOUT_S + 4.0


class _Answer:
    """Stands for Ray's reference of an engine's answer, which is there and is an error."""

    def future(self) -> Future[None]:
        made = Future[None]()
        made.set_exception(KeyError("model.norm.weight"))
        return made


class _FakeRay:
    ObjectRef = _Answer


class _Rollout:
    """The rollout's side of a sync, which does something of its own at one point of it."""

    replica_rank = 7

    def __init__(self, at: str = "", misdeed: Any = None) -> None:
        self._at, self._misdeed = at, misdeed
        self.events: list[str] = []

    async def resume(self, tags: list[str]) -> None:
        await self._reach(tags[0])

    async def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], **_: Any) -> None:
        for number, _ in enumerate(weights):
            if number == 3:
                await self._reach("weight")
        await self._reach("sent")

    async def _execute_method(self, method: str, non_block: bool = False) -> _Answer:
        return _Answer()

    async def _reach(self, point: str) -> None:
        self.events.append(point)
        if point == self._at:
            await self._misdeed()


async def _awaits_no_answer() -> None:
    await asyncio.Event().wait()


async def _reads_no_answer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


async def _fails() -> None:
    raise ValueError("no room for the KV cache")


async def _is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


MISDEEDS = {
    "awaits": _awaits_no_answer,
    "reads": _reads_no_answer,
    "fails": _fails,
    "stops": _is_stopped,
}


def _worker(model: Path, rollout: _Rollout) -> Any:
    os.environ["RL_SAFE_VERL"] = json.dumps({"timeouts": {"sync": TIMEOUT_S}})
    return syncing_worker(training_worker(model), rollout)


def _timed_update(worker: Any) -> None:
    started_s = time.monotonic()
    try:
        asyncio.run(worker.update_weights(global_steps=1))
    except Exception as error:
        took_s = time.monotonic() - started_s
        # As an actor, this process stays: the connections of others to it do not break.
        time.sleep(max(0.0, ALLOWED_S - took_s))
        raise RuntimeError(f"{took_s:.1f} s, {type(error).__name__}: {error}") from error


def _update(rank: int, model: Path, at: str, misdeed: str) -> None:
    is_victim = rank == VICTIM and misdeed
    _timed_update(_worker(model, _Rollout(at, MISDEEDS[misdeed]) if is_victim else _Rollout()))


def _texts(outcomes: list[Outcome]) -> list[str]:
    """Returns the errors, each of which has to come in time."""
    show(*(outcome.error for outcome in outcomes))
    texts = [str(outcome.error) for outcome in outcomes]
    assert all(outcome.finished for outcome in outcomes)
    assert all(float(text.split()[0]) < ALLOWED_S for text in texts), texts
    return texts


def _good_update(rank: int, model: Path) -> tuple[list[str], list[str]]:
    worker = _worker(model, _Rollout())
    for _ in range(2):
        asyncio.run(worker.update_weights(global_steps=1))
    events = worker.actor.engine.process.trainer.lifecycle.drain_events()
    return worker.rollout.events, [event.phase for event in events if event.phase is Phase.SYNC and event.ok]


def test_a_sync_is_a_phase_that_sends_all_as_verl_does(tiny_moe) -> None:
    for events, phases in values(run_verl_ranks(_good_update, SIZE, tiny_moe)):
        assert events == ["weights", "weight", "sent", "kv_cache"] * 2
        assert phases == [Phase.SYNC] * 2


SAMPLE = {("weights", "awaits"), ("weight", "reads"), ("kv_cache", "awaits")}


@pytest.mark.parametrize(
    ("at", "misdeed"),
    [
        pytest.param(at, misdeed, marks=() if (at, misdeed) in SAMPLE else pytest.mark.every_case)
        for at in ("weights", "weight", "kv_cache")
        for misdeed in ("awaits", "reads")
    ],
)
def test_an_engine_that_does_not_answer_is_named_on_every_rank(at, misdeed, tiny_moe) -> None:
    texts = _texts(run_verl_ranks(_update, SIZE, tiny_moe, at, misdeed))
    late = re.compile(
        r"phase sync: rollout rank 7 of the weight sync did not arrive within 4\.\d s "
        r"\(training rank 1 waits in tests/verl/test_weight_update\.py:\d+ \(_(awaits|reads)_no_answer\)\); "
        r"to wait longer raise actor_rollout_ref\.rl_safe\.timeouts\.sync"
    )
    assert all(late.search(text) for text in texts)
    assert texts[VICTIM].split()[2] == "PhaseTimeoutError:"


def test_a_failure_is_the_error_of_its_rank_at_once_and_of_the_others_in_time(tiny_moe) -> None:
    texts = _texts(run_verl_ranks(_update, SIZE, tiny_moe, "weight", "fails"))
    assert all("ValueError: no room for the KV cache" in text for text in texts)
    assert "training rank 1" in texts[0]
    assert float(texts[VICTIM].split()[0]) < TIMEOUT_S


def _send_to_a_failed_engine(rank: int, model: Path) -> None:
    worker = _worker(model, _Rollout("weight", _reads_no_answer) if rank == VICTIM else _Rollout())
    if rank == VICTIM:
        coroutine_update.ray = _FakeRay
        assert worker._rollout_calls.awaited is None, "it notes calls from now on"
        asyncio.run(worker.rollout._execute_method("update_weights_from_ipc", non_block=True))
    _timed_update(worker)


def test_an_engine_that_fails_while_it_is_sent_weights_is_told_at_once(tiny_moe) -> None:
    texts = _texts(run_verl_ranks(_send_to_a_failed_engine, SIZE, tiny_moe))
    assert all("rollout rank 7 failed to load weights: KeyError: 'model.norm.weight'" in text for text in texts)
    assert float(texts[VICTIM].split()[0]) < TIMEOUT_S


def test_a_rank_that_is_stopped_in_the_middle_is_named(tiny_moe) -> None:
    outcomes = run_verl_ranks(_update, SIZE, tiny_moe, "weight", "stops", timeout_s=30)
    (text,) = _texts([outcome for outcome in outcomes if outcome.rank != VICTIM])
    assert "PhaseTimeoutError: phase sync: rank 1 of training world did not arrive within" in text
    assert "rl_safe.timeouts.sync" in text


def _absent(rank: int, model: Path) -> None:
    worker = _worker(model, _Rollout())
    if rank == VICTIM:
        time.sleep(ALLOWED_S)
    else:
        _timed_update(worker)


def test_a_rank_that_never_begins_is_named(tiny_moe) -> None:
    outcomes = run_verl_ranks(_absent, SIZE, tiny_moe)
    (text,) = _texts([outcome for outcome in outcomes if outcome.rank != VICTIM])
    assert "phase sync: rank 1 of training world did not arrive within 4.0 s" in text


def _wait_for_each_other(rank: int, model: Path) -> None:
    worker = _worker(model, _Rollout())
    engine = worker.actor.engine
    gathered = engine._gathered

    def too_few(weights: Any) -> Iterator[Any]:
        # As a bug of a bridge: rank 1 leaves the others in their next gather.
        for number, weight in enumerate(gathered(weights)):
            if rank == VICTIM and number == 5:
                return
            yield weight

    engine._gathered = too_few
    _timed_update(worker)


def test_ranks_that_wait_for_each_other_are_told_where(tiny_moe) -> None:
    texts = _texts(run_verl_ranks(_wait_for_each_other, SIZE, tiny_moe))
    assert all("the weight sync did not finish within" in text for text in texts)
    assert all("waiting for other training ranks: training rank 0 in " in text for text in texts)
    assert all(", training rank 1 in verl/workers/engine_workers.py:" in text for text in texts)
