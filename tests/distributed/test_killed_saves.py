"""A rank is killed at a random moment of a save, again and again: nothing that was saved is ever lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders.manifest import complete_checkpoints
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.ranks import run_ranks, values
from tests.distributed.shards import SIZE, Saving, differences, emptied, state_of
from tests.distributed.worker import served_store

KILLS = 25
"""Of synchronous saves, and as many of those in the background."""
HIDDEN = 128
"""Makes a save take a tenth of a second or so."""


def _load_then_die_saving(
    rank: int, address: StoreAddress, root: Path, step: int, victim: int, delay_s: float, background: bool
) -> list[str]:
    """Loads the newest checkpoint and begins to save the next, in the middle of which one rank dies."""
    saving = Saving(rank, address, timeout_s=1.0)
    found = _compare_newest(saving, root)
    if rank == victim:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        saving.save(state_of(rank, step=step, hidden=HIDDEN), root, step=step, background=background)
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


def _save(rank: int, address: StoreAddress, root: Path, *steps: int) -> float:
    """Saves some steps; returns the seconds of the last."""
    saving = Saving(rank, address)
    for step in steps:
        started_s = time.monotonic()
        saving.save(state_of(rank, step=step, hidden=HIDDEN), root, step=step)
    return time.monotonic() - started_s


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_the_newest_complete_checkpoint_loads_bit_for_bit_after_every_kill(background: bool, tmp_path: Path) -> None:
    rng, steps, died = random.Random(background), [1], 0
    with served_store() as address:
        longest_s = min(values(run_ranks(_save, SIZE, address, tmp_path, 0, 1)))
    for kill in range(KILLS):
        step, victim, delay_s = kill + 2, rng.randrange(SIZE), rng.uniform(0, longest_s)
        with served_store() as address:
            outcomes = run_ranks(
                _load_then_die_saving, SIZE, address, tmp_path, step, victim, delay_s, background, timeout_s=30
            )
        for outcome in outcomes:
            # The victim's comparison came before its end; it has no way to tell.
            assert outcome.rank == victim or outcome.value == [], (kill, outcome)
        died += outcomes[victim].error is not None
        newest = complete_checkpoints(tmp_path)[0][1].step
        assert newest in (steps[-1], step), "an older or a torn checkpoint was picked"
        steps.append(newest)
    # Else the kills came after the saves, and nothing was tested.
    assert died > KILLS // 2
    with served_store() as address:
        values(run_ranks(_save, SIZE, address, tmp_path, 1000))
    assert complete_checkpoints(tmp_path)[0][1].step == 1000
    assert not list(tmp_path.glob("*.incomplete"))
