"""Saves in forks that are killed at one of their changes of the disk, and what is there afterwards."""

from __future__ import annotations

import itertools
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_safe_workers.checkpoint.folders.manifest import SHARDS, find_checkpoints, read_manifest, step_dir
from rl_safe_workers.checkpoint.folders.publish import pending_path
from rl_safe_workers.checkpoint.folders.retention import commit, prune, start_save
from rl_safe_workers.checkpoint.folders.step_tracker import TRACKER
from rl_safe_workers.checkpoint.format.archives import crc32_of
from rl_safe_workers.config import ResumeMode, TrainerConfig
from rl_safe_workers.driver.resume import find_resume_point
from tests.distributed.shards import manifest_of

KEEP_LAST = 2


def make_save(root: Path, *, step: int, save: int, keep_last: int = KEEP_LAST) -> None:
    """Does rank 0's part of a save, with shards that name the save's number; the clock goes backwards meanwhile."""
    start_save(root, step)
    pending = pending_path(step_dir(root, step))
    for shard in range(2):
        (pending / SHARDS / f"__{shard}_0.distcp").write_text(_contents(save))
    state = {"save": save, "data": {"epoch": 0, "position": 0, "num_prompts": 1}}
    manifest = replace(manifest_of(pending, {}, step), saved_at=1e9 - save, driver_state=state)
    prune(root, keep_last=keep_last, but=commit(pending, manifest))


def _contents(save: int) -> str:
    return f"of save {save} " * 10


def _die_before(moment: int, last_words: int) -> None:
    """Kills this process instead of its n-th change of the disk from now on, after it said which that would be."""
    moments = itertools.count()

    def reach(change: str) -> None:
        if next(moments) == moment:
            os.write(last_words, change.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(name: str) -> None:
        call: Callable[..., Any] = getattr(os, name)

        def watched(target: Any, *args: Any, **kwargs: Any) -> Any:
            reach(f"{name} {target}")
            return call(target, *args, **kwargs)

        setattr(os, name, watched)

    for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync"):
        watch(name)
    fdopen = os.fdopen

    def write_in_halves(descriptor: int, *args: Any, **kwargs: Any) -> Any:
        file = fdopen(descriptor, *args, **kwargs)
        if not file.writable():
            return file
        write = file.write

        def in_halves(text: str) -> None:
            for part in (text[: len(text) // 2], text[len(text) // 2 :]):
                reach(f"write {len(part)} of {len(text)} bytes")
                write(part)
                file.flush()

        file.write = in_halves
        return file

    os.fdopen = write_in_halves


def kill_a_save(root: Path, *, step: int, save: int, moment: int) -> str:
    """Saves in a fork that is killed at a moment; returns the change it did not come to, "" if it came to its end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _die_before(moment, writer)
            make_save(root, step=step, save=save)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        change = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == (-signal.SIGKILL if change else 0), (moment, change, code)
    return change


@dataclass(frozen=True)
class Folder:
    """The complete checkpoints of a folder, newest first, each step once."""

    steps: list[int]
    saves: list[int]


def look(root: Path) -> Folder:
    """Returns the folder's contents; fails unless each checkpoint loads, and a resume picks the newest."""
    found = find_checkpoints(root)
    assert found.damaged == [], "half a checkpoint was taken for a whole one"
    for path, manifest in found.complete:
        assert len(manifest.files) == 2
        for name, record in manifest.files.items():
            assert crc32_of(path / name) == record["digest"]
            assert (path / name).read_text() == _contents(manifest.driver_state["save"])
    trainer = TrainerConfig(default_local_dir=str(root), resume_mode=ResumeMode.auto)
    point = find_resume_point(trainer, Path("no model"))
    assert point is not None
    assert read_manifest(point.path) == found.complete[0][1]
    newest_of_step: dict[int, int] = {}
    for _, manifest in found.complete:
        newest_of_step.setdefault(manifest.step, manifest.driver_state["save"])
    assert int((root / TRACKER).read_text()) in newest_of_step
    return Folder(list(newest_of_step), list(newest_of_step.values()))


def assert_nothing_lost(before: Folder, after: Folder, *, step: int, save: int, change: str) -> None:
    """The newest ``KEEP_LAST`` are those of before the save, or the new one and the newest of the others."""
    others = [old for old in zip(before.steps, before.saves, strict=True) if old[0] != step]
    kept = list(zip(after.steps, after.saves, strict=True))[:KEEP_LAST]
    assert kept in (
        list(zip(before.steps, before.saves, strict=True))[:KEEP_LAST],
        [(step, save), *others][:KEEP_LAST],
    ), f"killed before: {change or 'its end'}"


def assert_next_save_is_good(root: Path, *, step: int, save: int) -> None:
    """It leaves ``KEEP_LAST`` checkpoints, itself and the newest of before, and nothing beside them."""
    before = look(root)
    make_save(root, step=step, save=save)
    steps = [step, *(old for old in before.steps if old != step)][:KEEP_LAST]
    assert look(root).steps == steps
    assert sorted(p.name for p in root.iterdir()) == sorted([*(f"global_step_{s}" for s in steps), TRACKER])
    assert (root / TRACKER).read_text() == str(step)
