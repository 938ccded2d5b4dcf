"""What the audit takes from a manifest of any schema that was ever written, however damaged the checkpoint.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rl_safe_workers.checkpoint.manifest import MANIFEST, read_manifest_json
from rl_safe_workers.checkpoint.unpickle import MALFORMED
from rl_safe_workers.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a manifest says of a file."""

    bytes: int
    digest: str | None
    """``"crc32:0a1b2c3d"``; None in schema 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFacts:
    """What the audit needs of a manifest."""

    schema: int
    step: int
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    files: Mapping[str, FileFacts]
    """By path relative to the checkpoint."""


def read_manifest_facts(checkpoint: Path) -> ManifestFacts:
    """Reads what the audit needs of a checkpoint's manifest, whether or not the files that it lists are there.

    Raises:
        CheckpointError: If it is missing, malformed or of a newer schema.
    """
    fields = read_manifest_json(checkpoint)
    try:
        return ManifestFacts(
            schema=fields["schema"],
            step=fields["step"],
            layout=dict(fields["layout"]),
            versions=dict(fields["versions"]),
            files={_inside(name): _file(facts) for name, facts in fields["files"].items()},
        )
    except MALFORMED as error:
        raise CheckpointError(f"{checkpoint / MANIFEST} is malformed: {error!r}; take another checkpoint") from error


def _inside(name: str) -> str:
    if not name or name.startswith("/") or ".." in PurePosixPath(name).parts or "\0" in name:
        raise ValueError(f"file {name!r} is outside the checkpoint")
    return name


def _file(facts: Any) -> FileFacts:
    if isinstance(facts, int):
        return FileFacts(facts, None)
    digest = str(facts["digest"])
    if not digest.startswith("crc32:"):
        raise ValueError(f"digest {digest!r} is of no known kind")
    return FileFacts(int(facts["bytes"]), digest)
