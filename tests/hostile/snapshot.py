"""A folder's contents, to the byte, so that a change is seen."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

_HASHED_BYTES = 2**20
"""Bytes that are hashed at each end of a file: an input may be a sparse file of many TiB."""


def snapshot(root: Path) -> dict[str, str]:
    """Describes everything below a folder, by relative path. Follows no links and opens regular files only."""
    found, start = {}, os.fsencode(root)
    left = [start]
    while left:  # no recursion: an input may have a thousand folders in each other
        for entry in os.scandir(left.pop()):
            found[os.fsdecode(os.path.relpath(entry.path, start))] = _describe(entry)
            if entry.is_dir(follow_symlinks=False):
                left.append(entry.path)
    return found


def _describe(entry: os.DirEntry[bytes]) -> str:
    status = entry.stat(follow_symlinks=False)
    kind = stat.filemode(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return f"{kind} {Path(os.fsdecode(entry.path)).readlink()}"
    if not stat.S_ISREG(status.st_mode):
        return kind
    with Path(os.fsdecode(entry.path)).open("rb") as file:
        digest = hashlib.sha256(file.read(_HASHED_BYTES))
        file.seek(max(0, status.st_size - _HASHED_BYTES))
        digest.update(file.read(_HASHED_BYTES))
    return f"{kind} {status.st_size} {digest.hexdigest()[:16]}"


def changes(
    before: Mapping[str, str], after: Mapping[str, str], *, ours: Sequence[str] = (), theirs: Sequence[str] = ()
) -> list[str]:
    """Says what was added, removed or changed, other than what is ours.

    Args:
        before: The earlier snapshot.
        after: The later one.
        ours: Patterns of paths that may change; a pattern covers all that lies below, too.
        theirs: Patterns of paths that may not, though one of ours covers them.
    """
    found = []
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) == after.get(path) or (_matches(path, ours) and not _matches(path, theirs)):
            continue
        word = "removed" if path not in after else "added" if path not in before else "changed"
        found.append(f"{word} {path}")
    return found


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(path, pattern) or fnmatch(path, f"{pattern}/*") for pattern in patterns)
