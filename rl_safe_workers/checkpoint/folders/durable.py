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
    """Gives an OSError of the body the path, if it has none: a failed write of an open file does not tell it."""
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
    """Writes a file that is not there yet. Never through a link, never into something that is there.

    Raises:
        OSError: If the name is taken; or if the file cannot be written, which then is not there.
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

    A link is replaced by the file; what it leads to stays as it is.

    Raises:
        OSError: If the file cannot be written, or something has the name `temporary_path`.
    """
    temporary = temporary_path(path)
    write_new(temporary, text)
    try:
        temporary.rename(path)
    except OSError:
        temporary.unlink()
        raise
    fsync(path.parent)
