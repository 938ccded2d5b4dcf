"""Conversions of HF weights: what a directory holds, and whether it can be used again.

    OUT/
      manifest.json      which model, which dtype, every file with its size; exists only if all is there
      dist_ckpt/         Megatron's torch_dist shards, the model alone, to be loaded under any layout
      huggingface/       configuration and tokenizer of the HF directory
    OUT.incomplete/      a conversion in progress, or one that failed
    OUT.lock             names the process that is converting

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_safe_workers.checkpoint.manifest import (
    MANIFEST,
    SHARDS,
    Manifest,
    check_fingerprint,
    read_manifest,
    write_durably,
)
from rl_safe_workers.checkpoint.publish import publish
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError
from rl_safe_workers.foreign_files import kind_of, printable
from rl_safe_workers.versions import WRITERS, version_of

logger = logging.getLogger(__name__)

HF_FILES = "huggingface"
"""Sub-directory for the HF directory's small files; verl gives it the same name."""
OURS = frozenset({MANIFEST, f"{MANIFEST}.tmp", SHARDS, HF_FILES})
"""What may lie in a conversion; a directory with anything else is someone else's."""
KEY = "conversion"
"""Where the manifest says that it is one, and in which dtype."""
ADVICE = "choose another place, or overwrite it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedModel:
    """What a conversion is of, whatever the layout.

    Example: ``ConvertedModel(fingerprint="0123456789abcdef", dtype="bfloat16")``
    """

    fingerprint: str
    """Of the HF directory, see `manifest.model_fingerprint`."""
    dtype: str
    """Of the Megatron model's parameters."""


def lock_path(final: Path) -> Path:
    """The lock of a conversion, beside it."""
    return final.with_name(f"{final.name}.lock")


def _claim(final: Path) -> ConvertedModel | None:
    """What a directory's manifest says it is, complete or not; None if it says nothing of a conversion."""
    try:
        fields = json.loads((final / MANIFEST).read_text())
        return ConvertedModel(fingerprint=fields["model_fingerprint"], dtype=fields["driver_state"][KEY]["dtype"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _foreign(final: Path, wanted: ConvertedModel) -> str | None:
    """Why a directory is none that this conversion may replace; None if it may."""
    claim, present = _claim(final), {path.name for path in final.iterdir()}
    if claim is not None and claim != wanted:
        return (
            f"is a conversion of another model (fingerprint {claim.fingerprint} in {claim.dtype}, "
            f"this one has {wanted.fingerprint} in {wanted.dtype})"
        )
    if claim is None and (final / MANIFEST).is_file() and _is_readable(final / MANIFEST):
        return "is a checkpoint of a training run"
    if strangers := sorted(present - OURS):
        return f"holds {strangers[0]}, which no conversion writes"
    return None


def _is_readable(manifest: Path) -> bool:
    try:
        return isinstance(json.loads(manifest.read_text()), dict)
    except (OSError, ValueError):
        return False


def find_conversion(final: Path, wanted: ConvertedModel, *, overwrite: bool = False) -> Manifest | None:
    """Looks for a complete conversion. Not collective; writes nothing.

    Args:
        final: Where it would be.
        wanted: The model and dtype.
        overwrite: Whether a conversion may replace something else.

    Returns:
        The manifest of a complete conversion of that model; None if it has to be made: there is none, or one that is
        truncated.

    Raises:
        CheckpointMismatchError: If something else is there, with what it is, unless ``overwrite``.
    """
    if not final.exists():
        return None
    if not final.is_dir():
        raise CheckpointMismatchError(f"{final} is not a directory: choose another place")
    if (reason := _foreign(final, wanted)) is not None:
        if overwrite:
            logger.info("%s %s; it is overwritten", final, reason)
            return None
        raise CheckpointMismatchError(f"{final} {reason}: {ADVICE}")
    try:
        return read_manifest(final)
    except CheckpointError as error:
        logger.warning("the conversion is made again: %s", error)
        return None


def publish_conversion(
    pending: Path,
    final: Path,
    model: ConvertedModel,
    *,
    layout: Mapping[str, int],
    files: dict[str, dict[str, Any]],
) -> None:
    """Gives a finished directory its manifest and its final name. One rank calls it, after all have written.

    Args:
        pending: The directory in progress, with shards and HF files.
        final: Its final name.
        model: What it is of.
        layout: Parallel sizes of the conversion, for the record; a load may have any other.
        files: Size and digest of every file in ``pending``, see `Manifest`.

    Raises:
        OSError: If that cannot be written.
    """
    manifest = Manifest(
        step=0,
        model_fingerprint=model.fingerprint,
        layout=dict(layout),
        saved_at=time.time(),
        versions={name: version_of(name) for name in WRITERS},
        files=files,
        driver_state={KEY: {"dtype": model.dtype}},
        digests={},
    )
    write_durably(pending / MANIFEST, json.dumps(asdict(manifest), indent=1, sort_keys=True))
    publish(pending, final)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronWeights:
    """Where the weights of a Megatron checkpoint lie."""

    shards: Path
    """Directory of the torch_dist shards."""
    manifest: Manifest | None
    """None for a checkpoint that another program wrote."""

    def check_is_of(self, fingerprint: str | None, *, path: Path) -> None:
        """Refuses a checkpoint of another model, as far as its manifest tells.

        Args:
            fingerprint: Of the HF directory that it must be of; None: any.
            path: The checkpoint, for the error.

        Raises:
            CheckpointMismatchError: Naming both sides.
        """
        if fingerprint is not None and self.manifest is not None:
            check_fingerprint(self.manifest, path=path, fingerprint=fingerprint)


def find_megatron_weights(path: Path) -> MegatronWeights:
    """Finds the shards of a conversion, of a training checkpoint, or of a torch_dist directory of another program.

    Raises:
        CheckpointError: If it is none of these, or ours and not complete.
    """
    # Megatron-core writes this file last (serialization.py:421).
    if not (path / MANIFEST).is_file() and (path / "metadata.json").is_file():
        logger.warning("%s has no %s: that it is complete cannot be checked", path, MANIFEST)
        return MegatronWeights(shards=path, manifest=None)
    return MegatronWeights(shards=path / SHARDS, manifest=read_manifest(path))


def own_hf_files(checkpoint: Path) -> Path | None:
    """The folder of a checkpoint with the configuration of its model; None if there is none.

    Raises:
        CheckpointError: If it cannot be read, or has a link that leads out of the checkpoint: what lies there would be
            read and copied.
    """
    folder = checkpoint / HF_FILES
    try:
        if kind_of(folder / "config.json") != "file":
            return None
    except OSError as error:
        raise CheckpointError(f"{printable(str(folder))} cannot be read: {error.strerror}; give model.path") from error
    inside = os.path.realpath(checkpoint)
    found = [folder, *(Path(at) / name for at, folders, files in os.walk(folder) for name in (*folders, *files))]
    for path in found:
        if not Path(os.path.realpath(path)).is_relative_to(inside):
            raise CheckpointError(f"{printable(str(path))} is a link that leads out of the checkpoint: refused")
    return folder
