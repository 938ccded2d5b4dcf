"""The folder for temporary files: refused before anything starts where Ray could not."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from rl_safe_workers.errors import ResourceError, UsageError
from rl_safe_workers.reaping.temp_folder import LONGEST_SOCKET, ROOM_BYTES, SOCKET, check_temp_folder, temp_folder


def test_a_folder_with_room_and_a_short_path_passes() -> None:
    check_temp_folder(Path("/tmp"))


def test_a_path_too_long_for_sockets_is_refused_and_names_tmpdir() -> None:
    just_fits = "/" + "x" * (LONGEST_SOCKET - len(SOCKET) - 1)
    with pytest.raises(UsageError, match="TMPDIR") as caught:
        check_temp_folder(Path(just_fits + "x"))
    assert f"{LONGEST_SOCKET + 1} bytes" in str(caught.value)
    with pytest.raises(FileNotFoundError):  # its length is fine
        check_temp_folder(Path(just_fits))


@pytest.mark.parametrize(("free", "is_refused"), [(ROOM_BYTES, False), (ROOM_BYTES - 1, True), (0, True)])
def test_a_full_folder_is_refused_and_names_tmpdir(
    free: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    if not is_refused:
        check_temp_folder(Path("/tmp"))
        return
    with pytest.raises(ResourceError, match=f"/tmp, has {free} bytes free.*TMPDIR"):
        check_temp_folder(Path("/tmp"))


def test_a_machine_without_a_writable_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder() -> NoReturn:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    with pytest.raises(ResourceError, match=r"No usable temporary directory found in \['/tmp'\]: set TMPDIR"):
        temp_folder()
