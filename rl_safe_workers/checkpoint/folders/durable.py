"""Files and folders whose contents survive a crash of the machine.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to an OSError of the body that has none, such as that of a failed write to an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def fsync(path: Path) -> None:
    """Makes a file's contents, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_path(path: Path) -> Path:
    """Returns where `write_durably` writes before it renames."""
    return path.with_name(path.name + ".tmp")


def write_new(path: Path, text: str) -> None:
    """Creates a new file and writes it. Never follows a link and never writes into something that exists.

    Raises:
        OSError: If the name is taken, or the file cannot be written. In the second case no file is left.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with naming(path), os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        fsync(path)
    except OSError:
        path.unlink()
        raise


def write_durably(path: Path, text: str) -> None:
    """Replaces a file atomically and durably: after a crash it has its old or its new contents.

    If the path is a link, the file replaces the link. The link's target stays as it is.

    Raises:
        OSError: If the file cannot be written, or something exists at `temporary_path`.
    """
    temporary = temporary_path(path)
    write_new(temporary, text)
    try:
        temporary.rename(path)
    except OSError:
        temporary.unlink()
        raise
    fsync(path.parent)
