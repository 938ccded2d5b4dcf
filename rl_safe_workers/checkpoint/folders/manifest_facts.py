"""Reads manifests of every schema so far, even in a damaged checkpoint.

Somebody else may have made a manifest. So the reader limits its size, and follows no link out of the checkpoint. It
accepts a manifest only if every type, range and path in it is sane (`manifest_schema`).

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import MALFORMED, printable, read_foreign

SCHEMA = 3
"""Version of the manifest. 1 had sizes of files and no digests, 2 had no serial."""
MANIFEST = "manifest.json"
MAX_SERIAL = 10**9
"""No directory sees a billion saves: a manifest with a higher serial is not valid."""
MAX_FILES = 2**18
"""Most files of a manifest. Each rank writes one file, and there are a few more: 131,072 ranks need half of this."""
MANIFEST_BYTES = 40 * 2**20
"""Size limit of a manifest: `MAX_FILES` at 160 bytes each. A shard's name, size and digest take 100."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A manifest's record of a file."""

    bytes: int
    digest: str | None
    """``"crc32:0a1b2c3d"``; None in schema 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFacts:
    """The facts of a manifest that the audit needs."""

    schema: int
    step: int
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    files: Mapping[str, FileFacts]
    """By path relative to the checkpoint."""


def read_manifest_json(checkpoint: Path, name: str = MANIFEST) -> dict[str, Any]:
    """Reads a manifest of any schema up to ours and checks it, without looking at the files that it lists.

    Args:
        checkpoint: The directory.
        name: File name of the manifest.

    Raises:
        CheckpointError: If there is none, or it is malformed, not sane or of a newer schema. The error is one line.
    """
    path, shown = checkpoint / name, printable(str(checkpoint / name))
    try:
        fields = _parse(read_foreign(path, limit_bytes=MANIFEST_BYTES, within=checkpoint))
    except FileNotFoundError:
        raise CheckpointError(f"{shown[: -len(name) - 1]} is not a complete checkpoint: it has no {name}") from None
    except OSError as error:
        raise CheckpointError(f"{shown} cannot be read: {error.strerror or error}; use another checkpoint") from error
    except MALFORMED as error:
        raise CheckpointError(f"{shown} cannot be read: {printable(repr(error))}; use another checkpoint") from error
    schema = fields.setdefault("schema", 1)
    if isinstance(schema, int) and schema > SCHEMA:
        raise CheckpointError(
            f"{shown[: -len(name) - 1]} was written by a newer rl_safe_workers (manifest schema {str(schema)[:20]}, "
            f"this one reads up to {SCHEMA}): upgrade to load it"
        )
    check_manifest_json(fields, where=shown)
    return fields


def check_manifest_json(fields: Mapping[str, Any], *, where: str) -> None:
    """Refuses a manifest with a type, range or path that no save writes.

    Args:
        fields: The manifest as JSON has it.
        where: Its path, for the error.

    Raises:
        CheckpointError: With the first thing that is wrong.
    """
    from rl_safe_workers.checkpoint.folders.manifest_schema import manifest_complaint

    # Check the numbers of entries before the entries themselves.
    for name, section in fields.items():
        if isinstance(section, Mapping) and len(section) > MAX_FILES:
            raise CheckpointError(
                f"{where} is malformed: {printable(name[:200])} has more than {MAX_FILES} entries; "
                "use another checkpoint"
            )
    if (wrong := manifest_complaint(fields)) is not None:
        raise CheckpointError(f"{where} is malformed: {wrong}; use another checkpoint")


def _parse(text: bytes) -> dict[str, Any]:
    fields = json.loads(text, parse_constant=_refuse)
    if not isinstance(fields, dict):
        raise TypeError(f"a {type(fields).__name__}, not an object")
    return fields


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def read_manifest_facts(checkpoint: Path, name: str = MANIFEST) -> ManifestFacts:
    """Reads what the audit needs of a checkpoint's manifest, whether or not the files that it lists are there.

    Args:
        checkpoint: The directory.
        name: File name of the manifest.

    Raises:
        CheckpointError: If it is missing, malformed, not sane or of a newer schema.
    """
    fields = read_manifest_json(checkpoint, name)
    return ManifestFacts(
        schema=fields["schema"],
        step=fields["step"],
        layout=fields["layout"],
        versions=fields["versions"],
        files={path: _file(facts) for path, facts in fields["files"].items()},
    )


def _file(facts: Any) -> FileFacts:
    return FileFacts(facts, None) if isinstance(facts, int) else FileFacts(facts["bytes"], facts["digest"])
