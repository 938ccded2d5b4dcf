"""The folder for temporary files, in which a run's own Ray starts: refused where Ray would fail to start."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from rl_safe_workers.errors import ResourceError
from rl_safe_workers.reaping.processes import RAY_FOLDER, TEMP_PREFIX

SOCKET = f"/{TEMP_PREFIX}12345678/{RAY_FOLDER}/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""Longest path of one of Ray's sockets, below the folder for temporary files."""
LONGEST_SOCKET = 107
"""Bytes that Unix takes as the path of a socket."""
ROOM_BYTES = 8 * 2**20
"""Room for Ray's logs, and for what libraries write while they start. Ray with less waits half a minute, then fails."""


def temp_folder() -> Path:
    """Returns the folder for temporary files.

    Raises:
        ResourceError: If there is none that can be written.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ResourceError(f"{error.strerror}: set TMPDIR to a folder that can be written") from error


def check_temp_folder(temp: Path) -> None:
    """Refuses a folder for temporary files that Ray cannot start in.

    Raises:
        ResourceError: If sockets in it would have too long a path, or it has no room.
    """
    length = len(f"{temp}{SOCKET}".encode())
    if length > LONGEST_SOCKET:
        raise ResourceError(
            f"the folder for temporary files, {temp}, has too long a path: Ray's sockets in it would have "
            f"{length} bytes, and Unix takes {LONGEST_SOCKET}; set TMPDIR to a shorter path, such as /tmp"
        )
    free = shutil.disk_usage(temp).free
    if free < ROOM_BYTES:
        raise ResourceError(
            f"the folder for temporary files, {temp}, has {free} bytes free, and Ray needs {ROOM_BYTES}: "
            "make room there, or set TMPDIR to another folder"
        )
