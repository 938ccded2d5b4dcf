"""Checks the folder for temporary files, and refuses one in which a run's own Ray would fail to start."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from rl_safe_workers.errors import ResourceError
from rl_safe_workers.reaping.processes import RAY_FOLDER, TEMP_PREFIX

SOCKET = f"/{TEMP_PREFIX}12345678/{RAY_FOLDER}/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""Longest path of a socket of Ray, relative to the folder for temporary files."""
LONGEST_SOCKET = 107
"""Largest size in bytes of a socket's path on Unix."""
ROOM_BYTES = 8 * 2**20
"""Bytes that Ray's logs, and files of starting libraries, need. With less, Ray waits half a minute and then fails."""


def temp_folder() -> Path:
    """Returns the folder for temporary files.

    Raises:
        ResourceError: If there is no writable folder.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ResourceError(f"{error.strerror}: set TMPDIR to a folder that can be written") from error


def check_temp_folder(temp: Path) -> None:
    """Refuses a folder for temporary files in which Ray cannot start.

    Raises:
        ResourceError: If the paths of sockets in it would be too long, or if it has too little free space.
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
            "free some space on its disk, or set TMPDIR to another folder"
        )
