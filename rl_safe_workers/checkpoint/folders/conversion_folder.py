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

from rl_safe_workers.checkpoint.folders.durable import write_durably
from rl_safe_workers.checkpoint.folders.manifest import SHARDS, Manifest, check_fingerprint, read_manifest
from rl_safe_workers.checkpoint.folders.manifest_facts import MANIFEST, check_manifest_json, read_manifest_json
from rl_safe_workers.checkpoint.folders.ownership import why_foreign
from rl_safe_workers.checkpoint.folders.publish import check_pending, publish
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError
from rl_safe_workers.foreign_files import entries_below, kind_of, printable
from rl_safe_workers.versions import WRITERS, version_of

logger = logging.getLogger(__name__)

HF_FILES = "huggingface"
"""Sub-directory for the HF directory's small files; verl gives it the same name."""
OURS = (SHARDS, HF_FILES)
"""Entries at the top of a conversion, besides its manifest."""
KEY = "conversion"
"""Key in the manifest's ``driver_state`` that marks a conversion and holds its dtype."""
ADVICE = "choose another place, or overwrite it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedModel:
    """The model and dtype of a conversion, independent of the layout.

    Example: ``ConvertedModel(fingerprint="0123456789abcdef", dtype="bfloat16")``
    """

    fingerprint: str
    """Fingerprint of the HF directory, see `manifest.model_fingerprint`."""
    dtype: str
    """The type of the Megatron model's parameters."""


def lock_path(final: Path) -> Path:
    """The lock of a conversion, beside it."""
    return final.with_name(f"{final.name}.lock")


def converted_dtype(driver_state: Mapping[str, Any]) -> str | None:
    """Returns the dtype of a conversion from its manifest's ``driver_state``; None if this is not a conversion."""
    claim = driver_state.get(KEY)
    dtype = claim.get("dtype") if isinstance(claim, dict) else None
    return dtype if isinstance(dtype, str) else None


def _why_another(final: Path, wanted: ConvertedModel) -> str | None:
    """Returns the reason why this conversion may not replace a directory; None if it may."""
    if (reason := why_foreign(final)) is not None:
        return reason
    try:
        fields = read_manifest_json(final)
    except CheckpointError:
        return None  # an empty directory
    dtype = converted_dtype(fields["driver_state"])
    if dtype is None:
        return "is a checkpoint of a training run"
    there = ConvertedModel(fingerprint=fields["model_fingerprint"], dtype=dtype)
    if there == wanted:
        return None
    return printable(
        f"is a conversion of another model (fingerprint {there.fingerprint} in {there.dtype}, "
        f"this one has {wanted.fingerprint} in {wanted.dtype})"
    )


def find_conversion(final: Path, wanted: ConvertedModel, *, overwrite: bool = False) -> Manifest | None:
    """Looks for a complete conversion. Not collective; writes nothing.

    Args:
        final: Where it would be.
        wanted: The model and dtype.
        overwrite: Whether a conversion may replace something else.

    Returns:
        The manifest of a complete conversion of that model. None if the conversion is missing or truncated and must be
        made.

    Raises:
        CheckpointMismatchError: If something else is at ``final`` and ``overwrite`` is False; the message says what it
            is. Also if something that is not ours has a temporary name that the conversion needs.
    """
    if os.path.lexists(final):
        shown = printable(str(final))
        if not final.is_dir():
            raise CheckpointMismatchError(f"{shown} is not a directory: choose another place")
        if (reason := _why_another(final.resolve(), wanted)) is None:
            try:
                return read_manifest(final)
            except CheckpointError as error:
                logger.warning("the conversion is made again: %s", error)
        if final.is_symlink():
            raise CheckpointMismatchError(f"{shown} is a link: it is left alone; choose another place")
        if reason is not None and not overwrite:
            raise CheckpointMismatchError(f"{shown} {reason}: {ADVICE}")
        if reason is not None:
            logger.info("%s %s; it is overwritten", shown, reason)
    try:
        check_pending(final)
    except CheckpointError as error:
        raise CheckpointMismatchError(str(error)) from error
    return None


def publish_conversion(
    pending: Path,
    final: Path,
    model: ConvertedModel,
    *,
    layout: Mapping[str, int],
    files: dict[str, dict[str, Any]],
    overwrite: bool = False,
) -> None:
    """Gives a finished directory its manifest and its final name. One rank calls it, after all have written.

    Args:
        pending: The directory in progress, with shards and HF files.
        final: Its final name.
        model: The converted model and its dtype.
        layout: Parallel sizes of the conversion, for the record; a load may have any other.
        files: Size and digest of every file in ``pending``, see `Manifest`.
        overwrite: Whether it may replace something else.

    Raises:
        CheckpointError: If something has the final name and may not be replaced.
        OSError: If the manifest or the final name cannot be written.
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
    fields = asdict(manifest)
    check_manifest_json(fields, where=str(pending / MANIFEST))
    write_durably(pending / MANIFEST, json.dumps(fields, indent=1, sort_keys=True))
    publish(pending, final, overwrite=overwrite)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronWeights:
    """Where the weights of a Megatron checkpoint lie."""

    shards: Path
    """Directory of the torch_dist shards."""
    manifest: Manifest | None
    """None for a checkpoint that another program wrote."""

    def check_is_of(self, fingerprint: str | None, *, path: Path) -> None:
        """Refuses a checkpoint whose manifest names another model. Accepts one without a manifest.

        Args:
            fingerprint: Fingerprint of the HF directory that the weights must come from; None accepts any.
            path: The checkpoint, for the error.

        Raises:
            CheckpointMismatchError: Naming both sides.
        """
        if fingerprint is not None and self.manifest is not None:
            check_fingerprint(self.manifest, path=path, fingerprint=fingerprint)


def find_megatron_weights(path: Path, *, looks_at_files: bool = True) -> MegatronWeights:
    """Finds the shards of a conversion, of a training checkpoint, or of a torch_dist directory of another program.

    Args:
        path: The folder.
        looks_at_files: As for `read_manifest`.

    Raises:
        CheckpointError: If the folder has none of these formats, or was written by us and is incomplete.
    """
    # Megatron-core writes this file last (serialization.py:421).
    if not (path / MANIFEST).is_file() and (path / "metadata.json").is_file():
        logger.warning("%s has no %s, so we cannot check that it is complete", path, MANIFEST)
        return MegatronWeights(shards=path, manifest=None)
    return MegatronWeights(shards=path / SHARDS, manifest=read_manifest(path, looks_at_files=looks_at_files))


def own_hf_files(checkpoint: Path) -> Path | None:
    """Returns the folder of a checkpoint with the configuration of its model; None if there is none.

    Raises:
        CheckpointError: If the folder cannot be read, or has a link that leads out of the checkpoint. A caller would
            read and copy the link's target.
    """
    folder = checkpoint / HF_FILES
    try:
        if kind_of(folder / "config.json") != "file":
            return None
        found = [str(folder), *(entry.path for entry in entries_below(folder))]
    except OSError as error:
        raise CheckpointError(f"{printable(str(folder))} cannot be read: {error.strerror}; give model.path") from error
    inside = os.path.realpath(checkpoint)
    for path in found:
        if not Path(os.path.realpath(path)).is_relative_to(inside):
            raise CheckpointError(f"{printable(path)} is a link that leads out of the checkpoint: refused")
    return folder
