"""Adds checkpoints to a directory and removes old ones. Leaves alone what is not ours, see `ownership`.

    start_save → (every rank writes shards) → commit → prune

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Container
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from rl_safe_workers.checkpoint.folders.durable import fsync, write_durably
from rl_safe_workers.checkpoint.folders.manifest import (
    SHARDS,
    Manifest,
    find_checkpoints,
    last_serial,
    read_manifest,
    step_dir,
    step_entries,
)
from rl_safe_workers.checkpoint.folders.manifest_facts import MANIFEST, MAX_SERIAL, check_manifest_json
from rl_safe_workers.checkpoint.folders.ownership import (
    INCOMPLETE,
    REPLACED,
    check_ours,
    claim,
    release,
    remove,
    why_foreign,
)
from rl_safe_workers.checkpoint.folders.step_tracker import check_tracker, write_tracker
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import printable

logger = logging.getLogger(__name__)

_ELSEWHERE = "set trainer.default_local_dir elsewhere"


def check_places(root: Path, step: int) -> None:
    """Refuses to save a step that would replace something that is not ours. Writes nothing.

    Raises:
        CheckpointError: One line, with the name of what is in the way.
    """
    final = step_dir(root, step)
    check_ours(final, advice=_ELSEWHERE)
    check_ours(final.with_name(final.name + INCOMPLETE), advice=_ELSEWHERE)
    if os.path.lexists(final):
        check_ours(final.with_name(final.name + REPLACED), advice=_ELSEWHERE)
    check_tracker(root, advice=_ELSEWHERE)


def start_save(root: Path, step: int) -> None:
    """Makes the ``.incomplete`` directory of a save, with an empty directory for the shards. Settles ``root`` first.

    Call on one rank, while no save is in progress in ``root``.

    Raises:
        CheckpointError: If something that is not ours is in the way, see `check_places`.
        OSError: If it cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    settle(root)
    check_places(root, step)
    pending = step_dir(root, step).with_name(f"global_step_{step}{INCOMPLETE}")
    remove(pending)
    claim(pending, what=f"a save of step {step}", holds=[SHARDS])
    (pending / SHARDS).mkdir()


def commit(pending: Path, manifest: Manifest, *, durable: Container[str] = ()) -> Path:
    """Turns a finished ``.incomplete`` directory into a checkpoint; call on one rank, after all have written.

    Shards are made durable, then the manifest, then the final name, then the tracker file. An older checkpoint of
    the same step is removed only once the new one is complete.

    Args:
        pending: The directory.
        manifest: Describes the directory. This call sets its serial.
        durable: Names of files that their writers have synced already.

    Returns:
        The checkpoint's final path.

    Raises:
        CheckpointError: If something that is not ours has the final name. It stays there, and the checkpoint is
            complete under its temporary name. Also if a load would refuse the manifest.
        OSError: If something cannot be written.
    """
    root, final = pending.parent, step_dir(pending.parent, manifest.step)
    fields = asdict(replace(manifest, serial=min(last_serial(root) + 1, MAX_SERIAL)))
    check_manifest_json(fields, where=printable(str(pending / MANIFEST)))
    for path in sorted(pending.rglob("*")):
        if path.name not in durable:
            fsync(path)
    write_durably(pending / MANIFEST, json.dumps(fields, indent=1, sort_keys=True, allow_nan=False))
    check_ours(final, advice=f"load {pending.name}, which is complete")
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        remove(replaced)
        final.rename(replaced)
    pending.rename(final)
    fsync(root)
    release(final)
    write_tracker(root, manifest.step)
    _remove_or_warn(replaced)
    return final


def settle(root: Path) -> None:
    """Finishes an interrupted commit in a directory, and removes saves that nobody will finish.

    Call on one rank, while no save is in progress there. Leaves alone what is not ours, with one warning.

    Raises:
        CheckpointError: If the directory cannot be read.
        OSError: If something cannot be renamed.
    """
    for path, match in step_entries(root):
        if path.name.endswith(INCOMPLETE):
            if (reason := why_foreign(path)) is not None:
                warn_once(f"{printable(str(path))} {reason}: it is left alone")
            else:
                _settle(path, step_dir(root, int(match[1])), was_replaced=match[2] is not None)
    found = find_checkpoints(root, looks_at_files=False)
    newest, manifest = found.complete[0] if found.complete else (root, None)
    if manifest is not None and manifest.serial == found.highest_serial and _complete(newest) is not None:
        # The last commit stopped before it had named its checkpoint.
        write_tracker(root, manifest.step)


def _settle(pending: Path, final: Path, *, was_replaced: bool) -> None:
    """Finishes or removes one directory, which is ours."""
    found, there = _complete(pending), _complete(final)
    if found is None:
        _remove_or_warn(pending)
    elif (reason := why_foreign(final)) is not None:
        warn_once(f"{printable(str(final))} {reason}: it is left alone, and {pending.name} keeps its name")
    elif (was_replaced and os.path.lexists(final)) or (there is not None and there.order > found.order):
        _remove_or_warn(pending)
    else:
        # The commit stopped at its renames: this directory is the newer of the two.
        remove(final)
        pending.rename(final)
        release(final)


def _complete(checkpoint: Path) -> Manifest | None:
    try:
        return read_manifest(checkpoint)
    except CheckpointError:
        return None


def prune(root: Path, *, keep_last: int, but: Path | None = None) -> list[Path]:
    """Removes all of our complete checkpoints but the newest ``keep_last``; 0 keeps all.

    A checkpoint that is not ours or cannot be removed stays, with one warning: the save before this call is still good.
    Checkpoints that are not ours do not count towards ``keep_last``.

    Args:
        root: Directory of the checkpoints.
        keep_last: Number of checkpoints to keep.
        but: A checkpoint that stays, however old it looks.

    Returns:
        The checkpoints that were removed.
    """
    if not keep_last:
        return []
    found, ours = find_checkpoints(root), list[Path]()
    for error in found.damaged:
        warn_once(f"passed over: {error}")
    for path, manifest in found.complete:
        if manifest.serial > found.highest_serial:
            warn_once(f"{printable(str(path))} was not saved in {printable(str(root))}: it is left alone")
        elif (reason := why_foreign(path)) is not None:
            warn_once(f"{printable(str(path))} {reason}: it is left alone")
        else:
            ours.append(path)
    return [path for path in ours[keep_last:] if path != but and _remove_or_warn(path)]


def _remove_or_warn(checkpoint: Path) -> bool:
    try:
        remove(checkpoint)
    except (CheckpointError, OSError) as error:
        warn_once(f"an old checkpoint cannot be removed: {error}")
        return False
    return True


@cache
def warn_once(text: str) -> None:
    """Logs a warning, unless this process has logged the same before."""
    logger.warning("%s", text)
