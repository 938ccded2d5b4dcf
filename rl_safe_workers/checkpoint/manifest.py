"""What makes a directory a checkpoint: a manifest, written last.

    default_local_dir/
      latest_checkpointed_iteration.txt    step of the newest complete checkpoint, as verl writes it
      global_step_10/
        manifest.json                      exists only if everything beside it is complete
        dist_ckpt/                         Megatron's torch_dist shards
      global_step_20.incomplete/           a save in progress, or one that failed; never picked up

A directory with a valid manifest is a checkpoint whatever its suffix: a process that dies between the renames of a
commit leaves one under its temporary name, and it is found there.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Container
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_safe_workers.checkpoint.unpickle import MALFORMED
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError

logger = logging.getLogger(__name__)

SCHEMA = 2
"""Version of the manifest. 1 had sizes of files and no digests."""
MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
SHARDS = "dist_ckpt"
INCOMPLETE = ".incomplete"
REPLACED = f".replaced{INCOMPLETE}"
_STEP_DIR = re.compile(r"global_step_(\d+)(\.replaced)?(\.incomplete)?$")
_PROBE_BYTES = 64 * 2**10
"""How much of each end of a weight file goes into the fingerprint."""
_VOLATILE_KEYS = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of ``manifest.json``."""

    schema: int = SCHEMA
    step: int
    model_fingerprint: str
    """Digest of the model's architecture, see `model_fingerprint`."""
    layout: dict[str, int]
    """Parallel sizes, e.g. ``{"world_size": 4, "tensor": 1, ...}``."""
    saved_at: float
    """Unix time in seconds."""
    versions: dict[str, str]
    files: dict[str, dict[str, Any]]
    """Of every file, by path relative to the checkpoint: ``{"bytes": 4096, "digest": "crc32:0a1b2c3d"}``."""
    driver_state: dict[str, Any]
    """The driver's own state: data position."""
    digests: dict[str, str]
    """Digest of each training rank's state, by rank, if it was asked for."""


def model_fingerprint(model_path: str | Path) -> str:
    """Digest of a HF directory: what of ``config.json`` makes the architecture, and both ends of each weight file.

    The beginning of a safetensors file lists its tensors; a sample of the data tells one model's weights from
    another's of the same shape without reading hundreds of gigabytes.
    """
    directory = Path(model_path)
    config = json.loads((directory / "config.json").read_text())
    kept = {k: v for k, v in config.items() if k not in _VOLATILE_KEYS}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_PROBE_BYTES))
            file.seek(max(0, size - _PROBE_BYTES))
            digest.update(file.read(_PROBE_BYTES))
    return digest.hexdigest()[:16]


def step_dir(root: Path, step: int) -> Path:
    """Final path of a step's checkpoint."""
    return root / f"global_step_{step}"


def fsync(path: Path) -> None:
    """Makes a file's contents, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Replaces a file atomically and durably: after a crash it has its old or its new contents."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    fsync(temporary)
    temporary.rename(path)
    fsync(path.parent)


def file_sizes(directory: Path) -> dict[str, int]:
    """Size in bytes of every file under a directory, by relative path, sorted; the manifest itself left out."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): p.stat().st_size for p in files if p.name != MANIFEST}


def commit(pending: Path, manifest: Manifest, *, durable: Container[str] = ()) -> Path:
    """Turns a finished ``.incomplete`` directory into a checkpoint; call on one rank, after all have written.

    Shards are made durable, then the manifest, then the final name, then the tracker file. An older checkpoint of
    the same step gives way only once the new one is complete.

    Args:
        pending: The directory.
        manifest: What it holds.
        durable: Names of files that whoever wrote them has synced already.

    Returns:
        The checkpoint's final path.
    """
    for path in sorted(pending.rglob("*")):
        if path.name not in durable:
            fsync(path)
    write_durably(pending / MANIFEST, json.dumps(asdict(manifest), indent=1, sort_keys=True))
    root, final = pending.parent, step_dir(pending.parent, manifest.step)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        final.rename(replaced)
    pending.rename(final)
    fsync(root)
    write_durably(root / TRACKER, str(manifest.step))
    if replaced.exists():
        remove(replaced)
    return final


def read_manifest_json(checkpoint: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint, of any schema up to ours, without looking at the files that it lists.

    Raises:
        CheckpointError: If there is none, or it is malformed or of a newer schema.
    """
    path = checkpoint / MANIFEST
    try:
        fields = json.loads(path.read_bytes())
        schema = fields.setdefault("schema", 1)
        is_newer = schema > SCHEMA
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} is not a complete checkpoint: it has no {MANIFEST}") from None
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}; take another checkpoint") from error
    if is_newer:
        raise CheckpointError(
            f"{checkpoint} was written by a newer rl_safe_workers (manifest schema {schema}, this one reads up to "
            f"{SCHEMA}): upgrade to load it"
        )
    return dict(fields)


def read_manifest(checkpoint: Path) -> Manifest:
    """Reads a checkpoint's manifest and checks that every file it lists is there in full.

    Raises:
        CheckpointError: If the directory is not a complete checkpoint.
    """
    fields = read_manifest_json(checkpoint)
    if fields["schema"] != SCHEMA:
        raise CheckpointError(f"{checkpoint} has a manifest of schema {fields['schema']}, before {SCHEMA}")
    try:
        manifest = Manifest(**fields)
        written = {name: record["bytes"] for name, record in manifest.files.items()}
    except MALFORMED as error:
        raise CheckpointError(f"{checkpoint / MANIFEST} is malformed: {error!r}; take another checkpoint") from error
    present = file_sizes(checkpoint)
    for name, size in written.items():
        if present.get(name) != size:
            found = "is missing" if name not in present else f"has {present[name]} bytes"
            raise CheckpointError(f"{checkpoint} is damaged: {name} {found}, {size} bytes were written")
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a directory of checkpoints holds."""

    complete: list[tuple[Path, Manifest]]
    """Newest first, by the time of their save."""
    damaged: list[CheckpointError]
    """One for each that has a manifest but is not what it says."""


def find_checkpoints(root: Path) -> Found:
    """Looks through a directory of checkpoints. What has no manifest is passed over: a save that did not finish."""
    complete: list[tuple[Path, Manifest]] = []
    damaged: list[CheckpointError] = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if _STEP_DIR.match(path.name) and (path / MANIFEST).is_file():
            try:
                complete.append((path, read_manifest(path)))
            except CheckpointError as error:
                damaged.append(error)
    return Found(complete=sorted(complete, key=lambda item: item[1].saved_at, reverse=True), damaged=damaged)


def complete_checkpoints(root: Path) -> list[tuple[Path, Manifest]]:
    """The complete checkpoints of a directory, newest first."""
    return find_checkpoints(root).complete


def settle(root: Path) -> None:
    """Finishes what an interrupted commit left in a directory, and removes what no save will finish.

    Call on one rank, while no save is in progress there.
    """
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if (match := _STEP_DIR.match(path.name)) and path.suffix == INCOMPLETE:
            final = step_dir(root, int(match[1]))
            is_complete = (path / MANIFEST).is_file()
            if is_complete and match[2] is None and final.exists():
                # The commit had come to its renames: this is the newer of the two.
                remove(final)
            if is_complete and not final.exists():
                path.rename(final)
            else:
                remove(path)


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint; its manifest goes first, so that half of one is never taken for a whole."""
    if checkpoint.suffix != INCOMPLETE:
        # Under a name by which `settle` finds what is left if this is interrupted.
        leftover = checkpoint.with_name(checkpoint.name + REPLACED)
        if leftover.exists():
            shutil.rmtree(leftover)
        checkpoint = checkpoint.rename(leftover)
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def prune(root: Path, *, keep_last: int, but: Path | None = None) -> list[Path]:
    """Removes all but the newest ``keep_last`` complete checkpoints; 0 keeps all. Returns what was removed.

    ``but`` stays, however old it looks: the one just committed, by a clock that may be behind that of the run before.

    What cannot be removed stays, with a warning: the save that this follows is good all the same.
    """
    removed = []
    for path, _ in complete_checkpoints(root)[keep_last:] if keep_last else ():
        if path == but:
            continue
        try:
            remove(path)
        except OSError as error:
            logger.warning("an old checkpoint cannot be removed: %s", error)
        else:
            removed.append(path)
    return removed


def check_fingerprint(manifest: Manifest, *, path: Path, fingerprint: str) -> None:
    """Refuses a checkpoint of another model.

    Raises:
        CheckpointMismatchError: Naming both sides.
    """
    if manifest.model_fingerprint != fingerprint:
        raise CheckpointMismatchError(
            f"{path} is a checkpoint of another model (fingerprint {manifest.model_fingerprint}, model.path has "
            f"{fingerprint}): set model.path to the model it was trained from, or trainer.default_local_dir elsewhere"
        )
