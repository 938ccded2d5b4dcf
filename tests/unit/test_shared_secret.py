"""The secret of a host's ranks: in a file that no other user reads or makes, and gone once all have read it."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from rl_safe_workers.control import shared_secret
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.seal import SECRET_BYTES, new_secret
from rl_safe_workers.control.shared_secret import SharedSecret
from rl_safe_workers.errors import CommunicatorError, PhaseTimeoutError
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.worlds.address import StoreAddress
from tests.small_world import SmallWorld

KEY = "rl_safe_secret"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(shared_secret, "_own", None)
    return PrefixStore("rl_safe", SmallWorld(size=1).store)


def _share(store: Store, rank: int, seconds: float = 5.0) -> SharedSecret:
    return SharedSecret(store, rank=rank, size=2, phase="world", deadline=Deadline.after(seconds))


def test_on_one_machine_it_is_in_a_private_file_and_not_in_the_store(store: Store, tmp_path: Path) -> None:
    first, second = _share(store, 0), _share(store, 1)
    assert first.secret == second.secret
    assert len(first.secret) == SECRET_BYTES
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    place = bytes(store.get(KEY))
    assert place.decode() == str(file)
    assert first.secret.hex().encode() not in place
    second.withdraw()
    assert file.exists()
    first.withdraw()
    first.withdraw()
    assert not file.exists()


def test_the_file_goes_with_its_maker_at_the_latest(store: Store, tmp_path: Path) -> None:
    first = _share(store, 0)
    del first
    assert list(tmp_path.iterdir()) == []


_KILLED = """
import os, signal
from torch.distributed import HashStore
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.shared_secret import SharedSecret
shared = SharedSecret(HashStore(), rank=0, size=2, phase="world", deadline=Deadline.after(5))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_file_of_a_maker_that_was_killed_goes_with_the_next(store: Store, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "LOCAL_WORLD_SIZE": "2"}
    ended = subprocess.run([sys.executable, "-P", "-c", _KILLED], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    first = _share(store, 0)
    assert not left.exists()
    assert [str(file) for file in tmp_path.iterdir()] == [store.get(KEY).decode()]
    first.withdraw()
    assert list(tmp_path.iterdir()) == []


def test_the_files_of_makers_that_live_stay(store: Store, tmp_path: Path) -> None:
    first, other = _share(store, 0), _share(PrefixStore("other", store), 0)
    assert len(list(tmp_path.iterdir())) == 2
    assert _share(store, 1).secret == first.secret
    first.withdraw()
    other.withdraw()
    assert list(tmp_path.iterdir()) == []


def test_nothing_goes_that_no_maker_of_this_user_has_left(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"")
    elsewhere.chmod(0o600)
    (tmp_path / "rl_safe_secret_link").symlink_to(elsewhere)
    (tmp_path / "rl_safe_secret_folder").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "rl_safe_secret_pipe", mode=0o600)
    (tmp_path / "rl_safe_secret_shared").touch()
    (tmp_path / "rl_safe_secret_shared").chmod(0o640)
    before = set(tmp_path.iterdir())
    _share(store, 0).withdraw()
    assert set(tmp_path.iterdir()) == before
    # Nor what is private to another user.
    (tmp_path / "rl_safe_secret_theirs").touch(mode=0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    _share(store, 0).withdraw()
    assert set(tmp_path.iterdir()) == before | {tmp_path / "rl_safe_secret_theirs"}


@pytest.mark.parametrize("moment", ["before", "while"])
def test_a_file_that_passes_for_a_leftover_is_made_again(
    moment: str, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another maker may look for leftovers after the file was made and before it is locked."""
    lock, taken = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not taken:
            taken.extend(tmp_path.iterdir())
            if moment == "while":
                raise BlockingIOError
            taken[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    first = _share(store, 0)
    assert store.get(KEY).decode() != str(taken[0])
    assert _share(store, 1).secret == first.secret
    first.withdraw()


def test_a_file_system_without_locks_is_good_enough(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, other = _share(store, 0), _share(PrefixStore("other", store), 0)
    assert _share(store, 1).secret == first.secret
    first.withdraw()
    other.withdraw()
    assert list(tmp_path.iterdir()) == []


def test_on_several_machines_it_is_in_the_store_until_it_is_withdrawn(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_secret, "_is_one_machine", lambda store, size: False)
    first, second = _share(store, 0), _share(store, 1)
    assert first.secret == second.secret
    assert list(tmp_path.iterdir()) == []
    first.withdraw()
    assert not store.check([KEY])


@pytest.mark.parametrize("mode", [0o644, 0o620])
def test_a_file_that_others_may_open_is_refused(mode: int, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.write_bytes(new_secret())
    file.chmod(mode)
    store.set(KEY, str(file))
    with pytest.raises(CommunicatorError, match=f"key '{KEY}' of the run's store does not lead to a secret"):
        _share(store, 1)


def test_a_file_of_another_user_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _share(store, 0)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CommunicatorError, match="does not lead to a secret that this user has made"):
        _share(store, 1)
    first.withdraw()


@pytest.mark.parametrize("forged", ["relative", "/dev/zero", "/proc/self/mem", "00" * SECRET_BYTES, "\udcff"])
def test_what_leads_to_no_secret_is_refused_in_time(forged: str, store: Store) -> None:
    store.set(KEY, forged.encode(errors="surrogateescape"))
    with pytest.raises((CommunicatorError, PhaseTimeoutError)):
        _share(store, 1, seconds=0.2)


def test_a_link_is_not_followed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(new_secret())
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    store.set(KEY, str(tmp_path / "link"))
    with pytest.raises(CommunicatorError, match="does not lead to a secret"):
        _share(store, 1)


def test_without_rank_0_the_others_name_it(store: Store) -> None:
    with pytest.raises(PhaseTimeoutError) as caught:
        _share(store, 1, seconds=0.2)
    assert caught.value.missing == {trainer_id(0)}


def test_groups_that_are_made_anew_keep_the_secret(store: Store) -> None:
    first = _share(store, 0)
    first.withdraw()
    again = _share(store, 0)
    assert again.secret == first.secret == _share(store, 1).secret
    again.withdraw()


def test_one_machine_is_known_by_what_nobody_can_forge(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = HashStore()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert not shared_secret._is_one_machine(elsewhere, 4)
    assert shared_secret._is_one_machine(PrefixStore("a", SmallWorld(size=1).store), 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert shared_secret._is_one_machine(elsewhere, 4)
    assert not shared_secret._is_one_machine(elsewhere, 8)


def test_an_address_does_not_show_its_secret() -> None:
    secret = new_secret()
    shown = repr(StoreAddress(host="127.0.0.1", port=1, secret=secret))
    assert shown == "StoreAddress(host='127.0.0.1', port=1)"
