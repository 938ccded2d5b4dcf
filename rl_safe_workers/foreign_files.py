"""Reads files that somebody else may have made: regular files only, up to a size, and without ever blocking.

Opening a FIFO waits for a writer, reading a device may never end, and a link may lead anywhere. Nothing here opens
what is not a regular file.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

SMALL_BYTES = 2**20
"""Size limit for a file that holds a few settings."""


def open_foreign(path: Path, *, within: Path | None = None, uid: int | None = None) -> BinaryIO:
    """Opens a regular file for reading. Never blocks.

    Args:
        path: The file. Links are followed.
        within: Folder that the file must be in once all links are resolved; None: anywhere.
        uid: User id that must own the file; None: any.

    Raises:
        OSError: If the file cannot be opened, is not a regular file, lies outside ``within``, or has another owner.
            ``strerror`` says which.
    """
    # Not Path.resolve, which raises RuntimeError for a link to itself.
    if within is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(within)):
        raise OSError(errno.EXDEV, f"a link that leads out of {within}", str(path))
    # Looked at before it is opened, since opening a device may already do something; and after, since it may change.
    _check(path.stat(), path, uid)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor), path, uid)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_foreign(path: Path, *, limit_bytes: int, within: Path | None = None, uid: int | None = None) -> bytes:
    """Reads a whole regular file; see `open_foreign`.

    Args:
        path: The file.
        limit_bytes: Largest size in bytes that is read.
        within: As for `open_foreign`.
        uid: As for `open_foreign`.

    Raises:
        OSError: As `open_foreign`; or if the file is larger than ``limit_bytes``.
    """
    with open_foreign(path, within=within, uid=uid) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"larger than {limit_bytes} bytes", str(path))
    return data


def _check(status: os.stat_result, path: Path, uid: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if uid is not None and status.st_uid != uid:
        raise OSError(errno.EPERM, f"owned by user {status.st_uid}", str(path))


def printable(text: str) -> str:
    r"""Returns text with every character escaped that a terminal could take as a command, or cannot show.

    >>> printable("a\x1b[2Jb\ud800")
    'a\\x1b[2Jb\\ud800'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
