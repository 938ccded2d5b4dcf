"""Claims of folders, where the lock cannot be taken."""

from __future__ import annotations

import errno
import fcntl
import logging
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders.claim import RUN_LOCK, claimed
from rl_safe_workers.errors import ConfigError

KEY = "checkpointing.checkpoint_dir"


def _failing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def lockf(*_: object) -> None:
        raise OSError(number, "from the file system")

    monkeypatch.setattr(fcntl, "lockf", lockf)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_only_warns(number: int, tmp_path: Path, monkeypatch, caplog) -> None:
    _failing(monkeypatch, number)
    with caplog.at_level(logging.WARNING), claimed({KEY: tmp_path / "new"}):
        assert list((tmp_path / "new").iterdir()) == []
    (record,) = caplog.records
    assert record.message.startswith(f"{KEY}: no other run may use {tmp_path / 'new'}: its file system has no locks (")
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_another_host_is_heeded_without_locks(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / RUN_LOCK).write_text('{"host": "another", "pid": 1}')
    _failing(monkeypatch, errno.ENOLCK)
    with pytest.raises(ConfigError, match="cannot be locked"), claimed({KEY: tmp_path}):
        pass


def test_another_failure_of_a_lock_blames_no_run(tmp_path: Path, monkeypatch) -> None:
    _failing(monkeypatch, errno.EIO)
    with pytest.raises(ConfigError, match=f"^{KEY}: .* cannot be locked: "), claimed({KEY: tmp_path}):
        pass


def test_a_file_in_place_of_a_lock_blames_no_run(tmp_path: Path) -> None:
    (tmp_path / RUN_LOCK).write_text("my notes")
    with pytest.raises(ConfigError, match=f"^{KEY}: .* is no lock of ours"), claimed({KEY: tmp_path}):
        pass


def test_a_run_that_holds_the_folder_is_blamed(tmp_path: Path) -> None:
    with (
        claimed({KEY: tmp_path}),
        pytest.raises(ConfigError, match="^another run is in the way: this process holds "),
        claimed({KEY: tmp_path}),
    ):
        pass
