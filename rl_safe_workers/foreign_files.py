"""Reads files that somebody else may have made: regular files only, up to a size, and without ever blocking.

Opening a FIFO waits for a writer, reading a device may never end, and a link may lead anywhere. Nothing here opens
what is not a regular file.

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
"""A device, a FIFO, a socket, or a file that the kernel makes up, is of another kind than a file or a folder."""
TEXT_CHARACTERS = 1000
"""Length at most of what an error quotes of a file."""
SMALL_BYTES = 2**20
"""Size limit for a file that holds a few settings."""
HOLE_BYTES = 64 * 2**20
"""How much of a file that is read as a whole may be holes. A hole costs nothing to make and its size to read."""
_MOST_DEPTH = 32
"""How many folders of a checkpoint or a model lie inside each other at most."""
_LONGEST_NAME = 255
"""Bytes of a name in a folder; all file systems of Linux take as many."""
_LONGEST_PATH = 3_000
"""Bytes of a path, of the 4,096 that Linux takes: what is written below one needs the rest."""
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
"""Errors that a pickle raises that is not well-formed: its opcodes work on any value on its stack."""


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
    status = look(path)
    # Not Path.resolve, which raises RuntimeError for a link to itself.
    if within is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(within)):
        raise OSError(errno.EXDEV, f"a link that leads out of {within}", str(path))
    # Looked at before it is opened, since opening a device may already do something; and after, since it may change.
    _check(status, path, uid)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor), path, uid)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def look(path: str | Path) -> os.stat_result:
    """Returns the status of what is at a path, links followed.

    Raises:
        OSError: If nothing is there, or it cannot be looked at; also for a name that no file can have.
    """
    try:
        return Path(path).stat()
    except ValueError as error:
        raise OSError(errno.EINVAL, "a name that no file can have", str(path)) from error


def complaint_about_path(path: str) -> str | None:
    """Says why no file can have a path, and what to do about it; None if one can."""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in path):
        return "has a control character, or bytes that are not UTF-8: rename it"
    if any(len(name.encode()) > _LONGEST_NAME for name in path.split("/")):
        return f"has a name of more than {_LONGEST_NAME} bytes: shorten it"
    if len(path.encode()) > _LONGEST_PATH:
        return f"is longer than {_LONGEST_PATH} bytes: shorten it"
    return None


def kind_of(path: str | Path) -> Kind | None:
    """Returns what is at a path, links followed; None if nothing is.

    Raises:
        OSError: If that cannot be told: a name too long, a folder that may not be read, links in a circle.
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
        OSError: As `open_foreign`; or if the file is larger than ``limit_bytes``, or mostly a hole.
    """
    with open_foreign(path, within=within, uid=uid) as file:
        size = os.fstat(file.fileno()).st_size
        # A read allocates what it asks for.
        data = file.read(size + 1) if size <= limit_bytes and hole_bytes(file, 0, size) <= HOLE_BYTES else None
        if data is not None and size < len(data) <= limit_bytes:  # it grows
            data += file.read(limit_bytes + 1 - len(data))
    if size > limit_bytes or (data is not None and len(data) > limit_bytes):
        raise OSError(errno.EFBIG, f"larger than {limit_bytes} bytes", str(path))
    if data is None:
        raise OSError(errno.EFBIG, "mostly a hole: little of it is on the disk", str(path))
    return data


def read_json(path: Path, *, limit_bytes: int, within: Path | None = None, uid: int | None = None) -> Any:
    """Reads a regular file of JSON; see `read_foreign`.

    Raises:
        OSError: As `read_foreign`.
        ValueError: If it is no JSON in UTF-8, or nested more deeply than Python reads; quotes nothing of it.
    """
    data = read_foreign(path, limit_bytes=limit_bytes, within=within, uid=uid)
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text at byte {error.start}") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def entries_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yields all that is in a folder at any depth. A link is yielded, and not followed.

    Raises:
        OSError: If a folder cannot be read, or folders lie inside each other too deeply.
    """
    pending = [(os.fspath(folder), 0)]
    while pending:
        at, depth = pending.pop()
        if depth > _MOST_DEPTH:
            raise OSError(errno.ELOOP, f"more than {_MOST_DEPTH} folders inside each other", str(folder))
        with os.scandir(at) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, depth + 1))
                yield entry


def data_extents(file: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields the parts ``(start, stop)`` of a byte range that are not holes. Moves the file's position.

    A file system that knows of no holes gives one part, the whole range.
    """
    end = os.fstat(file.fileno()).st_size
    stop = min(stop, end)
    while start < stop:
        try:
            begin = os.lseek(file.fileno(), start, os.SEEK_DATA)
            until = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole until the end
                return
            begin, until = start, stop
        if begin >= stop:
            return
        yield begin, min(until, stop)
        start = until


def hole_bytes(file: BinaryIO, start: int, stop: int) -> int:
    """Bytes of a range that are holes or past the end."""
    position = os.lseek(file.fileno(), 0, os.SEEK_CUR)
    data = sum(until - begin for begin, until in data_extents(file, start, stop))
    os.lseek(file.fileno(), position, os.SEEK_SET)
    return stop - start - data


@cache
def _kernel_devices() -> frozenset[int]:
    return frozenset(folder.stat().st_dev for folder in (Path("/proc"), Path("/sys")) if folder.is_mount())


def _is_regular(status: os.stat_result) -> bool:
    # Files of the kernel look regular, and reading them may wait, or change something.
    return stat.S_ISREG(status.st_mode) and status.st_dev not in _kernel_devices()


def _check(status: os.stat_result, path: Path, uid: int | None) -> None:
    if not _is_regular(status):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if uid is not None and status.st_uid != uid:
        raise OSError(errno.EPERM, f"owned by user {status.st_uid}", str(path))


def printable(text: str, *, keep: str = "") -> str:
    r"""Returns text with every character escaped that a terminal could take as a command, or cannot show.

    Args:
        text: The text.
        keep: Characters that stay, e.g. a newline.

    >>> printable("a\x1b[2Jb\ud800")
    'a\\x1b[2Jb\\ud800'
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def described(error: BaseException) -> str:
    """Returns an error's kind and text on one line of bounded length, whatever it quotes."""
    try:
        text = str(error)[:TEXT_CHARACTERS]
    except (ValueError, RecursionError):  # integers of more than 4300 digits, say
        text = "which cannot be said"
    return f"{type(error).__name__}: {printable(text)}"
