"""Compares the folder of checkpoints (its file system, free space and speed) with the saves of the run."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl_safe_workers.doctor.check import GIB, MIB, Check, Fact, Report, Subject
from rl_safe_workers.findings import Finding, Severity

WRITTEN_BYTES, BLOCK_BYTES = 64 * MIB, 4 * MIB
IN_MEMORY = ("ramfs", "tmpfs")
SHARED = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gpfs", "lustre", "nfs", "smb", "virtiofs", "wekafs")
"""Prefixes of the names of file systems that several machines may share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A folder that will hold checkpoints.

    Example: ``measure(subject)``
    """

    path: Path
    there: Path
    """The path, or the nearest folder above it that exists."""
    file_system: str
    free_bytes: int
    write_s: float | None = None
    """Seconds to write and sync ``WRITTEN_BYTES``; None if nothing could be written."""
    reason: str = ""
    """Why nothing could be written; empty otherwise."""
    save_bytes: int | None = None
    """Bytes of one save of the run; None if unknown."""
    save_s: float = 0.0
    """Seconds of one save at this speed, which the ranks of each node share, by the plan."""

    @property
    def bytes_s(self) -> float | None:
        """Bytes that were written and synced per second; None if nothing could be written."""
        return None if self.write_s is None else WRITTEN_BYTES / self.write_s


def measure(subject: Subject) -> Storage:
    """Measures the speed with an unnamed file, which disappears even if this process dies, and predicts a save."""
    path = subject.checkpoints.absolute()
    there = next(folder for folder in (path, *path.parents) if folder.is_dir())
    write_s, reason = None, ""
    try:
        write_s = _write_and_sync(there)
    except OSError as error:
        reason = error.strerror or str(error)
    size, seconds = _predict(subject, write_s)
    return Storage(
        path=path,
        there=there,
        file_system=_file_system(there),
        free_bytes=psutil.disk_usage(str(there)).free,
        write_s=write_s,
        reason=reason,
        save_bytes=size,
        save_s=seconds,
    )


def _write_and_sync(folder: Path) -> float:
    block = os.urandom(BLOCK_BYTES)  # random, so that a file system that compresses does not look faster than it is
    # The file is unlinked as soon as it is made, or is made without a name.
    with tempfile.TemporaryFile(dir=folder) as file:
        started_s = time.monotonic()
        for _ in range(WRITTEN_BYTES // BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return time.monotonic() - started_s


def _file_system(folder: Path) -> str:
    """Returns the type of the innermost mount that holds a folder."""
    resolved = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if resolved.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"


def _predict(subject: Subject, write_s: float | None) -> tuple[int | None, float]:
    """Returns the bytes and seconds of a save of ours; None and 0 if there is no recipe or no readable model."""
    if subject.recipe is None or write_s is None:
        return None, 0.0
    from rl_safe_workers.plan.plan import make_plan
    from rl_safe_workers.plan.request import make_request, options_source
    from rl_safe_workers.plan.saves import OURS
    from rl_safe_workers.plan.sources import recipe_source

    speed = options_source({"write_gib_s": WRITTEN_BYTES / write_s / GIB})
    plan = make_plan(make_request(recipe_source(subject.recipe, subject.overrides).overlaid(speed)))
    ours = next((way for way in plan.saves if way.sharding == OURS), None)
    return (None, 0.0) if ours is None else (ours.total, ours.seconds)


def judge(storage: Storage, subject: Subject) -> Report:
    """Compares the folder with the saves that the run will write there."""
    where = f"{storage.path}{'' if storage.there == storage.path else f' (made below {storage.there})'}"
    facts = [
        Fact(name="checkpoints", value=f"{where}, {storage.file_system}, {storage.free_bytes / GIB:.1f} GiB free"),
        Fact(name="writing there", value=_speed(storage)),
    ]
    if subject.recipe is not None and storage.bytes_s is not None:
        facts.append(Fact(name="a save", value=_save(storage)))
    checks = (_unwritable, _in_memory, _apart, _space, _too_long)
    findings = tuple(found for check in checks for found in check(storage, subject)) if _saves(subject) else ()
    return Report(facts=tuple(facts), findings=findings)


def _saves(subject: Subject) -> bool:
    """Returns True if the run will save. Also True without a recipe, because any run may save."""
    return subject.config is None or subject.checkpoint_path is not None or subject.config.trainer.save_freq > 0


def _speed(storage: Storage) -> str:
    if storage.bytes_s is None:
        return f"not checked: {storage.reason}"
    return f"{storage.bytes_s / MIB:.0f} MiB/s with fsync, {WRITTEN_BYTES // MIB} MiB by one writer"


def _save(storage: Storage) -> str:
    if storage.save_bytes is None:
        return "not predicted: the model is not there yet"
    return f"{storage.save_bytes / MIB:.1f} MiB, {storage.save_s:.2f} s at that speed"


def _unwritable(storage: Storage, subject: Subject) -> Iterator[Finding]:
    if storage.write_s is None:
        yield Finding(
            code="checkpoints-unwritable",
            severity=Severity.STOPS,
            text=f"nothing can be written below {storage.there} ({storage.reason}): the first save fails",
            since="always",
            evidence=("a file of 64 MiB was tried",),
            avoid="trainer.default_local_dir, or its rights",
        )


def _in_memory(storage: Storage, subject: Subject) -> Iterator[Finding]:
    if storage.file_system in IN_MEMORY:
        yield Finding(
            code="checkpoints-in-memory",
            severity=Severity.RISKS,
            text=f"{storage.there} is {storage.file_system}: checkpoints take host memory and go with the machine",
            since="always",
            evidence=("tmpfs(5)",),
            avoid="trainer.default_local_dir on a disk",
        )


def _apart(storage: Storage, subject: Subject) -> Iterator[Finding]:
    if subject.joins_cluster and not storage.file_system.startswith((*SHARED, *IN_MEMORY)):
        yield Finding(
            code="checkpoints-apart",
            severity=Severity.RISKS,
            text=f"{storage.there} is {storage.file_system}, which other machines hardly see: if the run has several, "
            "each keeps its own shards, and the checkpoint is whole nowhere",
            since="always",
            evidence=("docs/checkpoints.md",),
            avoid="trainer.default_local_dir on a file system of all nodes",
        )


def _space(storage: Storage, subject: Subject) -> Iterator[Finding]:
    if storage.save_bytes is None or subject.config is None:
        return
    kept = subject.config.rl_safe.checkpoint.keep_last
    needed = storage.save_bytes * (kept + 1)  # an old checkpoint is removed only after a new one is committed
    if storage.free_bytes >= needed:
        return
    first = storage.free_bytes < storage.save_bytes
    yield Finding(
        code="disk-short",
        severity=Severity.STOPS if first else Severity.RISKS,
        text=f"{storage.free_bytes / GIB:.2f} GiB are free; a save takes {storage.save_bytes / GIB:.2f}, and with "
        f"those kept {needed / GIB:.2f}: {'the first' if first else 'a later'} save fails",
        since="always",
        evidence=("plan/saves.py",),
        avoid="rl_safe.checkpoint.keep_last, trainer.default_local_dir, or more space",
    )


def _too_long(storage: Storage, subject: Subject) -> Iterator[Finding]:
    if subject.config is None or storage.save_bytes is None:
        return
    timeout_s = subject.config.rl_safe.timeouts.save
    if storage.save_s > timeout_s:
        yield Finding(
            code="save-timeout",
            severity=Severity.STOPS,
            text=f"a save takes {storage.save_s:.0f} s at the measured speed, and rl_safe.timeouts.save is "
            f"{timeout_s:g} s: the run ends at its first save",
            since="always",
            evidence=("plan/saves.py", "measured now"),
            avoid="rl_safe.timeouts.save, or a faster place for trainer.default_local_dir",
        )


STORAGE = Check(name="checkpoints", deadline_s=60, gather=measure, judge=judge)
