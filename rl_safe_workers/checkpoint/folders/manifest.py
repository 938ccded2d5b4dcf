"""The manifest, written last, makes a directory a checkpoint.

    default_local_dir/
      latest_checkpointed_iteration.txt    step of the newest complete checkpoint, as verl writes it
      global_step_10/
        manifest.json                      exists only if everything beside it is complete
        dist_ckpt/                         Megatron's torch_dist shards
      global_step_20.incomplete/           a save in progress, or one that failed; never picked up
        .rl_safe.json                      marks it as ours

A directory with a valid manifest is a checkpoint whatever its suffix. A process that dies between the renames of a
commit leaves a checkpoint under its temporary name, and a load finds it there.

The newest checkpoint is the one with the highest serial. A commit takes a serial one above the highest in its
directory. So the order is the order of commits, and depends neither on a clock nor on the step. If a run goes back to
step 10 and saves step 12, this checkpoint is newer than the earlier step 20, and retention removes step 20 first.
Checkpoints of schema 2 have no serial. They count as older than all others, and are sorted by the time of their save.

A checkpoint that was copied here, or forged, may have any serial. The tracker file names the checkpoint that was saved
last. A serial more than one above that checkpoint's serial does not come from this directory. A checkpoint with such a
serial counts as older than all others, and retention leaves it alone.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_safe_workers.checkpoint.folders.manifest_facts import MANIFEST, SCHEMA, read_manifest_json
from rl_safe_workers.checkpoint.folders.many_files import at_once
from rl_safe_workers.checkpoint.folders.ownership import MARKER, STEP_DIR
from rl_safe_workers.checkpoint.folders.step_tracker import read_tracker
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError
from rl_safe_workers.foreign_files import entries_below, printable
from rl_safe_workers.model_files import read_model_json

SHARDS = "dist_ckpt"
OLDEST_SCHEMA = 2
"""Oldest manifest schema that a load accepts."""
_PROBE_BYTES = 64 * 2**10
"""How much of each end of a weight file goes into the fingerprint."""
UNTRACKED_SERIALS = 10**6
"""Highest serial that counts in a directory whose tracker file names no checkpoint of ours."""
_VOLATILE_KEYS = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of ``manifest.json``."""

    schema: int = SCHEMA
    step: int
    serial: int = field(default=0, compare=False)
    """Number of the commit in its directory, see above. The commit sets it; 0 in schema 2 and for conversions."""
    model_fingerprint: str
    """Digest of the model's architecture, see `model_fingerprint`."""
    layout: dict[str, int]
    """Parallel sizes, e.g. ``{"world_size": 4, "tensor": 1, ...}``."""
    saved_at: float
    """Unix time in seconds."""
    versions: dict[str, str]
    files: dict[str, dict[str, Any]]
    """Every file's ``{"bytes": 4096, "digest": "crc32:0a1b2c3d"}``, by path relative to the checkpoint."""
    driver_state: dict[str, Any]
    """The driver's own state: data position."""
    digests: dict[str, str]
    """Digest of each training rank's state, by rank; empty if the save was not asked for digests."""

    @property
    def order(self) -> tuple[int, float, int]:
        """Key that sorts the checkpoints of a directory from the oldest to the newest, see above."""
        return self.serial, self.saved_at, self.step


def model_fingerprint(model_path: str | Path) -> str:
    """Digest of an HF directory: the architecture fields of ``config.json``, and both ends of each weight file.

    The beginning of a safetensors file lists its tensors. The sample of data tells two models of the same shape apart
    without reading hundreds of gigabytes.
    """
    directory = Path(model_path)
    config = read_model_json(directory / "config.json")
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


def file_sizes(directory: Path) -> dict[str, int]:
    """Returns the size in bytes of every file under a directory but manifest and marker, sorted by relative path."""
    left_out = {directory / MANIFEST, directory / MARKER}
    files = sorted(Path(entry.path) for entry in entries_below(directory) if entry.is_file())
    files = [path for path in files if path not in left_out]
    sizes = at_once(os.path.getsize, files)
    return {str(path.relative_to(directory)): size for path, size in zip(files, sizes, strict=True)}


def read_manifest(checkpoint: Path, *, looks_at_files: bool = True) -> Manifest:
    """Reads a checkpoint's manifest and checks that every file it lists is there in full.

    Args:
        checkpoint: The checkpoint.
        looks_at_files: False to leave the files to `check_files` on one rank. If each of a thousand ranks looked at the
            files of all ranks, the file system would have to answer a million times.

    Raises:
        CheckpointError: If the directory is not a complete checkpoint.
    """
    fields = read_manifest_json(checkpoint)
    if fields["schema"] < OLDEST_SCHEMA:
        raise CheckpointError(f"{checkpoint} has a manifest of schema {fields['schema']}, before {OLDEST_SCHEMA}")
    manifest = Manifest(**fields)
    if looks_at_files:
        check_files(checkpoint, manifest)
    return manifest


def check_files(checkpoint: Path, manifest: Manifest) -> None:
    """Checks that every file that a manifest lists is there in full.

    Raises:
        CheckpointError: Naming a file that is not.
    """
    try:
        present = file_sizes(checkpoint)
    except OSError as error:
        raise CheckpointError(f"{printable(str(checkpoint))} cannot be read: {error.strerror or error}") from error
    for name, record in manifest.files.items():
        if present.get(name) != record["bytes"]:
            found = "is missing" if name not in present else f"has {present[name]} bytes"
            raise CheckpointError(
                f"{printable(str(checkpoint))} is damaged: {printable(name)} {found}, {record['bytes']} bytes were "
                "written"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Contents of a directory of checkpoints."""

    complete: list[tuple[Path, Manifest]]
    """Newest first, see above."""
    damaged: list[CheckpointError]
    """One error for each checkpoint that does not match its manifest."""
    highest_serial: int
    """A checkpoint with a higher serial was not saved in this directory, see above."""


def find_checkpoints(root: Path, *, looks_at_files: bool = True) -> Found:
    """Lists the checkpoints in a directory. Skips an entry without a manifest: its save did not finish.

    Args:
        root: The directory.
        looks_at_files: As for `read_manifest`.
    """
    complete: list[tuple[Path, Manifest]] = []
    damaged: list[CheckpointError] = []
    for path, step in _step_dirs(root):
        try:
            manifest = read_manifest(path, looks_at_files=looks_at_files)
            if manifest.step != step:
                where = printable(str(path))
                raise CheckpointError(f"{where} has a {MANIFEST} of step {manifest.step}; use another checkpoint")
            complete.append((path, manifest))
        except CheckpointError as error:
            damaged.append(error)
    highest = _highest_serial(root)
    complete.sort(key=lambda item: (item[1].serial <= highest, item[1].order), reverse=True)
    return Found(complete=complete, damaged=damaged, highest_serial=highest)


def _highest_serial(root: Path) -> int:
    """Returns the highest serial that a checkpoint saved in a directory can have."""
    if (step := read_tracker(root)) is not None:
        try:
            # A commit may have stopped before it wrote the tracker file.
            return int(read_manifest_json(step_dir(root, step)).get("serial", 0)) + 1
        except CheckpointError:
            pass  # the tracker file is another program's, or its checkpoint is gone
    return UNTRACKED_SERIALS


def step_entries(root: Path) -> list[tuple[Path, re.Match[str]]]:
    """Returns each entry of a directory with the name of a checkpoint, and the match of `ownership.STEP_DIR`; sorted.

    Raises:
        CheckpointError: If the directory cannot be read.
    """
    try:
        paths = sorted(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"{printable(str(root))} cannot be read: {error.strerror or error}") from error
    return [(path, match) for path in paths if (match := STEP_DIR.fullmatch(path.name))]


def _step_dirs(root: Path) -> Iterator[tuple[Path, int]]:
    """Yields each entry with the name of a checkpoint that has a manifest, valid or not, and its step."""
    for path, match in step_entries(root):
        if os.path.lexists(path / MANIFEST):
            yield path, int(match[1])


def complete_checkpoints(root: Path) -> list[tuple[Path, Manifest]]:
    """The complete checkpoints of a directory, newest first."""
    return find_checkpoints(root).complete


def last_serial(root: Path) -> int:
    """Returns the highest serial of the checkpoints saved in a directory, complete or not; 0 if none has one."""
    serials, highest = [0], _highest_serial(root)
    for path, _ in _step_dirs(root):
        try:
            serials.append(read_manifest_json(path).get("serial", 0))
        except CheckpointError:
            continue  # the search for checkpoints reports it
    return max(serial for serial in serials if serial <= highest)


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
