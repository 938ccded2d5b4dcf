"""Reads the host memory that processes can still get, within the limits of their container."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

CGROUP, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_OWN_STATUS, _SHARED_MEMORY = Path("/proc/self/status"), Path("/dev/shm")
_ANONYMOUS = "RssAnon:"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Example: ``HostMemory(total_bytes=2**38, free_bytes=2**37)``."""

    total_bytes: int
    free_bytes: int


def host_memory() -> HostMemory:
    """Returns the memory of this machine, or of the container around this process; blocking for milliseconds."""
    machine, limits = psutil.virtual_memory(), list(_limits())
    return HostMemory(
        total_bytes=min([machine.total, *(limit for limit, _ in limits)]),
        free_bytes=min([machine.available, *(limit - used for limit, used in limits)]),
    )


def own_bytes() -> int | None:
    """Returns the bytes of host memory that this process alone holds: its anonymous pages, without files.

    It returns None if the kernel does not report it, as in some sandboxes.
    """
    try:
        lines = _OWN_STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(_ANONYMOUS)), None)


def shared_memory_bytes() -> int | None:
    """Returns the bytes in use in ``/dev/shm``, by all processes of this machine; None if there is no ``/dev/shm``."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def group_memory(pid: int) -> HostMemory | None:
    """Returns the memory of the control group that limits a process the most; None if nothing limits it."""
    limits = list(_limits(Path(f"/proc/{pid}/cgroup")))
    if not limits:
        return None
    total, used = min(limits, key=lambda one: one[0] - one[1])
    return HostMemory(total_bytes=total, free_bytes=total - used)


def _limits(own: Path | None = None) -> Iterator[tuple[int, int]]:
    """Yields limit and use of a process's memory, for its control group and each around it, of version 2 or 1.

    In a container, a group's path may be its path outside, where the container sees no files. Such paths are skipped.
    A group without a limit has ``max``, or in version 1 a number that is larger than any memory.
    """
    for folder, group, is_unified in _groups(own or OWN_CGROUP):
        limit, used, prefix = (
            ("memory.max", "memory.current", "")
            if is_unified
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        for place in (folder / group, *(folder / parent for parent in group.parents)):
            most, now = _number(place / limit), _number(place / used)
            if most is not None and now is not None:
                yield most, now - _cached(place / "memory.stat", prefix)


def _groups(own: Path) -> Iterator[tuple[Path, PurePosixPath, bool]]:
    """Yields each hierarchy of memory groups, the process's group in it, and True for version 2."""
    for line in own.read_text(encoding="utf-8").splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        group = PurePosixPath(path.lstrip("/"))
        if not controllers:
            yield CGROUP, group, True
        elif "memory" in controllers.split(","):
            yield CGROUP / "memory", group, False


def oom_kills(files: Iterable[Path] | None = None) -> dict[Path, int]:
    """Returns how many processes the kernel has killed for want of memory, by the file of a control group that counts.

    Args:
        files: The files to read. None for the file of this process's group, or of the first visible group around it if
            a container hides the process's own.
    """
    if files is None:
        files = (
            next(
                (file for place in (group, *group.parents) if (file := folder / place / name).is_file()), folder / name
            )
            for folder, group, is_unified in _groups(OWN_CGROUP)
            for name in ("memory.events" if is_unified else "memory.oom_control",)
        )
    found = {}
    for file in files:
        rows = dict(line.split() for line in file.read_text(encoding="utf-8").splitlines()) if file.is_file() else {}
        if "oom_kill" in rows:
            found[file] = int(rows["oom_kill"])
    return found


def _number(path: Path) -> int | None:
    """Returns the number in a file of a control group; None if there is no file, or it says ``max``."""
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def _cached(path: Path, prefix: str) -> int:
    """Returns the bytes of cached files that the kernel can drop when memory is short; not those of tmpfs."""
    rows = dict(line.split() for line in path.read_text(encoding="utf-8").splitlines()) if path.is_file() else {}
    return sum(int(rows.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
