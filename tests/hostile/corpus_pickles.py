"""Hostile pickles: in ``.metadata``, in ``common.pt`` and in an object among the shards."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader

from tests.hostile import pickles as p
from tests.hostile.case import EITHER, Case, Site
from tests.hostile.checkpoints import FOREIGN, OBJECT, add_object, good_common
from tests.hostile.corpus_checkpoints import checkpoint, readers
from tests.hostile.grow import MANY_DIGITS, grow, texts
from tests.torch_dist import write_metadata

MIB = 2**20
META = "torch.distributed.checkpoint.metadata"
_NOT_READ_WITHOUT_LOAD = ("audit", "index", "common")
"""Commands that do not unpickle an object among the shards."""


def cases() -> Iterator[Case]:
    """All of them."""
    for name, payload in p.PAYLOADS.items():
        yield checkpoint(f"payload-{name}/.metadata", partial(_metadata_payload, payload), accepts=("common",))
        yield checkpoint(f"payload-{name}/whole-metadata", partial(_whole_payload, payload), accepts=("common",))
        yield checkpoint(f"payload-{name}/common.pt", partial(_common_payload, payload), accepts=("index",))
        yield checkpoint(f"payload-{name}/object", partial(_object_payload, payload), accepts=_NOT_READ_WITHOUT_LOAD)
    for name, program in PROGRAMS.items():
        yield checkpoint(f"pickle-{name}/.metadata", partial(_write_metadata, program), accepts=("common",))
        yield checkpoint(
            f"pickle-{name}/in-metadata", partial(_write_metadata, _in_metadata(program)), accepts=("common",)
        )
        yield checkpoint(f"pickle-{name}/common.pt", partial(_write_common, program), accepts=EITHER)
    for name, program in COMMON_PROGRAMS.items():
        yield checkpoint(f"common-{name}", partial(_write_common, program), accepts=EITHER)
    for name, change in ENUMS.items():
        yield checkpoint(f"common-enum-{name}", partial(_write_common, change), accepts=EITHER)
    yield from _grown()


def _metadata_payload(payload: Callable[[Site], Any], shards: Path, site: Site) -> None:
    metadata = FileSystemReader(shards).read_metadata()
    metadata.planner_data = payload(site)
    write_metadata(shards, metadata)


def _whole_payload(payload: Callable[[Site], Any], shards: Path, site: Site) -> None:
    write_metadata(shards, payload(site))


def _common_payload(payload: Callable[[Site], Any], shards: Path, site: Site) -> None:
    torch.save({**good_common(), "more": payload(site)}, shards / "common.pt")


def _object_payload(payload: Callable[[Site], Any], shards: Path, site: Site) -> None:
    metadata = FileSystemReader(shards).read_metadata()
    add_object(shards, metadata, OBJECT, p.archive(pickle.dumps([payload(site)], protocol=2)))
    write_metadata(shards, metadata)


def _write_metadata(program: bytes, shards: Path, site: Site) -> None:
    (shards / ".metadata").write_bytes(program)


def _write_common(program: bytes, shards: Path, site: Site) -> None:
    (shards / "common.pt").write_bytes(p.archive(program))


def _in_metadata(program: bytes) -> bytes:
    """The same, as the keys of what a ``Metadata`` describes."""
    body = program[len(p.PROTO) : -len(p.STOP)]
    fields = {"state_dict_metadata": p.EMPTY_DICT, "storage_data": p.EMPTY_DICT, "planner_data": body}
    return p.program(p.record(META, "Metadata", **fields))


def _colliding_keys(count: int) -> bytes:
    """A dict whose keys all have the same hash."""
    modulus = 2**61 - 1
    items = b"".join(p.whole(number * modulus) + p.NONE for number in range(1, count))
    return p.program(p.EMPTY_DICT, p.MARK, items, p.SETITEMS)


def _nested(times: int, opening: bytes, closing: bytes) -> bytes:
    return p.program(opening * times, p.NONE, closing * times)


PROGRAMS: dict[str, bytes] = {
    "surrogate-name": p.program(p.name("os\ud800", "system")),
    "escape-name": p.program(p.name("\x1b[2Jos", "system\x07\n")),
    "long-name": p.program(p.name("a" * 100_000, "b" * 100_000)),
    "doubled-str": p.program(p.call("builtins", "str", p.doubled(40))),
    "doubled-hash-in-set": p.program(p.call("builtins", "set", p.MARK + p.doubled(40) + b"t")),
    "doubled-key": p.program(p.EMPTY_DICT, p.doubled(40), p.NONE, p.SETITEM),
    "doubled-frozenset": p.program(p.MARK, p.doubled(40), b"\x91"),
    "doubled-getattr": p.program(p.call("builtins", "getattr", p.name("builtins", "dict"), p.doubled(40))),
    "doubled-int": p.program(p.call("builtins", "int", p.doubled(40))),
    "doubled-equal": p.program(
        p.EMPTY_DICT, p.call("builtins", "frozenset", p.EMPTY_LIST + p.doubled(25) + p.APPEND), p.NONE, p.SETITEM
    ),
    "doubled-persistent-id": p.program(p.doubled(40), p.BINPERSID),
    "doubled-state": p.program(p.name(META, "Metadata"), p.EMPTY_TUPLE, p.NEWOBJ, p.doubled(40), p.BUILD),
    "memo-of-4-gib": p.program(p.NONE, p.put(2**28)),
    "memo-of-16-gib": p.program(p.NONE, p.put(2**30)),
    "bytes-of-4-eib": p.program(b"\x8e" + (2**62).to_bytes(8, "little")),
    "bytearray-of-2-gib": p.program(b"\x96" + (2**31).to_bytes(8, "little")),
    "frame-of-1-tib": p.program(b"\x95" + (2**40).to_bytes(8, "little")),
    "text-of-4-gib": p.program(b"\x8d" + (2**32).to_bytes(8, "little")),
    "number-of-4400-digits": p.program(p.whole(MANY_DIGITS)),
    "text-of-a-million-digits": p.program(b"I" + b"9" * 10**6 + b"\n"),
    "int-of-a-million-digits": p.program(p.call("builtins", "int", p.text("9" * 10**6))),
    "number-of-8-mib": p.program(p.whole(2 ** (8 * 8 * MIB))),
    "nested-lists": _nested(100_000, p.EMPTY_LIST, p.APPEND),
    "nested-tuples": p.program(p.NONE, p.TUPLE1 * 100_000),
    "nested-dicts": _nested(100_000, p.EMPTY_DICT + p.NONE, p.SETITEM),
    "list-in-itself": p.program(p.EMPTY_LIST, p.DUP, p.APPEND),
    "empty-dicts": p.program(p.MARK, p.EMPTY_DICT * (24 * MIB), p.NONE),
    "empty-sets": p.program(p.MARK, b"\x8f" * (8 * MIB), p.NONE),
    "colliding-keys": _colliding_keys(40_000),
    "bytes-of-a-number": p.program(p.call("builtins", "bytearray", p.whole(2**34))),
    "text-times": p.program(p.call("builtins", "bytes", p.whole(2**34))),
    "extension": p.program(b"\x82\x01"),
    "build-on-class": p.program(p.name("builtins", "dict"), p.EMPTY_DICT, p.text("x"), p.NONE, p.SETITEM, p.BUILD),
    "build-on-builtin-type": p.program(
        p.name("collections", "OrderedDict"),
        p.NONE,
        p.EMPTY_DICT,
        p.text("__init__"),
        p.NONE,
        p.SETITEM,
        p.TUPLE2,
        p.BUILD,
    ),
    "empty": b"",
    "no-stop": p.PROTO,
    "protocol-255": b"\x80\xff.",
    "text-protocol": b"cos\nsystem\n(S'true'\ntR.",
    "bad-escape": b"\x80\x02S'\\xzz'\n.",
    "float-of-text": p.program(p.call("builtins", "float", p.text("9" * 10**6))),
    "complex-of-text": p.program(p.call("builtins", "complex", p.text("9" * 10**6))),
    "deque-of-one": p.program(p.call("collections", "deque", p.doubled(20), p.whole(-1))),
    "encode": p.program(p.call("_codecs", "encode", p.text("\ud800"), p.text("latin1"))),
}
"""Pickles by name; each is tried as the metadata, within it, and as the common state."""


def _storage(count: bytes, kind: str = "FloatStorage") -> bytes:
    parts = p.text("storage") + p.name("torch", kind) + p.text("0") + p.text("cpu") + count
    return p.MARK + parts + b"t" + p.BINPERSID


def _tensor(count: bytes, size: bytes, stride: bytes) -> bytes:
    arguments = _storage(count) + p.whole(0) + size + stride + b"\x89" + p.call("collections", "OrderedDict")
    return p.name("torch._utils", "_rebuild_tensor_v2") + p.MARK + arguments + b"t" + p.REDUCE


def _array(shape: bytes, dtype: str = "b1", state: bytes | None = None) -> bytes:
    made = p.call("numpy._core.multiarray", "_reconstruct", p.name("numpy", "ndarray"), shape + p.TUPLE1, p.text("b"))
    kind = p.call("numpy", "dtype", p.text(dtype), b"\x89", b"\x88")
    state = state or p.MARK + p.whole(1) + shape + p.TUPLE1 + kind + b"\x89" + b"C\x01x" + b"t"
    return made + state + p.BUILD


def _dtype(state: bytes) -> bytes:
    return p.call("numpy", "dtype", p.text("f8"), b"\x89", b"\x88") + state + p.BUILD


def _common(value: bytes) -> bytes:
    return p.program(p.EMPTY_DICT, p.text("iteration"), value, p.SETITEM)


_HUGE = p.whole(10**12)
COMMON_PROGRAMS: dict[str, bytes] = {
    "numpy-reconstruct-1e12": _common(_array(_HUGE)),
    "numpy-reconstruct-4e9": _common(_array(p.whole(4 * 10**9))),
    "numpy-reconstruct-negative": _common(_array(p.whole(-5))),
    "numpy-object-array": _common(_array(p.whole(4), "O")),
    "numpy-frombuffer": _common(
        p.name("numpy._core.numeric", "_frombuffer")
        + p.MARK
        + b"C\x04abcd"
        + p.call("numpy", "dtype", p.text("f8"))
        + p.whole(10**9)
        + p.TUPLE1
        + p.text("C")
        + b"t"
        + p.REDUCE
    ),
    "numpy-scalar": _common(
        p.call("numpy._core.multiarray", "scalar", p.call("numpy", "dtype", p.text("f8")), b"C\x01x")
    ),
    "numpy-scalar-object": _common(
        p.call("numpy._core.multiarray", "scalar", p.call("numpy", "dtype", p.text("O")), p.doubled(30))
    ),
    "numpy-dtype-of-many": _common(p.call("numpy", "dtype", p.text("f8," * 100_000))),
    "numpy-dtype-2-gib": _common(p.call("numpy", "dtype", p.text("V2147483647"))),
    "numpy-dtype-state": _common(
        _dtype(p.MARK + p.whole(3) + p.text("<") + p.NONE * 3 + p.whole(-1) * 2 + p.whole(2**62) + b"t")
    ),
    "numpy-dtype-names": _common(
        _dtype(
            p.MARK
            + p.whole(3)
            + p.text("|")
            + p.NONE
            + p.text("a")
            + p.EMPTY_DICT
            + p.whole(16)
            + p.whole(1)
            + p.whole(0)
            + b"t"
        )
    ),
    "tensor-storage-1e12": _common(_tensor(_HUGE, _HUGE + p.TUPLE1, p.whole(1) + p.TUPLE1)),
    "tensor-storage-negative": _common(_tensor(p.whole(-1), p.whole(4) + p.TUPLE1, p.whole(1) + p.TUPLE1)),
    "tensor-past-its-storage": _common(_tensor(p.whole(4), _HUGE + p.TUPLE1, p.whole(1) + p.TUPLE1)),
    "tensor-without-strides": _common(
        _tensor(p.whole(4), p.whole(10**6) + p.whole(10**6) + p.TUPLE2, p.whole(0) + p.whole(0) + p.TUPLE2)
    ),
    "bytesio": _common(p.call("io", "BytesIO", b"C\x01x")),
    "datetime": _common(p.call("datetime", "datetime", b"C\x0a" + b"\xff" * 10)),
    "timedelta": _common(p.call("datetime", "timedelta", p.whole(10**20))),
    "device": _common(p.call("torch", "device", p.text("\x1b[2J\ud800"))),
    "device-meta": _common(p.call("torch", "device", p.text("meta"))),
    "path": _common(p.call("pathlib", "PosixPath", p.text("../" * 10_000), p.text("\x00"))),
    "namespace-class": _common(
        p.name("argparse", "Namespace") + p.EMPTY_DICT + p.text("x") + p.NONE + p.SETITEM + p.BUILD
    ),
    "namespace-dunder": _common(p.record("argparse", "Namespace", __class__=p.name("builtins", "dict"))),
    "optimizer-config": _common(
        p.record("megatron.core.optimizer.optimizer_config", "OptimizerConfig", lr=p.doubled(30))
    ),
    "not-a-dict": p.program(p.whole(7)),
    "content-metadata-no-dict": p.program(p.EMPTY_DICT, p.text("content_metadata"), p.whole(7), p.SETITEM),
    "control-characters": p.program(p.EMPTY_DICT, p.text("\x1b[2J\ud800"), p.name("\x1b[2J", "x"), p.SETITEM),
}
"""Common states by name, in opcodes that only ``common.pt`` may use."""


def _changed_member(module: str, name: str, value: bytes, **fields: bytes) -> bytes:
    """A member of an enum, of which BUILD then changes the fields."""
    items = b"".join(p.text(key) + new for key, new in fields.items())
    state = p.EMPTY_DICT + p.MARK + items + p.SETITEMS
    return _common(p.call(module, name, value) + state + p.BUILD)


_SIGNALS = ("signal", "Signals")
ENUMS: dict[str, bytes] = {
    "signal-value": _changed_member(*_SIGNALS, p.whole(signal.SIGTERM), _value_=p.whole(99)),
    "signal-name": _changed_member(*_SIGNALS, p.whole(signal.SIGKILL), _name_=p.text("SIGNOTHING")),
    "signal-new-field": _changed_member(*_SIGNALS, p.whole(signal.SIGINT), surprise=p.whole(1)),
    "attention-value": _changed_member(
        "megatron.core.transformer.enums", "AttnBackend", p.whole(5), _value_=p.whole(99)
    ),
    "model-type-value": _changed_member("megatron.core.enums", "ModelType", p.whole(1), _value_=p.whole(99)),
    "class": _common(p.name("signal", "Signals") + p.EMPTY_DICT + p.text("x") + p.NONE + p.SETITEM + p.BUILD),
    "no-such-member": _common(p.call("signal", "Signals", p.whole(9999))),
    "getattr": _common(p.call("builtins", "getattr", p.name("signal", "Signals"), p.text("__class__"))),
}
"""Common states that change a member of an enum for the whole process."""


# Grown

_ATOMS: tuple[bytes, ...] = (
    p.MARK,
    p.EMPTY_DICT,
    p.EMPTY_LIST,
    p.EMPTY_TUPLE,
    p.NONE,
    b"\x88",
    b"\x89",
    b"K\x05",
    p.whole(2**63),
    p.whole(-1),
    p.whole(MANY_DIGITS),
    b"G" + b"\x7f\xf8" + b"\0" * 6,
    b"C\x02ab",
    p.doubled(12),
    b"\x8f",
    p.name(META, "Metadata"),
    p.name(META, "MetadataIndex"),
    p.name(META, "TensorStorageMetadata"),
    p.name("builtins", "dict"),
    p.name("builtins", "set"),
    p.name("builtins", "str"),
    p.name("builtins", "getattr"),
    p.name("collections", "OrderedDict"),
    p.name("collections", "deque"),
    p.name("collections", "defaultdict"),
    p.name("torch", "Size"),
    p.name("torch", "float32"),
    p.name("os", "system"),
    p.name("signal", "Signals"),
    p.name("numpy", "dtype"),
    p.name("argparse", "Namespace"),
    p.name("pathlib", "PosixPath"),
    p.POP,
    b"1",
    p.DUP,
    p.put(0),
    p.get(0),
    p.MEMOIZE,
    b"h\x00",
    p.REDUCE,
    p.BUILD,
    p.NEWOBJ,
    b"\x92",
    b"t",
    b"l",
    b"d",
    p.TUPLE1,
    p.TUPLE2,
    p.TUPLE3,
    p.APPEND,
    p.APPENDS,
    p.SETITEM,
    p.SETITEMS,
    b"\x90",
    b"\x91",
    p.BINPERSID,
    b"\x82\x01",
)
"""Opcodes, and values that they work on."""


def _grown() -> Iterator[Case]:
    opcode = st.one_of(st.sampled_from(_ATOMS), st.sampled_from(_ATOMS), texts().map(p.text))
    programs = grow(st.lists(opcode, min_size=1, max_size=14).map(lambda parts: p.program(*parts)), 110, seed=11)
    for number, program in enumerate(programs):
        commands = tuple(readers(FOREIGN, audits=(("--deep", "--json"),)))
        yield checkpoint(
            f"opcodes/{number:03}-metadata", partial(_write_metadata, program), commands=commands, accepts=("common",)
        )
        yield checkpoint(
            f"opcodes/{number:03}-common", partial(_write_common, program), commands=commands, accepts=EITHER
        )
