"""Conversions on one rank without groups: a complete one is taken, and two runs take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.adapters.hosting import HostedTrainer
from rl_safe_workers.adapters.nemo_rl import conversion
from rl_safe_workers.adapters.nemo_rl.conversion import CONFIG, ITERATION, TRACKER, convert, is_complete
from rl_safe_workers.errors import CheckpointError


class _Alone(HostedTrainer):
    """The process of a world of one rank, and its trainer."""

    @property
    def trainer(self) -> Any:
        return self

    def together(self, phase: Any, work: Callable[[], Any], *, failure: Exception | None = None) -> Any:
        return work()

    def fail(self, phase: Any, error: Exception) -> Any:
        raise error

    def remaining(self) -> timedelta:
        return timedelta(seconds=2)


class _Import:
    """NeMo RL's, which writes where it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def __call__(self, path: str, exists: bool) -> None:
        self.calls.append((Path(path).name, exists))
        if not exists:
            write(Path(path))


def write(path: Path) -> None:
    (path / ITERATION).mkdir(parents=True)
    for name in (f"{ITERATION}/.metadata", f"{ITERATION}/metadata.json", f"{ITERATION}/{CONFIG}", TRACKER):
        (path / name).write_text(f"save: {path}\n")


@pytest.fixture
def unlockable(tmp_path: Path) -> Path:
    """Where a conversion would be, beside a lock that nobody can open."""
    (tmp_path / "moe.lock").mkdir()
    return tmp_path / "moe"


def test_a_conversion_that_is_there_is_taken_where_no_lock_can_be_had(unlockable) -> None:
    write(unlockable)
    run_import = _Import()
    convert(_Alone(), run_import, str(unlockable), force=False)
    assert run_import.calls == [("moe", True)]


@pytest.mark.parametrize("force", [False, True], ids=["half", "forced"])
def test_one_that_is_to_be_made_needs_the_lock(force, unlockable) -> None:
    write(unlockable)
    if not force:
        (unlockable / TRACKER).unlink()
    run_import = _Import()
    with pytest.raises(CheckpointError, match=r"moe\.lock cannot be locked"):
        convert(_Alone(), run_import, str(unlockable), force=force)
    assert run_import.calls == []


@pytest.mark.parametrize("other", [False, True], ids=["alone", "after_another"])
def test_a_run_that_has_waited_for_another_takes_what_that_has_made(other, tmp_path, monkeypatch) -> None:
    lock = conversion.exclusive

    @contextmanager
    def waited(path: Path, **arguments: Any) -> Iterator[bool]:
        with lock(path, **arguments):
            if other:
                write(tmp_path / "moe")
            yield other

    monkeypatch.setattr(conversion, "exclusive", waited)
    run_import = _Import()
    convert(_Alone(), run_import, str(tmp_path / "moe"), force=False)
    assert run_import.calls == [("moe", True) if other else ("moe.incomplete", False)]
    assert is_complete(tmp_path / "moe")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moe"]


def half(path: Path) -> None:
    (path / ITERATION).mkdir(parents=True)
    (path / ITERATION / "__0_0.distcp").write_text("half")


def half_and_notes(path: Path) -> None:
    half(path)
    (path / "notes.txt").write_text("mine")


def whole_and_notes(path: Path) -> None:
    write(path)
    (path / "notes.txt").write_text("mine")


def linked(path: Path) -> None:
    write(path.with_name("archive"))
    (path.with_name("archive") / TRACKER).unlink()
    path.symlink_to("archive")


@pytest.mark.parametrize("there", [half_and_notes, whole_and_notes, linked, Path.touch])
def test_what_is_no_import_is_not_replaced(there: Callable[[Path], object], tmp_path: Path) -> None:
    there(tmp_path / "moe")
    before, run_import = sorted(tmp_path.rglob("*")), _Import()
    with pytest.raises(CheckpointError, match="moe .*it is left alone; move it away"):
        convert(_Alone(), run_import, str(tmp_path / "moe"), force=True)
    assert (sorted(tmp_path.rglob("*")), run_import.calls) == (before, [])


@pytest.mark.parametrize("force", [False, True])
def test_half_an_import_is_replaced(force: bool, tmp_path: Path) -> None:
    half(tmp_path / "moe")
    convert(_Alone(), _Import(), str(tmp_path / "moe"), force=force)
    assert is_complete(tmp_path / "moe")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moe"]


def test_a_file_that_comes_during_the_import_stays(tmp_path: Path) -> None:
    half(tmp_path / "moe")

    def run_import(path: str, exists: bool) -> None:
        write(Path(path))
        (tmp_path / "moe" / "notes.txt").write_text("mine")

    with pytest.raises(CheckpointError, match=r"moe holds notes\.txt"):
        convert(_Alone(), run_import, str(tmp_path / "moe"), force=False)
    assert (tmp_path / "moe" / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moe"]


@pytest.mark.parametrize("name", ["moe.incomplete", "moe.lock"])
def test_a_name_that_is_needed_and_someone_elses_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match=f"{name} .*left alone"):
        convert(_Alone(), _Import(), str(tmp_path / "moe"), force=False)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]
