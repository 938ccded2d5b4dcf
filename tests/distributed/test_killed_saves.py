"""A rank is killed at a random moment of a save, again and again: nothing that was saved is ever lost."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from rl_safe_workers.checkpoint.folders.manifest import complete_checkpoints
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.ranks import run_ranks, values
from tests.distributed.shards import SIZE, Saving, differences, emptied, state_of
from tests.distributed.worker import served_store

KILLS = int(os.environ.get("RL_SAFE_KILLS", "12"))
"""Kills during synchronous saves, and as many during saves in the background. 25 were run, too."""
HIDDEN = 128
"""Makes a save take a tenth of a second or so."""


class _Calls:
    """Counts the calls of Python functions in all threads, and kills the process at one of them.

    A moment counted in calls lies inside a save on any machine, however busy; one that a clock tells may not.
    """

    def __init__(self, *, fatal: int | None = None) -> None:
        self.number = 0
        self._fatal = fatal

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self.number += 1
            if self.number == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self) -> _Calls:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def _load_then_die_saving(
    rank: int, address: StoreAddress, root: Path, step: int, victim: int, fatal: int, background: bool
) -> list[str]:
    """Loads the newest checkpoint and begins to save the next, in the middle of which one rank dies."""
    saving = Saving(rank, address, timeout_s=1.0)
    found = _compare_newest(saving, root)
    state = state_of(rank, step=step, hidden=HIDDEN)
    try:
        with _Calls(fatal=fatal) if rank == victim else nullcontext():
            saving.save(state, root, step=step, background=background)
    except Exception:
        # Whatever this rank has met is not what is tested here: the others are gone, or are about to be.
        return found
    return found


def _compare_newest(saving: Saving, root: Path) -> list[str]:
    saving.timeout *= 50
    path, manifest = complete_checkpoints(root)[0]
    loaded = saving.load(emptied(state_of(saving.rank, step=manifest.step, hidden=HIDDEN)), path)
    saving.timeout /= 50
    return differences(loaded, state_of(saving.rank, step=manifest.step, hidden=HIDDEN))


def _save(rank: int, address: StoreAddress, root: Path, *steps: int, background: bool = False) -> int:
    """Saves some steps; returns the number of calls of a first save in this process, which are more than a later's."""
    saving, counts = Saving(rank, address), []
    for step in steps:
        state = state_of(rank, step=step, hidden=HIDDEN)
        with _Calls() as calls:
            saving.save(state, root, step=step, background=background)
        counts.append(calls.number)
    return counts[0]


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.every_case), True], ids=["sync", "async"])
def test_the_newest_complete_checkpoint_loads_bit_for_bit_after_every_kill(background: bool, tmp_path: Path) -> None:
    rng, steps, died = random.Random(background), [1], 0
    with served_store() as address:
        calls = min(values(run_ranks(partial(_save, background=background), SIZE, address, tmp_path, 0, 1)))
    for kill in range(KILLS):
        step, victim, fatal = kill + 2, rng.randrange(SIZE), rng.randint(1, calls)
        with served_store() as address:
            outcomes = run_ranks(
                _load_then_die_saving, SIZE, address, tmp_path, step, victim, fatal, background, timeout_s=30
            )
        for outcome in outcomes:
            # The victim's comparison came before its end; it has no way to tell.
            assert outcome.rank == victim or outcome.value == [], (kill, outcome)
        died += outcomes[victim].error is not None
        newest = complete_checkpoints(tmp_path)[0][1].step
        assert newest in (steps[-1], step), "an older or a torn checkpoint was picked"
        steps.append(newest)
    # Else the kills came after the saves, and nothing was tested.
    assert died > KILLS // 2, died
    with served_store() as address:
        values(run_ranks(_save, SIZE, address, tmp_path, 1000))
    assert complete_checkpoints(tmp_path)[0][1].step == 1000
    assert not list(tmp_path.glob("*.incomplete"))
