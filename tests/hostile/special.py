"""Entries in the place of a file: links, pipes, holes and other things that are no plain file."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from tests.hostile.case import Site

GIB, TIB = 2**30, 2**40


def _link(target: str) -> Callable[[Path, Site], None]:
    def place(path: Path, site: Site) -> None:
        path.symlink_to(target)

    return place


def _fifo(path: Path, site: Site) -> None:
    os.mkfifo(path)


def _socket(path: Path, site: Site) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's name is of 107 bytes at most
        try:
            end.bind(path.name)
        finally:
            os.chdir(here)


def _folder(path: Path, site: Site) -> None:
    path.mkdir()


def _empty(path: Path, site: Site) -> None:
    path.touch()


def _hole(size: int) -> Callable[[Path, Site], None]:
    def place(path: Path, site: Site) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return place


def _missing(path: Path, site: Site) -> None:
    pass


SPECIAL: dict[str, Callable[[Path, Site], None]] = {
    "fifo": _fifo,
    "socket": _socket,
    "folder": _folder,
    "empty": _empty,
    "missing": _missing,
    "hole-8gib": _hole(8 * GIB),
    "hole-10tib": _hole(10 * TIB),
    "link-proc-mem": _link("/proc/self/mem"),
    # Root can read it, and waits there for the kernel's next line.
    "link-proc-kmsg": _link("/proc/kmsg"),
    "link-dev-zero": _link("/dev/zero"),
    "link-loop": _link("loop-of-links"),
    "link-secret": _link("SECRET"),
}
"""By name: what puts it there."""


def replace(path: Path, what: str, site: Site) -> None:
    """Puts something special in the place of a file or folder."""
    _remove(path)
    if what == "link-loop":
        (path.parent / "loop-of-links").symlink_to("loop-of-links")
    if what == "link-secret":
        path.symlink_to(site.secret)
    else:
        SPECIAL[what](path, site)


def move_outside(path: Path, site: Site) -> None:
    """Moves a file or folder to those of somebody else, and leaves a link to it: what is read is good, and foreign."""
    target = site.outside / "archive" / path.name
    target.parent.mkdir(exist_ok=True)
    path.rename(target)
    path.symlink_to(target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
