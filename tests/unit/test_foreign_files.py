"""Files that somebody else made: only regular ones are opened, within their size, and without waiting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rl_safe_workers.foreign_files import (
    HOLE_BYTES,
    data_extents,
    hole_bytes,
    kind_of,
    open_foreign,
    printable,
    read_foreign,
)


def test_a_regular_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    assert read_foreign(tmp_path / "file", limit_bytes=4, uid=os.getuid()) == b"1234"
    with pytest.raises(OSError, match="larger than 3 bytes"):
        read_foreign(tmp_path / "file", limit_bytes=3)


@pytest.mark.timeout(20)
def test_a_fifo_a_device_and_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero", "."):
        with pytest.raises(OSError, match="not a regular file"):
            read_foreign(tmp_path / name, limit_bytes=10)


@pytest.mark.parametrize("path", ["/proc/self/mem", "/proc/self/environ", "/proc/kmsg", "/dev/null", "FIFO"])
def test_what_only_looks_like_a_file_is_of_another_kind(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo" if path == "FIFO" else path)
    if not (tmp_path / "link").exists():
        pytest.skip(f"this kernel has no {path}")
    assert kind_of(tmp_path / "link") == "other"


def test_files_folders_and_nothing_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert [kind_of(tmp_path / name) for name in ("file", ".", "none", "file/x")] == ["file", "folder", None, None]
    for name in ("a\0b", "x" * 300):
        with pytest.raises(OSError, match="a name that no file can have|File name too long"):
            kind_of(tmp_path / name)


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=f"owned by user {os.getuid()}"):
        open_foreign(tmp_path / "file", uid=os.getuid() + 1)


def test_links_may_not_lead_out_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "own").write_bytes(b"own")
    (inside / "near").symlink_to("own")
    (inside / "far").symlink_to("../outside")
    assert read_foreign(inside / "near", limit_bytes=10, within=inside) == b"own"
    with pytest.raises(OSError, match="a link that leads out of"):
        read_foreign(inside / "far", limit_bytes=10, within=inside)


def test_control_characters_and_surrogates_are_escaped() -> None:
    assert printable("plain é \x1b[31m\n\ud800") == "plain é \\x1b[31m\\n\\ud800"


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "loop"])
def test_a_name_that_no_file_can_have_is_an_os_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for within in (None, tmp_path):
        with pytest.raises(OSError, match=r"a name that no file can have|File name too long|symbolic links"):
            read_foreign(tmp_path / name, limit_bytes=10, within=within)


def test_a_hole_is_refused_without_being_read(tmp_path: Path) -> None:
    with (tmp_path / "hole").open("wb") as file:
        file.write(b"start")
        file.truncate(2 * HOLE_BYTES)
    with pytest.raises(OSError, match="mostly a hole"):
        read_foreign(tmp_path / "hole", limit_bytes=4 * HOLE_BYTES)


def test_the_data_between_holes_is_found(tmp_path: Path) -> None:
    mib = 2**20
    with (tmp_path / "file").open("wb") as file:
        file.seek(4 * mib)
        file.write(b"x" * mib)
        file.truncate(8 * mib)
    with open_foreign(tmp_path / "file") as found:
        assert list(data_extents(found, 0, 8 * mib)) == [(4 * mib, 5 * mib)]
        assert list(data_extents(found, 4 * mib + 1, 4 * mib + 2)) == [(4 * mib + 1, 4 * mib + 2)]
        assert (hole_bytes(found, 0, 8 * mib), hole_bytes(found, 5 * mib, 9 * mib)) == (7 * mib, 4 * mib)


def test_a_file_of_the_kernel_is_not_opened() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read_foreign(Path("/proc/self/status"), limit_bytes=10**6)
