"""Rows of a parquet file that somebody else may have made.

A few kilobytes of parquet can decode to any amount of data, and a malformed footer can crash the library. So a process
of its own decodes the file, within limits, and hands over plain batches; what becomes of it is one line of an error.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rl_safe_workers.errors import DataError, first_line
from rl_safe_workers.foreign_files import look, open_foreign

_BATCH_ROWS = 256
_FREE_BYTES = 2**28
"""Memory that the rows of any file may take."""
_BYTES_PER_FILE_BYTE = 32
_DECODER_BYTES = 2**28
"""Memory that decoding takes besides the rows."""
_CPU_S = 20
_FILE_BYTES_PER_CPU_S = 2**22
_OBJECT_BYTES = 64
_DICT_BYTES = 240
_SHOWN_COLUMNS = 20


def read_rows(file: Path, *, required: Sequence[str], optional: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a parquet file, as dictionaries of some of its columns.

    Memory and time are bounded by the size of the file. Nothing but the named columns is decoded.

    Args:
        file: The file.
        required: Columns that it must have.
        optional: Columns that are read where there are.

    Raises:
        DataError: If the file cannot be read, lacks a column, or decodes to more than its size allows.
    """
    command = [sys.executable, "-m", __name__, str(file), ",".join(required), ",".join(optional)]
    decoder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert decoder.stdout is not None, "a pipe was asked for"
    try:
        # A decoder that fails ends its stream too early; what it has to say is on its stderr.
        with suppress(pa.ArrowException, EOFError), pa.ipc.open_stream(decoder.stdout) as stream:
            for batch in stream:
                yield from batch.to_pylist()
        _, complaint = decoder.communicate()
        if decoder.returncode != 0:
            raise DataError(f"data.train_files: {file} {_reason(complaint, decoder.returncode)}")
    finally:
        decoder.kill()
        decoder.communicate()


def _reason(complaint: bytes, code: int) -> str:
    if code == _REFUSED:
        return complaint.decode("utf-8", "replace").strip()
    if code < 0:
        return f"cannot be read as parquet: it crashes the decoder ({signal.Signals(-code).name})"
    lines = complaint.decode("utf-8", "replace").strip().splitlines()
    return f"cannot be read as parquet: {(lines or ['the decoder gave no reason'])[-1]:.300}"


_REFUSED = 2


class _Refusal(Exception):
    """What is wrong with a file, to follow its name."""


def main(arguments: Sequence[str]) -> int:
    """Decodes a file: ``python -m … FILE REQUIRED OPTIONAL`` writes batches to stdout, or a complaint to stderr."""
    file, required, optional = Path(arguments[0]), arguments[1].split(","), arguments[2].split(",")
    try:
        size = look(file).st_size
        most = _FREE_BYTES + _BYTES_PER_FILE_BYTE * size
        _limit(most + _DECODER_BYTES, _CPU_S + size // _FILE_BYTES_PER_CPU_S)
        with open_foreign(file) as opened:
            _send(pq.ParquetFile(opened), required, optional, most)
    except _Refusal as error:
        sys.stderr.write(str(error))
        return _REFUSED
    except BrokenPipeError:
        return 0  # the reader has found something and gone
    except (pa.ArrowException, MemoryError, OSError) as error:
        reason = "it takes too much memory" if isinstance(error, MemoryError) else first_line(error)
        sys.stderr.write(f"cannot be read as parquet: {reason:.300}")
        return _REFUSED
    return 0


def _limit(memory_bytes: int, cpu_s: int) -> None:
    """Bounds what this process may allocate from now on, and its processor time."""
    pa.set_memory_pool(pa.system_memory_pool())  # the others reserve memory ahead
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])  # data and stack
    for kind, limit in (
        (resource.RLIMIT_DATA, pages * resource.getpagesize() + memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
    ):
        soft, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (min(x for x in (limit, soft, hard) if x != resource.RLIM_INFINITY), hard))


def _send(file: pq.ParquetFile, required: Sequence[str], optional: Sequence[str], most: int) -> None:
    names = file.schema_arrow.names
    columns = [name for name in (*required, *optional) if name in names]
    if missing := [name for name in required if name not in names]:
        more = f" and {len(names) - _SHOWN_COLUMNS} more" if len(names) > _SHOWN_COLUMNS else ""
        shown = ", ".join(f"{name:.40}" for name in names[:_SHOWN_COLUMNS])
        raise _Refusal(f"lacks column {', '.join(missing)}; it has {shown}{more}")
    if twice := [name for name in columns if names.count(name) > 1]:
        raise _Refusal(f"has column {twice[0]} more than once")
    taken, writer = 0, None
    for batch in file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
        plain = pa.RecordBatch.from_arrays([_plain(batch.column(name), name) for name in columns], names=columns)
        plain.validate(full=True)
        taken += plain.num_rows * _DICT_BYTES + sum(map(_object_bytes, plain.columns))
        if taken > most:
            raise _Refusal(
                f"decodes to more than {most // 2**20} MiB, which is out of proportion to its size; write it anew "
                "without columns and repetitions that no prompt needs"
            )
        writer = writer or pa.ipc.new_stream(sys.stdout.buffer, plain.schema)
        writer.write_batch(plain)
    if writer is not None:
        writer.close()


def _plain(column: pa.Array, name: str) -> pa.Array:
    decoded = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    if not _is_plain(decoded.type):
        raise _Refusal(f"has column {name} of type {decoded.type!s:.100}, which is not read; write it as plain values")
    return decoded


def _is_plain(kind: pa.DataType) -> bool:
    """Whether each value of a type is there once for each time that it is used."""
    if pa.types.is_struct(kind):
        return all(_is_plain(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_plain(kind.value_type)
    plain = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_one(kind) for is_one in plain) or _is_number(kind)


def _is_number(kind: pa.DataType) -> bool:
    is_primitive: bool = pa.types.is_primitive(kind)
    return is_primitive or pa.types.is_null(kind) or pa.types.is_decimal(kind)


def _object_bytes(array: pa.Array) -> int:
    """Returns about how much memory an array takes as Python objects."""
    kind = array.type
    if pa.types.is_struct(kind):
        return len(array) * _DICT_BYTES + sum(map(_object_bytes, array.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return len(array) * _OBJECT_BYTES + _object_bytes(array.flatten())
    text = 0 if _is_number(kind) else int(pc.sum(pc.binary_length(array)).as_py() or 0)
    return len(array) * _OBJECT_BYTES + text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
