"""Makes the manifest of a save from what its ranks have written."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_safe_workers.checkpoint.folders.manifest import Manifest
from rl_safe_workers.checkpoint.save.writer import WrittenFile, file_records
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.versions import WRITERS, version_of


def check_driver_state(driver_state: Mapping[str, Any]) -> None:
    """Refuses a driver's state that JSON cannot keep.

    Raises:
        CheckpointError: If it is not fit for JSON.
    """
    try:
        json.dumps(driver_state, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"driver_state cannot be saved as JSON: {error}; give numbers, texts and lists"
        ) from error


def make_manifest(
    pending: Path,
    files: Mapping[str, WrittenFile],
    digests: Sequence[str],
    step: int,
    fingerprint: str,
    layout: Mapping[str, int],
    driver_state: dict[str, Any],
) -> Manifest:
    """Describes a finished directory. Takes the ranks' own reports of their files, and reads the few other files."""
    return Manifest(
        step=step,
        model_fingerprint=fingerprint,
        layout=dict(layout),
        saved_at=time.time(),
        versions={name: version_of(name) for name in WRITERS},
        files=file_records(pending, files),
        driver_state=driver_state,
        digests={str(rank): digest for rank, digest in enumerate(digests) if digest},
    )
