"""Pickles as an attacker writes them: opcode by opcode, and calls that leave a mark if anybody makes them."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

from tests.hostile.canary import VARIABLE
from tests.hostile.case import Site

PROTO, STOP = b"\x80\x04", b"."
MARK, EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE, NONE = b"(", b"}", b"]", b")", b"N"
MEMOIZE, POP, DUP, REDUCE, BUILD, TUPLE1, TUPLE2, TUPLE3 = b"\x94", b"0", b"2", b"R", b"b", b"\x85", b"\x86", b"\x87"
STACK_GLOBAL, SETITEM, SETITEMS, APPEND, APPENDS, NEWOBJ, BINPERSID = b"\x93", b"s", b"u", b"a", b"e", b"\x81", b"Q"


def program(*parts: bytes) -> bytes:
    """A whole pickle."""
    return b"".join([PROTO, *parts, STOP])


def text(value: str) -> bytes:
    """Pushes text; lone surrogates, too."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def whole(value: int) -> bytes:
    """Pushes a number of any size."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(data)) + data


def name(module: str, attribute: str) -> bytes:
    """Pushes what a name stands for."""
    return text(module) + text(attribute) + STACK_GLOBAL


def put(index: int) -> bytes:
    """Keeps the top of the stack under a number."""
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    """Pushes what was kept."""
    return b"j" + struct.pack("<I", index)


def doubled(times: int) -> bytes:
    """Pushes a tuple of two tuples of two tuples ...: two to the power of ``times`` leaves in a few bytes."""
    return EMPTY_TUPLE + b"".join(put(i) + get(i) + TUPLE2 for i in range(times))


def call(module: str, attribute: str, *arguments: bytes) -> bytes:
    """Calls a name with up to three arguments."""
    tuples = {0: EMPTY_TUPLE, 1: TUPLE1, 2: TUPLE2, 3: TUPLE3}
    return name(module, attribute) + b"".join(arguments) + tuples[len(arguments)] + REDUCE


def record(module: str, attribute: str, **fields: bytes) -> bytes:
    """An object of a class with these fields, as pickle makes it."""
    items = b"".join(text(key) + value for key, value in fields.items())
    return name(module, attribute) + EMPTY_TUPLE + NEWOBJ + EMPTY_DICT + MARK + items + SETITEMS + BUILD


class Runs:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def _mark(site: Site, what: str) -> str:
    return str(site.canary / what)


PAYLOADS: dict[str, Callable[[Site], Any]] = {
    "os.system": lambda site: Runs(os.system, f"touch {_mark(site, 'system')}"),
    "popen": lambda site: Runs(subprocess.Popen, ["touch", _mark(site, "popen")]),
    "eval": lambda site: Runs(eval, f"open({_mark(site, 'eval')!r}, 'w')"),
    "exec": lambda site: Runs(exec, f"open({_mark(site, 'exec')!r}, 'w')"),
    "open": lambda site: Runs(open, _mark(site, "open"), "w"),
    "mkdir": lambda site: Runs(os.mkdir, _mark(site, "mkdir")),
    "putenv": lambda site: Runs(os.putenv, VARIABLE, "ran"),
    "rmtree": lambda site: Runs(shutil.rmtree, str(site.outside)),
    "exit": lambda site: Runs(os._exit, 0),
    "raise-signal": lambda site: Runs(signal.raise_signal, signal.SIGKILL),
    "recursion-limit": lambda site: Runs(sys.setrecursionlimit, 77),
    "chdir": lambda site: Runs(os.chdir, "/"),
    "loads": lambda site: Runs(pickle.loads, pickle.dumps(Runs(os.mkdir, _mark(site, "loads")))),
}
"""Objects whose pickles do something that is seen, by name."""


def archive(pickled: bytes, *, extra: Sequence[tuple[str, bytes]] = (), compression: int = zipfile.ZIP_STORED) -> bytes:
    """The bytes of ``torch.save``, around any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", b"little")
        for entry, data in extra:
            file.writestr(entry, data)
        file.writestr("archive/version", b"3\n")
    return buffer.getvalue()
