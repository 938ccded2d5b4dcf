"""Prepares a directory of torch_dist shards that a host framework has chosen and may save the same step to again.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from rl_safe_workers.checkpoint.folders.durable import fsync

_COMPLETE = ("metadata.json", ".metadata")
"""Without these a directory is no checkpoint to megatron-core."""
_FILES = re.compile(r"__[0-9]+_[0-9]+\.distcp|common\.pt|\.metadata\.tmp")
"""The other files that a save writes."""


def check_no_links(path: Path, *, below: Path) -> None:
    """Refuses a path that leads through a link: the host must not replace files behind it.

    Args:
        path: May be missing.
        below: The directory that contains everything that the host has made. It may be a link, or lie behind one.

    Raises:
        NotADirectoryError: Naming the link.
    """
    for folder in (path, *path.parents):
        if folder == below:
            return
        if folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "is a link, so it is left alone; save elsewhere", str(folder))


def clear_shards(directory: Path, *, below: Path) -> None:
    """Makes a directory, or removes the shards of an earlier save of the step from it.

    It removes files with the names that a save writes, and leaves everything else. From here on, the earlier save is no
    longer a checkpoint.

    Args:
        directory: Made if it is missing, with its parents.
        below: As for `check_no_links`. Used only if there is something to remove.

    Raises:
        OSError: If something cannot be removed, or lies behind a link.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = [path for path in directory.iterdir() if _FILES.fullmatch(path.name)]
    complete = [path for name in _COMPLETE if (path := directory / name).exists() or path.is_symlink()]
    if shards or complete:
        check_no_links(directory, below=below)
    for path in complete:
        path.unlink()
    fsync(directory)
    for path in shards:
        path.unlink()
