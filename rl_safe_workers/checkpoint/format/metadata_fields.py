"""Turns a ``.metadata`` file into JSON: the part of reading an index that runs in a bounded child.

    {"tensors": [[key, dtype, shape, [[offsets, sizes, place], ...]], ...],
     "objects": [[key, place], ...],
     "unclaimed": [text, ...]}

A place is ``[file, offset, length]``, or None. Only the kinds of records are checked here; `index` checks the fields.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_safe_workers.checkpoint.format.gc_pause import gc_paused
from rl_safe_workers.checkpoint.format.unpickle import Record, read_metadata_record
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import MALFORMED, TEXT_CHARACTERS, described, printable

Place = tuple[Any, Any, Any]
_Places = dict[tuple[Any, Any], Place]


def read_fields(path: str, root: str) -> bytes:
    """Returns `fields_of` as JSON."""
    try:
        with gc_paused():
            return json.dumps(fields_of(Path(path), Path(root)), check_circular=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _malformed(Path(path), error) from error


def fields_of(path: Path, root: Path) -> dict[str, Any]:
    """Reads a file of metadata; see above.

    Args:
        path: The file.
        root: The checkpoint, in which it must be.

    Raises:
        UnsafeCheckpointError: If it asks for a class that no checkpoint needs.
        CheckpointError: If it is missing or malformed.
    """
    record = read_metadata_record(path, within=root)
    tensors, objects = [], []
    try:
        fields = _fields(record, "Metadata", "MCoreMetadata")
        places, unclaimed = _places(fields["storage_data"])
        for key, described_as in _mapping(fields["state_dict_metadata"]).items():
            if type(described_as).__name__ == "BytesStorageMetadata":
                objects.append([key, places.pop((key, None), None)])
            else:
                tensors.append([key, *_tensor(key, _fields(described_as, "TensorStorageMetadata"), places)])
        unclaimed += [_shown(key, offset) for key, offset in places]
    except MALFORMED as error:
        raise _malformed(path, error) from error
    return {"tensors": tensors, "objects": objects, "unclaimed": unclaimed}


def _malformed(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{printable(str(path))} is malformed ({described(error)}); use another one")


def _shown(key: Any, offset: Any) -> str:
    return printable(f"{key} at {offset}"[:TEXT_CHARACTERS])


def _places(storage: Any) -> tuple[_Places, list[str]]:
    """Returns places by key and chunk offset (None for an object), and descriptions of places that occur twice."""
    places: _Places = {}
    twice: list[str] = []
    for index, info in _mapping(storage).items():
        at, stored = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        if stored.get("transform_descriptors"):
            raise TypeError(f"{at['fqn']} is stored through transforms {stored['transform_descriptors']}")
        place = stored["relative_path"], stored["offset"], stored["length"]
        key = at["fqn"], at.get("offset")
        if places.setdefault(key, place) is not place:
            twice.append(f"{_shown(*key)} a second time")
    return places, twice


def _tensor(key: Any, fields: Mapping[str, Any], places: _Places) -> tuple[Any, Any, list[Any]]:
    chunks = []
    for chunk in fields["chunks"]:
        at = _fields(chunk, "ChunkStorageMetadata")
        chunks.append((at["offsets"], at["sizes"], places.pop((key, at["offsets"]), None)))
    # TensorProperties pickles as a tuple that starts with its dtype (torch's checkpoint/metadata.py:55).
    return _fields(fields["properties"], "TensorProperties")["state"][0], fields["size"], chunks


def _fields(record: object, *kinds: str) -> dict[str, Any]:
    """Returns the fields of a record, after a check of its kind: a pickle may put anything anywhere."""
    if not isinstance(record, Record) or type(record).__name__ not in kinds:
        raise TypeError(f"{type(record).__name__} in the place of {kinds[0]}")
    return vars(record)


def _mapping(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} in the place of a dict")
    return value
