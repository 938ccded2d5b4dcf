"""Hostile prompt files: tables that hold other than prompts, and parquet that is none."""

from __future__ import annotations

import datetime
import decimal
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.hostile import pickles
from tests.hostile.case import EITHER, Case, Command, Site
from tests.hostile.grow import edit_file, edits, grow, texts, values
from tests.hostile.prompts import ROWS, put_prompts
from tests.hostile.special import SPECIAL, replace

FILE = "prompts.parquet"
GIB, MIB = 2**30, 2**20
COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")
GOOD = pa.Table.from_pylist(ROWS)


def prompt_file(name: str, make: Callable[[Site], None], **facts: object) -> Case:
    """A case of a prompt file."""
    fields = {"commands": (Command("prompts", (FILE,)),), **facts}
    return Case(name=f"prompts/{name}", make=make, **fields)  # type: ignore[arg-type]


def cases() -> Iterator[Case]:
    """All of them."""
    for what in SPECIAL:
        # A link to a regular file is the user's own way to name it. No text of the file may be shown.
        yield prompt_file(
            what, lambda site, w=what: replace(site.input / FILE, w, site), may_read_outside=what == "link-secret"
        )
    for name, (rows, accepts) in ROWS_OF.items():
        yield prompt_file(f"rows-{name}", lambda site, r=rows: put_prompts(site.input / FILE, r), accepts=accepts)
    for name, (table, accepts) in TABLES.items():
        yield prompt_file(f"table-{name}", partial(_put_table, table), accepts=accepts)
    for name, data in FILES.items():
        # Parquet is read from its end: a file behind another one is whole.
        accepts = EITHER if name == "twice" else ()
        yield prompt_file(f"file-{name}", partial(_put_bytes, data), accepts=accepts)
    for codec in ("snappy", "gzip", "zstd"):
        yield prompt_file(f"bomb-{codec}", partial(_put_bomb, codec))
    yield prompt_file("bomb-dictionary", partial(_put_table, _dictionary_bomb))
    # Without Arrow's own schema in the file it is read as plain text.
    yield prompt_file("bomb-dictionary-plain", partial(_put_table, _dictionary_bomb, store_schema=False))
    yield prompt_file("bomb-nulls", partial(_put_table, lambda: _with("data_source", pa.nulls(50 * MIB), repeat=False)))
    yield prompt_file("bomb-empty-lists", partial(_put_table, _list_bomb))
    yield prompt_file("good-with-escape-in-name", _put_escape_name, commands=(Command("prompts", ("\x1b[2J",)),))
    yield from _grown()


def _put_table(table: Callable[[], pa.Table], site: Site, **options: Any) -> None:
    pq.write_table(table(), site.input / FILE, **options)


def _put_bytes(data: Callable[[bytes], bytes], site: Site) -> None:
    path = site.input / FILE
    put_prompts(path)
    path.write_bytes(data(path.read_bytes()))


def _put_escape_name(site: Site) -> None:
    (site.input / "\x1b[2J").write_bytes(b"no parquet")


# Rows that are no prompts

_ROW = ROWS[0]


def _rows(**changes: Any) -> list[dict[str, Any]]:
    return [{**_ROW, **changes}]


ROWS_OF: dict[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {
    **{f"{column}-null": (_rows(**{column: None}), EITHER if column == "extra_info" else ()) for column in COLUMNS},
    **{
        f"{column}-null-later": ([_ROW, {**_ROW, column: None}], EITHER if column == "extra_info" else ())
        for column in COLUMNS
    },
    **{
        f"{column}-missing": (
            [{k: v for k, v in _ROW.items() if k != column}],
            EITHER if column == "extra_info" else (),
        )
        for column in COLUMNS
    },
    **{
        f"{column}-number": (_rows(**{column: 7}), EITHER if column in ("data_source", "extra_info") else ())
        for column in COLUMNS
    },
    **{
        f"{column}-bytes": (_rows(**{column: b"\xff\xfe"}), EITHER if column in ("data_source", "extra_info") else ())
        for column in COLUMNS
    },
    **{
        f"{column}-text": (_rows(**{column: "x"}), EITHER if column in ("data_source", "extra_info") else ())
        for column in COLUMNS
    },
    "prompt-empty": (_rows(prompt=[]), ()),
    "prompt-of-null": (_rows(prompt=[None]), ()),
    "prompt-of-text": (_rows(prompt=["x"]), ()),
    "prompt-without-role": (_rows(prompt=[{"content": "x"}]), ()),
    "prompt-role-null": (_rows(prompt=[{"role": None, "content": "x"}]), ()),
    "prompt-content-number": (_rows(prompt=[{"role": "user", "content": 7}]), ()),
    "prompt-content-null-later": (_rows(prompt=[*_ROW["prompt"], {"role": "user", "content": None}]), ()),
    "prompt-escape": (_rows(prompt=[{"role": "\x1b[2J", "content": 7}]), ()),
    "prompt-long-and-wrong": (_rows(prompt=[{"role": "x" * MIB, "content": None}]), ()),
    "prompt-nested": (_rows(prompt=[[[{"role": "user", "content": "x"}]]]), ()),
    "reward-empty": (_rows(reward_model={"style": "rule"}), ()),
    "reward-truth-null": (_rows(reward_model={"style": "rule", "ground_truth": None}), ()),
    "reward-truth-escape": (_rows(reward_model={"\x1b[2J": "x"}), ()),
    "reward-truth-long-and-wrong": (_rows(reward_model={"style": "x" * MIB}), ()),
    "reward-truth-list": (_rows(reward_model={"ground_truth": [1, 2]}), EITHER),
    "extra-date": (_rows(extra_info={"at": datetime.date(9999, 12, 31)}), EITHER),
    "extra-decimal": (_rows(extra_info={"at": decimal.Decimal("1e30")}), EITHER),
    "none": ([], ()),
}
"""By name: rows, and who may accept them."""


# Tables of types that nobody expects


def _with(column: str, array: pa.Array, *, repeat: bool = True) -> pa.Table:
    """The good table with another column; the good rows are repeated to its length, or all others are null."""
    count = len(array)
    columns = {
        name: pa.concat_arrays([GOOD[name].combine_chunks().slice(0, 1)] * count) if repeat else pa.nulls(count)
        for name in COLUMNS
    }
    return pa.table({**columns, column: array})


def _extra(array: pa.Array) -> pa.Table:
    return _with("extra_info", pa.StructArray.from_arrays([array], names=["at"]))


def _nested(kind: Callable[[pa.DataType], pa.DataType], depth: int) -> pa.Table:
    found = pa.int32()
    for _ in range(depth):
        found = kind(found)
    return _with("extra_info", pa.nulls(1, found))


def _raw_text(data: bytes) -> pa.Array:
    """A column of text that is not UTF-8."""
    offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, len(data))))
    return pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(data)])


def _metadata(**entries: bytes) -> pa.Table:
    return GOOD.replace_schema_metadata(entries)


def _extension(name: bytes, value: bytes) -> pa.Table:
    field = pa.field(
        "extra_info", pa.binary(), metadata={"ARROW:extension:name": name, "ARROW:extension:metadata": value}
    )
    others = [GOOD.schema.field(column) for column in COLUMNS[:3]]
    arrays = [GOOD[column].combine_chunks().slice(0, 1) for column in COLUMNS[:3]]
    return pa.Table.from_arrays([*arrays, pa.array([b"x"])], schema=pa.schema([*others, field]))


def _twice() -> pa.Table:
    arrays = [GOOD[column].combine_chunks() for column in (*COLUMNS, "prompt")]
    return pa.Table.from_arrays(arrays, names=[*COLUMNS, "prompt"])


TABLES: dict[str, tuple[Callable[[], pa.Table], tuple[str, ...]]] = {
    "10000-columns": (lambda: pa.table({f"c{n}": [1] for n in range(10_000)}), ()),
    "10000-more-columns": (
        lambda: pa.table(
            {**dict(zip(COLUMNS, GOOD.slice(0, 1).columns, strict=True)), **{f"c{n}": [1] for n in range(10_000)}}
        ),
        EITHER,
    ),
    "lists-100-deep": (lambda: _nested(pa.list_, 100), EITHER),
    "structs-100-deep": (lambda: _nested(lambda t: pa.struct([("a", t)]), 100), EITHER),
    "lists-1000-deep": (lambda: _nested(pa.list_, 1000), EITHER),
    "columns-escape": (lambda: pa.table({"\x1b[2J\x07": [1], "a\nb": [2]}), ()),
    "columns-nul": (lambda: pa.table({"a\x00b": [1], "": [2]}), ()),
    "columns-long": (lambda: pa.table({"x" * MIB: [1]}), ()),
    "columns-twice": (_twice, EITHER),
    "fields-twice": (
        lambda: _with("extra_info", pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])),
        EITHER,
    ),
    "no-columns": (lambda: pa.table({}), ()),
    "text-not-utf-8": (lambda: _with("data_source", _raw_text(b"\xff\xfe\xed\xa0\x80")), ()),
    "extra-not-utf-8": (lambda: _extra(_raw_text(b"\xff\xfe")), EITHER),
    "timestamp-past-9999": (lambda: _extra(pa.array([2**62], pa.timestamp("us"))), EITHER),
    "timestamp-nanoseconds": (lambda: _extra(pa.array([2**62 + 1], pa.timestamp("ns"))), EITHER),
    "timestamp-zone-above": (lambda: _extra(pa.array([1], pa.timestamp("us", "../../../etc/passwd"))), EITHER),
    "timestamp-zone-escape": (lambda: _extra(pa.array([1], pa.timestamp("us", "\x1b[2J"))), EITHER),
    "timestamp-zone-offset": (lambda: _extra(pa.array([1], pa.timestamp("us", "+99:99"))), EITHER),
    "date-past-9999": (lambda: _extra(pa.array([2**31 - 1], pa.int32()).cast(pa.date32())), EITHER),
    "duration-huge": (lambda: _extra(pa.array([2**62], pa.duration("s"))), EITHER),
    "decimal-256": (lambda: _extra(pa.array([decimal.Decimal(10) ** 70], pa.decimal256(76))), EITHER),
    "large-text": (lambda: _with("data_source", pa.array(["x"], pa.large_string())), EITHER),
    "dictionary": (lambda: _with("data_source", pa.array(["x"]).dictionary_encode()), EITHER),
    "map-for-reward": (
        lambda: _with(
            "reward_model", pa.array([[("ground_truth", "x"), ("ground_truth", None)]], pa.map_("string", "string"))
        ),
        EITHER,
    ),
    "large-list-prompt": (
        lambda: _with(
            "prompt",
            pa.array(
                [[{"role": "user", "content": "x"}]],
                pa.large_list(pa.struct([("role", "string"), ("content", "string")])),
            ),
        ),
        EITHER,
    ),
    "half-floats": (lambda: _extra(pa.array([1.0], pa.float16())), EITHER),
    "nan": (lambda: _extra(pa.array([float("nan")])), EITHER),
    "metadata-huge": (lambda: _metadata(a=b"x" * (64 * MIB)), EITHER),
    "metadata-pandas": (lambda: _metadata(pandas=b"{" * 5000), EITHER),
    "metadata-schema": (lambda: _metadata(**{"ARROW:schema": b"/////"}), EITHER),
    "extension-pickled": (lambda: _extension(b"arrow.py_extension_type", b"cos\nsystem\n(S'exit 7'\ntR."), EITHER),
    "extension-json": (lambda: _extension(b"arrow.json", b"{"), EITHER),
    "extension-opaque": (lambda: _extension(b"arrow.opaque", b'{"type_name": "\x1b[2J"}'), EITHER),
    "extension-tensor": (lambda: _extension(b"arrow.fixed_shape_tensor", b'{"shape": [1000000000000]}'), EITHER),
}
"""By name: what makes the table, and who may accept it."""


# Bytes that are no parquet


def _footer(length: int) -> Callable[[bytes], bytes]:
    return lambda good: good[:-8] + (length & 0xFFFFFFFF).to_bytes(4, "little") + b"PAR1"


FILES: dict[str, Callable[[bytes], bytes]] = {
    "cut-in-half": lambda good: good[: len(good) // 2],
    "no-head": lambda good: good[4:],
    "only-magic": lambda good: b"PAR1",
    "only-magics": lambda good: b"PAR1PAR1",
    "encrypted": lambda good: good[:-4] + b"PARE",
    "footer-zero": _footer(0),
    "footer-2-gib": _footer(2**31 - 1),
    "footer-negative": _footer(-1),
    "footer-past-start": _footer(10**6),
    "footer-of-thrift-lists": lambda good: _thrift(b"\x19" * 100_000),
    "footer-of-thrift-structs": lambda good: _thrift(b"\x1c" * 100_000),
    "footer-list-of-2-to-the-31": lambda good: _thrift(b"\x15\x02\x19\xfc\xff\xff\xff\xff\x07"),
    "footer-text-of-2-gib": lambda good: _thrift(b"\x15\x02\x18\xff\xff\xff\xff\x07"),
    "zeros": lambda good: bytes(len(good)),
    "text": lambda good: b"data_source,prompt\n" * 100,
    "pickle": lambda good: pickles.program(pickles.name("os", "system")),
    "twice": lambda good: good + good,
    "arrow-file": lambda good: _arrow_file(),
    "feather": lambda good: b"FEA1" + bytes(100) + b"FEA1",
}


def _thrift(footer: bytes) -> bytes:
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _arrow_file() -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, GOOD.schema) as file:
        file.write_table(GOOD)
    return sink.getvalue().to_pybytes()


# A few KiB that take GiB


def _put_bomb(codec: str, site: Site) -> None:
    """Writes a row group of 32 MiB that compresses to little, and a footer that lists it a hundred times."""
    path, footer = site.input / FILE, io.BytesIO()
    table = _with("data_source", pa.array(["x" * (32 * MIB)]))
    pq.write_table(table, path, compression=codec, use_dictionary=False, write_statistics=False)
    one, many = pq.read_metadata(path), pq.read_metadata(path)
    for _ in range(99):
        many.append_row_groups(one)
    many.write_metadata_file(footer)
    good = path.read_bytes()
    body = good[: -8 - int.from_bytes(good[-8:-4], "little")]
    path.write_bytes(body + footer.getvalue()[4:])


def _dictionary_bomb() -> pa.Table:
    """A hundred thousand rows of one text of 64 KiB, stored once: 6 GiB as plain text."""
    count = 100_000
    indices = pa.Array.from_buffers(pa.int8(), count, [None, pa.py_buffer(bytes(count))])
    array = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 64 * 1024]))
    return _with("data_source", array, repeat=False)


def _list_bomb() -> pa.Table:
    """Twenty million empty lists."""
    count = 20 * MIB
    offsets = pa.Array.from_buffers(pa.int32(), count + 1, [None, pa.py_buffer(bytes(4 * (count + 1)))])
    return _with("prompt", pa.ListArray.from_arrays(offsets, pa.array([], pa.string())), repeat=False)


def _grown() -> Iterator[Case]:
    for number, todo in enumerate(grow(edits(), 120, seed=71)):
        yield prompt_file(f"edited/{number:03}", partial(_put_edited, todo), accepts=EITHER)
    rows = st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "data_source": values(),
                "prompt": st.one_of(values(), _messages()),
                "reward_model": st.one_of(values(), st.fixed_dictionaries({"ground_truth": values()})),
                "extra_info": values(),
            },
        ),
        min_size=1,
        max_size=3,
    )
    for number, found in enumerate(grow(rows, 80, seed=72)):
        yield prompt_file(f"grown/{number:03}", partial(_put_rows, found), accepts=EITHER)


def _messages() -> st.SearchStrategy[list[dict[str, Any]]]:
    texts_or_not = st.one_of(texts(), values())
    return st.lists(st.fixed_dictionaries({"role": texts_or_not, "content": texts_or_not}), max_size=3)


def _put_edited(todo: list[tuple[str, int, int, bytes]], site: Site) -> None:
    put_prompts(site.input / FILE)
    edit_file(site.input / FILE, todo)


def _put_rows(rows: list[dict[str, Any]], site: Site) -> None:
    """Writes what of grown rows parquet can hold: where types do not go together, all of a column as text."""
    columns: dict[str, pa.Array] = {}
    for name in COLUMNS:
        if not any(name in row for row in rows):
            continue
        found = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(found)
            pq.write_table(pa.table({name: columns[name]}), io.BytesIO())
        except (pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError):
            columns[name] = pa.array([ascii(value)[:200] for value in found])
    pq.write_table(pa.table(columns), site.input / FILE)
