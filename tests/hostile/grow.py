"""Grows inputs with hypothesis: the same ones for the same seed, in every process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

Value = TypeVar("Value")

MANY_DIGITS = 10**4400
"""More digits than Python turns into text."""
NUMBERS = (
    0,
    -1,
    1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**12,
    10**30,
    10**400,
    0.5,
    -0.0,
    1e18,
    1e300,
    -1e300,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
)
TEXTS = (
    "",
    " ",
    ".",
    "..",
    "../outside/secret.txt",
    "/etc/passwd",
    "a/../../b",
    "a" * 300,
    "\x00",
    "a\x00b",
    "\x1b[2J\x1b]0;x\x07",
    "line\nbreak",
    "\r\n",
    "\ud800",
    "a\udcffb",
    "\u202egnp.exe",
    "\ufeff",
    "'\"",
    "$(touch x)",
    "`x`",
    "${oc.env:HOME}",
    "%s%n",
    "{0.__class__}",
    "{{7*7}}",
    "~",
    "-",
    "--help",
    "null",
    "nan",
    "\N{FULLWIDTH FULL STOP}" * 2,
    "e\u0301" * 100,
)


class _Provider(HypothesisProvider):
    """Draws no constants: hypothesis takes them from whatever modules a process has imported."""

    def _maybe_draw_constant(self, *_: Any, **__: Any) -> None:
        return None


AVAILABLE_PROVIDERS["fixed"] = _Provider


class _Enough(BaseException):
    """Ends hypothesis once there are enough examples. hypothesis would catch an ``Exception``, and go on."""


def grow(strategy: st.SearchStrategy[Value], count: int, *, seed: int) -> list[Value]:
    """Returns the first ``count`` examples of a strategy, all different."""
    found: dict[str, Value] = {}

    @hypothesis.seed(seed)
    @settings(
        max_examples=3 * count + 50,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        backend="fixed",
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Value) -> None:
        found.setdefault(repr(value), value)
        if len(found) == count:
            raise _Enough

    with suppress(_Enough):
        collect()
    return list(found.values())


def numbers() -> st.SearchStrategy[int | float]:
    """Numbers that somebody forgot, and plain ones."""
    return st.one_of(st.sampled_from(NUMBERS), st.integers(-(2**70), 2**70), st.floats(), st.integers(-9, 99))


def texts() -> st.SearchStrategy[str]:
    """Text that somebody forgot, and text of any characters."""
    return st.one_of(st.sampled_from(TEXTS), st.text(max_size=40))


def values() -> st.SearchStrategy[Any]:
    """Anything that JSON or YAML can hold."""
    leaves = st.one_of(st.none(), st.booleans(), numbers(), texts())
    return st.recursive(
        leaves,
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts(), inner, max_size=4)),
        max_leaves=8,
    )


# Edits of bytes

_MILLION = 1_000_000


def edits() -> st.SearchStrategy[list[tuple[str, int, int, bytes]]]:
    """One to four edits of a file: what, where in millionths of the size, how many bytes, and which."""
    kinds = ("flip", "flip", "flip", "truncate", "insert", "delete", "zero", "ones", "repeat", "write")
    edit = st.tuples(
        st.sampled_from(kinds), st.integers(0, _MILLION - 1), st.integers(1, 64), st.binary(min_size=1, max_size=9)
    )
    return st.lists(edit, min_size=1, max_size=4)


def edited(data: bytes, todo: list[tuple[str, int, int, bytes]]) -> bytes:
    """Applies edits; the result differs from the data."""
    new = bytearray(data)
    for kind, place, count, fresh in todo:
        at = place * len(new) // _MILLION
        _EDITS[kind](new, at, count, fresh)
    if new == data:
        new.append(0)
    return bytes(new)


def _flip(data: bytearray, at: int, count: int, fresh: bytes) -> None:
    if data:
        data[at] ^= fresh[0] or 1


def _truncate(data: bytearray, at: int, count: int, fresh: bytes) -> None:
    del data[at:]


def _insert(data: bytearray, at: int, count: int, fresh: bytes) -> None:
    data[at:at] = fresh


def _delete(data: bytearray, at: int, count: int, fresh: bytes) -> None:
    del data[at : at + count]


def _zero(data: bytearray, at: int, count: int, fresh: bytes) -> None:
    data[at : at + count] = bytes(len(data[at : at + count]))


def _ones(data: bytearray, at: int, count: int, fresh: bytes) -> None:
    data[at : at + count] = b"\xff" * len(data[at : at + count])


def _repeat(data: bytearray, at: int, count: int, fresh: bytes) -> None:
    data[at:at] = data[at : at + count] * 3


def _write(data: bytearray, at: int, count: int, fresh: bytes) -> None:
    data[at : at + len(fresh)] = fresh


_EDITS: dict[str, Callable[[bytearray, int, int, bytes], None]] = {
    "flip": _flip,
    "truncate": _truncate,
    "insert": _insert,
    "delete": _delete,
    "zero": _zero,
    "ones": _ones,
    "repeat": _repeat,
    "write": _write,
}


def edit_file(path: Path, todo: list[tuple[str, int, int, bytes]]) -> None:
    """Applies edits to a file."""
    path.write_bytes(edited(path.read_bytes(), todo))


def to_json(value: Any) -> str:
    """JSON text of any value; numbers of any size, NaN and lone surrogates, too."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {to_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(to_json, value)) + "]"
    return digits(value) if isinstance(value, int) and not isinstance(value, bool) else json.dumps(value)


def digits(value: int) -> str:
    """A number as text, of any size."""
    if abs(value) < 10**4000:
        return str(value)
    head, tail = divmod(abs(value), 10**4000)
    return "-" * (value < 0) + digits(head) + str(tail).zfill(4000)
