"""A process is killed at each step of a save that removes old checkpoints: the newest is never lost, nor torn."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path

import pytest

from tests.distributed.dying_saves import (
    Folder,
    assert_next_save_is_good,
    assert_nothing_lost,
    kill_a_save,
    look,
    make_save,
)
from tests.distributed.ranks import run_ranks, values

KILLS = 60
"""Kills during saves that follow one another in one folder."""
MOMENTS = 50
"""About as many changes of the disk as a save makes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of more checkpoints than are to be kept: of steps 1 to 4, saved in that order."""
    root = tmp_path / "folder"
    for step in range(1, 5):
        make_save(root, step=step, save=step, keep_last=0)
    return root


def _kill_at_every_moment(rank: int, folder: Path, roots: Path, step: int) -> list[tuple[Path, str]]:
    """Kills a save of its own at each moment, each in a copy of the folder; until one comes to its end."""
    killed: list[tuple[Path, str]] = []
    for moment in itertools.count():
        root = shutil.copytree(folder, roots / str(moment))
        change = kill_a_save(root, step=step, save=5, moment=moment)
        if not change:
            return killed
        killed.append((root, change))
    raise AssertionError


@pytest.mark.parametrize("step", [5, pytest.param(4, marks=pytest.mark.every_case)], ids=["next_step", "same_step"])
def test_a_kill_at_any_moment_of_a_save_and_its_pruning_loses_nothing(step: int, folder: Path, tmp_path: Path) -> None:
    before, went_on = look(folder), []
    (killed,) = values(run_ranks(_kill_at_every_moment, 1, folder, tmp_path / "killed", step))
    changes = {"rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "write"}
    assert {change.split()[0] for _, change in killed} == changes
    assert len(killed) > 40
    for root, change in killed:
        after = look(root)
        assert_nothing_lost(before, after, step=step, save=5, change=change)
        went_on.append(after.saves[0] == 5)
        assert_next_save_is_good(root, step=6, save=6)
    # Once the new one is there it stays.
    assert went_on == sorted(went_on)
    assert went_on[-1]


def _kill_one_after_another(rank: int, root: Path) -> list[tuple[int, str, Folder]]:
    """The step, the change that was not made and what is there then, of each of the saves."""
    rng, killed, after = random.Random(0), [], look(root)
    for save in range(5, 5 + KILLS):
        step = after.steps[0] + rng.randrange(2)
        change = kill_a_save(root, step=step, save=save, moment=rng.randrange(MOMENTS))
        after = look(root)
        killed.append((step, change, after))
    return killed


def test_kills_one_after_another_lose_nothing(folder: Path) -> None:
    """Each save meets what the killed one before it left, and may be killed clearing it up."""
    before = look(folder)
    (killed,) = values(run_ranks(_kill_one_after_another, 1, folder))
    for save, (step, change, after) in enumerate(killed, start=5):
        assert_nothing_lost(before, after, step=step, save=save, change=change)
        before = after
    # Else few were killed, or none late enough for there to be a new checkpoint.
    assert sum(bool(change) for _, change, _ in killed) >= 30
    assert len({after.saves[0] for *_, after in killed}) > 10
    assert_next_save_is_good(folder, step=1000, save=1000)
