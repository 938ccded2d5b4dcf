"""Reads the small files of an HF model folder: its JSON files, and the headers of its weight files.

The folder is not trusted. Every read has a size limit, every offset is checked, and a file name may not lead out of the
folder. Links are followed, because the Hub's cache consists of links.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_safe_workers.errors import ModelError
from rl_safe_workers.foreign_files import open_foreign, read_json

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHT_INDEX = "model.safetensors.index.json"
_SETTINGS_BYTES = 2**24
_INDEX_BYTES = 2**25
"""Size limit of a weight index and of a header. The index of a model with 10^12 parameters has about 15 MB."""
_MOST_STOP_TOKENS = 1_000
_MOST_TOKEN_ID = 2**31
_LENGTH = struct.Struct("<Q")
_BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits per element of each safetensors dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """The entry of one tensor in a safetensors header.

    Example: ``TensorEntry(dtype="BF16", shape=(128, 64), start=0, stop=16384)``
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset in bytes of the tensor's first byte, from the end of the header."""
    stop: int
    """Offset in bytes after the tensor's last byte, from the end of the header."""


def read_model_json(path: Path, *, limit_bytes: int = _SETTINGS_BYTES) -> dict[str, Any]:
    """Reads one JSON object.

    Args:
        path: The file, e.g. ``config.json``.
        limit_bytes: Largest size in bytes that is read.

    Raises:
        ModelError: If the file does not exist, is not a regular file, is too large, or is not a JSON object.
    """
    try:
        content = read_json(path, limit_bytes=limit_bytes)
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; give a directory in Hugging Face layout") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}; download the model again") from error
    except ValueError as error:
        raise ModelError(f"{path} cannot be read: {error}; download the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a JSON object; download the model again")
    return content


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """Returns the name of the file that holds each weight, from the folder's index; None without an index.

    Raises:
        ModelError: If the index is malformed, or names a file that is not directly in the folder.
    """
    path = folder / WEIGHT_INDEX
    if not path.exists():
        return None
    weight_map = read_model_json(path, limit_bytes=_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map; download the model again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{path}: weight {name:.100} is in {file!r:.100}, which is no safetensors file of this folder; "
                "download the model again"
            )
    return weight_map


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Returns the tensor entries in the header of a safetensors file. It is as strict as the safetensors library.

    Raises:
        ModelError: If the file cannot be read, or if the tensors do not fill it without gaps or overlaps.
    """
    try:
        with open_foreign(path) as file:
            length = _header_bytes(file.read(_LENGTH.size))
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_unique)
            data_bytes = path.stat().st_size - _LENGTH.size - length
        entries = _entries(header)
        _check_offsets(entries, data_bytes)
    except (OSError, RecursionError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelError(f"{path} cannot be read as safetensors: {reason!s:.300}; download the model again") from error
    return entries


def stop_token_ids(folder: Path) -> list[int]:
    """Returns the end-of-sequence token ids of the model's configuration, sorted.

    Raises:
        ModelError: If a file cannot be read, or an id is not a valid token id.
    """
    found: set[int] = set()
    for path in (folder / GENERATION_CONFIG, folder / CONFIG):
        if not path.exists():
            continue
        value = read_model_json(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if len(ids) > _MOST_STOP_TOKENS or not all(_is_token_id(token) for token in ids):
            raise ModelError(f"{path}: eos_token_id cannot be {value!r:.80}; it takes a token id or a list of them")
        found |= set(ids)
    return sorted(found)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_TOKEN_ID


def _header_bytes(first: bytes) -> int:
    if len(first) < _LENGTH.size:
        raise ValueError("it is shorter than a header")
    (length,) = _LENGTH.unpack(first)
    if length > _INDEX_BYTES:
        raise ValueError(f"its header has {length} bytes, more than {_INDEX_BYTES}")
    return int(length)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header has a name twice")
    return found


def _entries(header: object) -> dict[str, TensorEntry]:
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    entries = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        try:
            entries[name] = _entry(fields)
        except ValueError as error:
            raise ValueError(f"tensor {name!r:.100} {error}") from None
    return entries


def _entry(fields: Any) -> TensorEntry:
    shape: Any = fields.get("shape") if isinstance(fields, dict) else None
    offsets: Any = fields.get("data_offsets") if isinstance(fields, dict) else None
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError("has no shape and two data_offsets of whole numbers")
    dtype = str(fields.get("dtype"))
    if dtype not in _BITS:
        raise ValueError(f"has dtype {dtype!r:.40}, which safetensors does not know")
    start, stop = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (stop - start):
        raise ValueError(f"of shape {shape!s:.80} takes {bits // 8} bytes, but its data_offsets are {start} and {stop}")
    return TensorEntry(dtype=dtype, shape=tuple(shape), start=start, stop=stop)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**63 for size in values
    )


def _check_offsets(entries: Mapping[str, TensorEntry], data_bytes: int) -> None:
    """Raises ValueError unless the tensors follow each other without gaps or overlaps to the end of the file."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ValueError(f"tensor {name!r:.100} begins at byte {entry.start}, and what is before it ends at {end}")
        end = entry.stop
    if end != data_bytes:
        raise ValueError(f"its tensors take {end} bytes, but it has {data_bytes}: is it cut off?")
