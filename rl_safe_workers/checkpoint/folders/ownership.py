"""Decides which folders are ours to remove or replace, and removes them. It touches nothing else.

A folder is ours if it is a real directory, no link, and

- it is empty; or
- it has a valid manifest, and holds nothing but files that the manifest lists, and folders for them; or
- its name ends in ``.incomplete`` and it has our marker, ``.rl_safe.json``, which says what it may hold.

The marker is the first file of a folder in progress, and is removed when the folder has its final name. When a
checkpoint is removed, its manifest becomes the marker, so that the next run recognises an interrupted removal.

A removal unlinks exactly the files that it listed before, one by one, each in the directory where it was listed. It
follows no link. A file that somebody adds meanwhile stays.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from rl_safe_workers.checkpoint.folders.durable import fsync, temporary_path, write_new
from rl_safe_workers.checkpoint.folders.manifest_facts import MANIFEST, read_manifest_facts
from rl_safe_workers.checkpoint.folders.many_files import at_once
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import MALFORMED, SMALL_BYTES, check_depth, printable, read_foreign

MARKER = ".rl_safe.json"
INCOMPLETE = ".incomplete"
REPLACED = f".replaced{INCOMPLETE}"
STEP_DIR = re.compile(r"global_step_(0|[1-9][0-9]*)(?:(\.replaced)?\.incomplete)?")
_OUR_NAMES = frozenset({MARKER, MANIFEST})


@dataclass(frozen=True, slots=True)
class _Contents:
    """Contents of a folder at any depth, by path relative to it. No link was followed."""

    files: frozenset[str]
    folders: frozenset[str]
    others: frozenset[str]
    """Links, FIFOs, sockets and devices."""


def claim(pending: Path, *, what: str, holds: Sequence[str] | None) -> None:
    """Makes a new folder that is ours from its first moment on. Its parent must exist.

    Args:
        pending: The folder, with a name that ends in ``.incomplete``.
        what: Description of its contents, e.g. ``"a save of step 5"``.
        holds: Names of its future top-level entries, besides a manifest; None: anything, links too.

    Raises:
        OSError: If the name is taken, or the folder cannot be written.
    """
    pending.mkdir()
    mark(pending, what=what, holds=holds)


def mark(folder: Path, *, what: str, holds: Sequence[str] | None) -> None:
    """Puts our marker in a folder; see `claim`. It counts once the name ends in ``.incomplete``.

    Raises:
        OSError: If it has a marker already, or cannot be written.
    """
    fields = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "what": what,
        "holds": None if holds is None else [*holds],
    }
    write_new(folder / MARKER, json.dumps(fields))
    fsync(folder)


def release(folder: Path) -> None:
    """Takes the marker out of a folder that is complete and has its final name."""
    (folder / MARKER).unlink(missing_ok=True)


def why_foreign(folder: Path) -> str | None:
    """Returns why a folder is not ours to remove or replace; None if it is ours or missing. The text follows its name.

    Example: ``"holds notes.txt, which its manifest does not list"``
    """
    try:
        return _why_foreign(folder, _look_through(folder))
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        return str(error.strerror)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def check_ours(folder: Path, *, advice: str) -> None:
    """Refuses a folder that is not ours to replace.

    Args:
        folder: May be missing.
        advice: The alternative to moving the folder away, e.g. ``"choose another place"``.

    Raises:
        CheckpointError: One line, with the name of the folder and what to do.
    """
    if (reason := why_foreign(folder)) is not None:
        raise CheckpointError(f"{printable(str(folder))} {reason}: it is left alone; move it away, or {advice}")


def remove(folder: Path) -> None:
    """Removes a folder that is ours. A half-removed folder never counts as a checkpoint, and is still known as ours.

    Raises:
        CheckpointError: If it is not ours, or if a folder with its temporary name is not ours.
        OSError: If something cannot be removed, or somebody added something meanwhile.
    """
    advice = "remove it yourself"
    check_ours(folder, advice=advice)
    if not os.path.lexists(folder):
        return
    if not folder.name.endswith(INCOMPLETE):
        # If this is interrupted, the next run finds the rest by this name.
        aside = folder.with_name(folder.name + REPLACED)
        remove(aside)
        folder = folder.rename(aside)
    contents = _look_through(folder)
    if (reason := _why_foreign(folder, contents)) is not None:
        raise CheckpointError(f"{printable(str(folder))} {reason}: it is left alone; {advice}")
    if MANIFEST in contents.files:
        (folder / MANIFEST).replace(folder / MARKER)
    _unlink(folder, contents)
    (folder / MARKER).unlink(missing_ok=True)
    folder.rmdir()


def _look_through(folder: Path) -> _Contents:
    if not stat.S_ISDIR((status := folder.lstat()).st_mode):
        what = "is a link" if stat.S_ISLNK(status.st_mode) else "is not a directory"
        raise NotADirectoryError(errno.ENOTDIR, what, str(folder))
    files, folders, others = set[str](), set[str](), set[str]()

    def fail(error: OSError) -> None:
        raise error

    for at, _, _, descriptor in os.fwalk(folder, onerror=fail, follow_symlinks=False):
        prefix = Path(at).relative_to(folder)
        check_depth(len(prefix.parts), folder)
        # A listing says what each entry is. To ask for each of thousands of files takes seconds on a network.
        with os.scandir(descriptor) as entries:
            for entry in entries:
                is_folder, is_file = entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)
                (folders if is_folder else files if is_file else others).add(str(prefix / entry.name))
    return _Contents(frozenset(files), frozenset(folders), frozenset(others))


def _why_foreign(folder: Path, contents: _Contents) -> str | None:
    if not (contents.files or contents.folders or contents.others):
        return None
    is_marked = MARKER in contents.files and folder.name.endswith(INCOMPLETE)
    if is_marked and contents.files == {MARKER} and not contents.folders and not contents.others:
        return None  # the machine stopped before the marker was whole
    marker = _read_marker(folder) if is_marked else None
    if marker is not None and marker["holds"] is None:
        return None
    if MANIFEST in contents.files:
        return _why_unlisted(folder, contents, MANIFEST)
    if marker is not None:
        return _why_unmarked(contents, marker)
    if is_marked:
        return _why_unlisted(folder, contents, MARKER)  # the manifest of a folder that was being removed
    return "is no work in progress of ours" if folder.name.endswith(INCOMPLETE) else f"has no {MANIFEST} of ours"


def _why_unlisted(folder: Path, contents: _Contents, manifest: str) -> str | None:
    try:
        facts = read_manifest_facts(folder, manifest)
    except CheckpointError:
        return f"has no valid {MANIFEST}"
    if (match := STEP_DIR.fullmatch(folder.name)) and int(match[1]) != facts.step:
        return f"has a {MANIFEST} of step {facts.step}"
    listed = {str(parent) for name in facts.files for parent in (PurePosixPath(name), *PurePosixPath(name).parents)}
    if strangers := sorted((contents.files | contents.folders) - listed - _OUR_NAMES):
        return f"holds {printable(strangers[0])}, which its {MANIFEST} does not list"
    return _why_linked(contents)


def _why_unmarked(contents: _Contents, marker: Mapping[str, Any]) -> str | None:
    tops = {PurePosixPath(name).parts[0] for name in contents.files | contents.folders}
    unfinished = temporary_path(Path(MANIFEST)).name
    if strangers := sorted(tops - {*marker["holds"], unfinished} - _OUR_NAMES):
        return f"holds {printable(strangers[0])}, which {printable(marker['what'])} does not"
    return _why_linked(contents)


def _read_marker(folder: Path) -> dict[str, Any] | None:
    """Returns the fields of the marker; None if there is no valid one."""
    from rl_safe_workers.checkpoint.folders.manifest_schema import Marker, complaint

    try:
        fields: dict[str, Any] = json.loads(read_foreign(folder / MARKER, limit_bytes=SMALL_BYTES, within=folder))
    except (OSError, *MALFORMED):
        return None
    return fields if complaint(Marker, fields) is None else None


def _why_linked(contents: _Contents) -> str | None:
    others = sorted(contents.others)
    return f"holds {printable(others[0])}, which is a link or no regular file" if others else None


def _unlink(folder: Path, contents: _Contents) -> None:
    """Removes the listed contents but the marker, deepest first. A directory goes only if it is empty by then."""
    seen: Collection[str] = contents.files | contents.others
    for at, folder_names, file_names, descriptor in os.fwalk(folder, topdown=False, follow_symlinks=False):
        prefix = Path(at).relative_to(folder)
        names = {str(prefix / name): name for name in (*file_names, *folder_names)}
        gone = [name for path, name in names.items() if path in seen and path != MARKER]
        at_once(partial(os.unlink, dir_fd=descriptor), gone)
        for path, name in names.items():
            if path in contents.folders:
                os.rmdir(name, dir_fd=descriptor)
