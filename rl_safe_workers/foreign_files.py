"""Reads untrusted files: regular files only, up to a size limit, and without blocking.

Opening a FIFO waits for a writer, reading a device may never end, and a link may lead anywhere. This module opens
regular files only.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import stat
import struct
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

Kind = Literal["file", "folder", "other"]
"""Kind of a path's target. A device, a FIFO, a socket and a file of procfs or sysfs are ``"other"``."""
TEXT_CHARACTERS = 1000
"""Largest number of characters that an error quotes from a file."""
SMALL_BYTES = 2**20
"""Size limit for a file that holds a few settings."""
HOLE_BYTES = 64 * 2**20
"""Largest total size of the holes in a file that is read whole. A hole takes no disk space but memory to read."""
_MOST_DEPTH = 32
"""Deepest nesting of folders in a checkpoint or a model."""
_MOST_JSON_DEPTH = 50
"""Deepest nesting of JSON that is read. Python's own limit is about 1,000 in 3.11 and 10,000 in 3.13, where functions
that recurse over a value still end at 1,000."""
_TOO_DEEP = "not JSON that can be read: nested too deeply"
_LONGEST_NAME = 255
"""Largest size in bytes of a file name; all Linux file systems allow this much."""
_LONGEST_PATH = 3_000
"""Largest size in bytes of a path. Linux allows 4,096; files written below the path need the rest."""
MALFORMED = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""Errors from reading a malformed pickle. Its opcodes may meet a value of any type on its stack."""


def open_foreign(path: Path, *, within: Path | None = None, uid: int | None = None) -> BinaryIO:
    """Opens a regular file for reading. Never blocks.

    Args:
        path: The file. Links are followed.
        within: Folder that must contain the file after all links are resolved; None: any folder.
        uid: User id that must own the file; None: any.

    Raises:
        OSError: If the file cannot be opened, is not a regular file, lies outside ``within``, or has another owner.
            ``strerror`` gives the reason.
    """
    status = look(path)
    # Not Path.resolve, which raises RuntimeError for a link to itself.
    if within is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(within)):
        raise OSError(errno.EXDEV, f"a link that leads out of {within}", str(path))
    # Checked before opening, because opening a device may have effects, and after, because the file may have changed.
    _check(status, path, uid)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor), path, uid)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def look(path: str | Path) -> os.stat_result:
    """Returns the status of a path's target; follows links.

    Raises:
        OSError: If the target does not exist or its status cannot be read; also for a name that no file can have.
    """
    try:
        return Path(path).stat()
    except ValueError as error:
        raise OSError(errno.EINVAL, "a name that no file can have", str(path)) from error


def complaint_about_path(path: str) -> str | None:
    """Returns the reason why a path cannot be used, and how to correct it; None if it can be used."""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in path):
        return "has a control character, or bytes that are not UTF-8: rename it"
    if any(len(name.encode()) > _LONGEST_NAME for name in path.split("/")):
        return f"has a name of more than {_LONGEST_NAME} bytes: shorten it"
    if len(path.encode()) > _LONGEST_PATH:
        return f"is longer than {_LONGEST_PATH} bytes: shorten it"
    return None


def kind_of(path: str | Path) -> Kind | None:
    """Returns the kind of a path's target, following links; None if the target does not exist.

    Raises:
        OSError: If the name is too long, a folder is not readable, or links form a cycle.
    """
    try:
        status = look(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(status.st_mode):
        return "folder"
    return "file" if _is_regular(status) else "other"


def read_foreign(path: Path, *, limit_bytes: int, within: Path | None = None, uid: int | None = None) -> bytes:
    """Reads a whole regular file; see `open_foreign`.

    Args:
        path: The file.
        limit_bytes: Largest size in bytes that is read.
        within: As for `open_foreign`.
        uid: As for `open_foreign`.

    Raises:
        OSError: As `open_foreign`; or if the file is larger than ``limit_bytes``, or has more than 64 MiB of holes.
    """
    with open_foreign(path, within=within, uid=uid) as file:
        size = os.fstat(file.fileno()).st_size
        # read() allocates the size that it is asked for.
        data = file.read(size + 1) if size <= limit_bytes and hole_bytes(file, 0, size) <= HOLE_BYTES else None
        if data is not None and size < len(data) <= limit_bytes:  # the file is growing
            data += file.read(limit_bytes + 1 - len(data))
    if size > limit_bytes or (data is not None and len(data) > limit_bytes):
        raise OSError(errno.EFBIG, f"larger than {limit_bytes} bytes", str(path))
    if data is None:
        raise OSError(errno.EFBIG, "mostly a hole: little of it is on the disk", str(path))
    return data


def read_json(path: Path, *, limit_bytes: int, within: Path | None = None, uid: int | None = None) -> Any:
    """Reads a regular JSON file; see `read_foreign`.

    Raises:
        OSError: As `read_foreign`.
        ValueError: If the file is not JSON in UTF-8, or is nested deeper than 50 levels. The error quotes nothing of
            the file.
    """
    data = read_foreign(path, limit_bytes=limit_bytes, within=within, uid=uid)
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text at byte {error.start}") from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if _is_deeper(value, _MOST_JSON_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Returns True if lists and dictionaries are nested deeper than that many levels."""
    layer = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        children = (child for one in layer for child in (one.values() if isinstance(one, dict) else one))
        layer = [child for child in children if isinstance(child, dict | list)]
    return bool(layer)


def entries_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yields all entries of a folder at any depth. Yields links, but does not follow them.

    Raises:
        OSError: If a folder cannot be read, or folders are nested more than 32 deep.
    """
    pending = [(os.fspath(folder), 0)]
    while pending:
        at, depth = pending.pop()
        check_depth(depth, folder)
        with os.scandir(at) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, depth + 1))
                yield entry


def check_depth(depth: int, folder: Path) -> None:
    """Refuses a folder in a checkpoint or a model that is nested too deep.

    Args:
        depth: Number of folders between the checkpoint or model and its own content.
        folder: The checkpoint or model.

    Raises:
        OSError: If ``depth`` is more than 32.
    """
    if depth > _MOST_DEPTH:
        raise OSError(errno.ELOOP, f"more than {_MOST_DEPTH} folders inside each other", str(folder))


def data_extents(file: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields the parts ``(start, stop)`` of a byte range that are not holes. Moves the file's position.

    On a file system without holes the result is one part, the whole range.
    """
    end = os.fstat(file.fileno()).st_size
    stop = min(stop, end)
    while start < stop:
        try:
            begin = os.lseek(file.fileno(), start, os.SEEK_DATA)
            until = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # the rest of the file is a hole
                return
            begin, until = start, stop
        if begin >= stop:
            return
        yield begin, min(until, stop)
        start = until


def hole_bytes(file: BinaryIO, start: int, stop: int) -> int:
    """Returns the number of bytes of a range that are holes or past the end of the file."""
    position = os.lseek(file.fileno(), 0, os.SEEK_CUR)
    data = sum(until - begin for begin, until in data_extents(file, start, stop))
    os.lseek(file.fileno(), position, os.SEEK_SET)
    return stop - start - data


@cache
def _kernel_devices() -> frozenset[int]:
    return frozenset(folder.stat().st_dev for folder in (Path("/proc"), Path("/sys")) if folder.is_mount())


def _is_regular(status: os.stat_result) -> bool:
    # Files of procfs and sysfs look regular, but reading them may block or have effects.
    return stat.S_ISREG(status.st_mode) and status.st_dev not in _kernel_devices()


def _check(status: os.stat_result, path: Path, uid: int | None) -> None:
    if not _is_regular(status):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if uid is not None and status.st_uid != uid:
        raise OSError(errno.EPERM, f"owned by user {status.st_uid}", str(path))


def printable(text: str, *, keep: str = "") -> str:
    r"""Escapes every character that a terminal cannot show, or could take as a command.

    Args:
        text: The text.
        keep: Characters to leave as they are, e.g. a newline.

    >>> printable("a\x1b[2Jb\ud800")
    'a\\x1b[2Jb\\ud800'
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def described(error: BaseException) -> str:
    """Returns an error's type and message on one line of bounded length, in printable characters."""
    try:
        text = str(error)[:TEXT_CHARACTERS]
    except (ValueError, RecursionError):  # integers of more than 4300 digits, say
        text = "which cannot be said"
    return f"{type(error).__name__}: {printable(text)}"
