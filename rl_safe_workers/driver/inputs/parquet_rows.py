"""Reads the rows of an untrusted parquet file.

A few kilobytes of parquet can decode to any amount of data, and a malformed footer can crash the library. Therefore a
child process with limits decodes the file, some row groups at a time, and returns plain Arrow batches.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rl_safe_workers.bounded_child import Limits, call_bounded
from rl_safe_workers.errors import DataError, first_line
from rl_safe_workers.foreign_files import hole_bytes, open_foreign, printable

_BATCH_ROWS = 256
_FREE_BYTES = 2**28
"""Bytes of memory that the rows of every file may take, however small the file."""
_BYTES_PER_FILE_BYTE = 32
"""Bytes of memory that the rows may take for each byte of the file, on top of ``_FREE_BYTES``."""
_LIBRARY_BYTES = 3 * 2**28
"""Bytes of address space that the library and its decoding take, on top of the rows."""
_CPU_S = 20
_ANSWER_BYTES = 2**26
"""Size in bytes from which an answer is sent without a further row group."""
_OBJECT_BYTES = 64
_DICT_BYTES = 240
_SHOWN_COLUMNS = 20


def read_rows(file: Path, *, required: Sequence[str], optional: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a parquet file, as dictionaries of the named columns.

    The size of the file limits memory and time. Only the named columns are decoded.

    Args:
        file: The file.
        required: Columns that the file must have.
        optional: Columns that are read if the file has them.

    Raises:
        DataError: If the file cannot be read, lacks a column, or decodes to more than its size allows.
    """
    subject = printable(f"data.train_files: {file}")
    left = _allowed_bytes(file)
    limits = Limits(memory_bytes=2 * left + _LIBRARY_BYTES, cpu_s=_CPU_S, wall_s=None, answer_bytes=2 * left)
    first, groups = 0, 1
    while first < groups:
        columns = {"required": [*required], "optional": [*optional]}
        arguments = {"file": str(file.absolute()), "first": first, "most": left, **columns}
        answer = call_bounded(decode_here, arguments, limits=limits, subject=subject, failure=DataError)
        with pa.ipc.open_stream(answer) as stream:
            first, groups, taken = (int(stream.schema.metadata[key]) for key in (b"next", b"groups", b"taken"))
            left -= taken
            for batch in stream:
                yield from _to_dicts(batch, subject)


def _to_dicts(batch: pa.RecordBatch, subject: str) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (OverflowError, ValueError) as error:  # a date that Python cannot hold, a struct with a field twice
        raise DataError(f"{subject} has a value that cannot be read: {first_line(error):.300}") from error
    return rows


def _allowed_bytes(file: Path) -> int:
    """Returns the bytes of memory that the rows of a file may take. Holes in the file do not count."""
    try:
        with open_foreign(file) as opened:
            size = opened.seek(0, io.SEEK_END)
            return _FREE_BYTES + _BYTES_PER_FILE_BYTE * (size - hole_bytes(opened, 0, size))
    except OSError as error:
        raise DataError(f"data.train_files: {file!s:.200} cannot be read: {error.strerror or error}") from error


def decode_here(file: str, first: int, most: int, required: list[str], optional: list[str]) -> bytes:
    """Decodes row groups; runs in the child process of `read_rows`.

    Args:
        file: The file.
        first: Index of the first row group to decode.
        most: Bytes of memory that the rows may take.
        required: As for `read_rows`.
        optional: As for `read_rows`.

    Returns:
        An Arrow stream. Its metadata holds the index of the next row group (``next``), the number of row groups
        (``groups``), and the bytes of memory taken (``taken``).

    Raises:
        DataError: As `read_rows`.
    """
    subject = f"data.train_files: {file}"
    try:
        with open_foreign(Path(file)) as opened:
            parquet = pq.ParquetFile(opened)
            columns = _columns(parquet.schema_arrow.names, required, optional, subject)
            return _decode(parquet, columns, first, most, subject)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, MemoryError):
            raise
        raise DataError(f"{subject} cannot be read as parquet: {first_line(error):.300}") from error


def _columns(names: Sequence[str], required: Sequence[str], optional: Sequence[str], subject: str) -> list[str]:
    if missing := [name for name in required if name not in names]:
        more = f" and {len(names) - _SHOWN_COLUMNS} more" if len(names) > _SHOWN_COLUMNS else ""
        shown = ", ".join(f"{name:.40}" for name in names[:_SHOWN_COLUMNS])
        raise DataError(f"{subject} lacks column {', '.join(missing)}; it has {shown}{more}")
    columns = [name for name in (*required, *optional) if name in names]
    if twice := [name for name in columns if names.count(name) > 1]:
        raise DataError(f"{subject} has column {twice[0]} more than once; keep one of them")
    return columns


def _decode(parquet: pq.ParquetFile, columns: list[str], first: int, most: int, subject: str) -> bytes:
    batches: list[pa.RecordBatch] = []
    taken, size, group = 0, 0, first
    while group < parquet.num_row_groups and size < _ANSWER_BYTES:
        for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
            arrays = [_plain(batch.column(name), f"{subject} has column {name}") for name in columns]
            plain = pa.RecordBatch.from_arrays(arrays, names=columns)
            plain.validate(full=True)
            taken += plain.num_rows * _DICT_BYTES + sum(map(_object_bytes, plain.columns))
            if taken > most:
                raise DataError(
                    f"{subject} decodes to over {most // 2**20} MiB, which is out of proportion to its size; write it "
                    "anew without columns and repetitions that no prompt needs"
                )
            batches.append(plain)
            size += plain.nbytes
        group += 1
    facts = {"next": str(group), "groups": str(parquet.num_row_groups), "taken": str(taken)}
    schema = batches[0].schema if batches else pa.schema([])
    with pa.BufferOutputStream() as output:
        with pa.ipc.new_stream(output, schema.with_metadata(facts)) as stream:
            for plain in batches:
                stream.write_batch(plain)
        return bytes(output.getvalue())


def _plain(column: pa.Array, subject: str) -> pa.Array:
    decoded = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    if not _is_plain(decoded.type):
        raise DataError(f"{subject} of type {decoded.type!s:.100}, which is not read; write it as plain values")
    return decoded


def _is_plain(kind: pa.DataType) -> bool:
    """Returns True if a type stores each value separately, so that repeated values cannot blow up when decoded."""
    if pa.types.is_struct(kind):
        return all(_is_plain(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_plain(kind.value_type)
    plain = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_one(kind) for is_one in plain) or _is_number(kind)


def _is_number(kind: pa.DataType) -> bool:
    # With a time zone, Python would look up a file by the zone's name, which is not trusted.
    is_primitive = pa.types.is_primitive(kind) and not (pa.types.is_timestamp(kind) and kind.tz is not None)
    return bool(is_primitive) or pa.types.is_null(kind) or pa.types.is_decimal(kind)


def _object_bytes(array: pa.Array) -> int:
    """Estimates the bytes of memory that an array takes as Python objects."""
    kind = array.type
    if pa.types.is_struct(kind):
        return len(array) * _DICT_BYTES + sum(map(_object_bytes, array.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return len(array) * _OBJECT_BYTES + _object_bytes(array.flatten())
    text = 0 if _is_number(kind) else int(pc.sum(pc.binary_length(array)).as_py() or 0)
    return len(array) * _OBJECT_BYTES + text
