"""Makes values from archives of ``torch.save``: tensors, and arguments and states of other programs.

This module does not unpickle. `unpickle.read_tree` returns a tree of a pickle's contents, and this module makes the
values for which a table has a maker. It never calls anything that the archive names, and never sets an attribute of a
class.

It runs in trainers, so time and memory are bounded for every file. A value has at most half a million parts. A call
costs twenty parts, and a copy costs one part for each sixteen bytes. A file can choose the hashes of keys other than
text and small integers, so a dict or set may have only few of those.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import importlib
import io
import pathlib
import re
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch

from rl_safe_workers.checkpoint.format.format_names import (
    COMMON_ENUMS,
    COMMON_RECORDS,
    ITEM_BITS,
    LAYER_FORMAT,
    LAYER_FORMAT_VALUE,
    LAYER_RECIPES,
    STORAGE_DTYPES,
    STORED,
)
from rl_safe_workers.checkpoint.format.unpickle import Call, Name, Pairs, read_storage

PARTS = 500_000
"""Most parts of a value. A part counts again at each place where it occurs: a pickle repeats an object in two bytes."""
_CALL_PARTS = 20
"""Number of parts that a call costs: an object of torch takes some microseconds and up to a kilobyte."""
_COPY_BYTES = 16
"""Number of copied bytes that cost one part."""
CHOSEN_KEYS = 1_000
"""Most dict keys and set elements with hashes that the file can choose: each key is compared with all that collide."""
_SMALL = 2**20
"""Only few integers below this can collide in a hash table."""
_KEY_MEMBERS = 4
"""Most members of a tuple that is a key. Megatron's optimizer has keys of two dtypes."""
_KEY_KINDS = (str, int, float, bytes, enum.Enum, torch.dtype, type(None))
"""Types of a key, and of the members of a tuple that is a key; bool is an int."""
_DTYPE = re.compile(r"[biufc]\d{1,2}|[SU]\d{1,6}")
_SHORT = {int, str, bytes, datetime.timedelta, datetime.timezone}
_SHORT_LENGTH = 4096
"""Longest text or bytes in the arguments of an object: the longest path of Linux."""
_DIMENSIONS, _LARGEST = 64, 2**63 - 1
"""Most dimensions of an array or tensor, and its largest size."""


def make_value(tree: Any, size_of: Callable[[str], int]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Makes the value that a pickle describes, on the host. Reads nothing.

    Args:
        tree: What the pickle says, see `unpickle.read_tree`.
        size_of: Returns the bytes of a record of the archive, by its name.

    Returns:
        The value, and the storages of its tensors by the record that holds their bytes. The storages are uint8, and the
        caller must fill them.

    Raises:
        Exception: One of `MALFORMED`, RuntimeError or ImportError, if the tree is damaged, needs a class that is not
            installed here, or has too many parts.
    """
    maker = _Maker(size_of)
    value = maker.make(tree)
    return value, maker.storages


class _Maker:
    """Makes one value and counts its parts. It makes a part anew for each place where the part occurs."""

    def __init__(self, size_of: Callable[[str], int]) -> None:
        """Makes nothing yet."""
        self._size_of = size_of
        self._parts, self._keys = PARTS, CHOSEN_KEYS
        self.storages: dict[str, torch.Tensor] = {}
        """Storages by the record that holds their bytes."""

    def make(self, part: Any) -> Any:
        """Makes a value of a part of the tree."""
        self._spend()
        kind = type(part)
        if kind is list:
            return [self.make(item) for item in part]
        if kind is tuple:
            return tuple(self.make(item) for item in part)
        if kind is Pairs:
            return dict(self._pairs(part.items))
        if kind is Name:
            return _constant(part.text)
        if kind is Call:
            return self._called(part)
        return part

    def _spend(self, parts: int = 1, *, copied: int = 0) -> None:
        """Counts new parts and ``copied`` bytes; raises if there are too many."""
        self._parts -= parts + copied // _COPY_BYTES
        if self._parts < 0:
            raise ValueError(f"more than {PARTS} parts")

    def _pairs(self, items: list[Any]) -> list[tuple[Any, Any]]:
        return [(self._hashable(key), self.make(value)) for key, value in zip(items[::2], items[1::2], strict=True)]

    def _hashable(self, part: Any) -> Any:
        value = self.make(part)
        members = value if type(value) is tuple else (value,)
        if len(members) > _KEY_MEMBERS or not all(isinstance(member, _KEY_KINDS) for member in members):
            raise TypeError(f"{type(value).__name__} as a key")
        if not (type(value) is str or (type(value) is int and abs(value) < _SMALL)):
            self._keys -= 1
            if self._keys < 0:
                raise ValueError(f"more than {CHOSEN_KEYS} keys other than text and small integers")
        return value

    def _called(self, call: Call) -> Any:
        self._spend(_CALL_PARTS)
        module, _, name = call.name.rpartition(".")
        if call.name in _STATEFUL:
            return _STATEFUL[call.name](self, call)
        if call.state is not None or (call.items and call.name not in _COLLECTIONS):
            raise TypeError(f"a state for a {call.name}")
        if call.name in _MAKERS:
            return _MAKERS[call.name](self, *call.args)
        if call.name in _COLLECTIONS:
            return _COLLECTIONS[call.name](self, call)
        if name in COMMON_ENUMS.get(module, ()):
            (value,) = call.args
            return _enum(call.name)(_short(self.make(value)))
        raise TypeError(f"a call of {call.name}")

    def plain(self, call: Call) -> Any:
        """Makes an object that has fields and nothing else."""
        found = _class(call.name)
        if call.args or call.items:
            raise TypeError(f"arguments for a {call.name}")
        value = found.__new__(found)
        vars(value).update(self._fields(call.state))
        return value

    def _fields(self, state: Any) -> dict[str, Any]:
        fields = {} if state is None else self.make(state)
        if type(fields) is not dict or not all(type(key) is str for key in fields):
            raise TypeError("fields that are no dict")
        return fields

    def stream(self, call: Call) -> io.BytesIO:
        """Makes a stream in memory, at its stored position."""
        data, position, _ = (b"", 0, None) if call.state is None else self.make(call.state)
        stream = io.BytesIO(_of(data, bytes))
        stream.seek(_of(position, int))
        return stream

    def text_as_bytes(self, text: Any = "", encoding: Any = "latin-1") -> bytes:
        """Makes bytes from text. Pickle protocol 2 stores bytes as text."""
        if _of(encoding, str) not in ("latin1", "latin-1"):
            raise ValueError("an encoding that no pickle has")
        self._spend(copied=len(_of(text, str)))
        return bytes(text.encode("latin-1"))

    def content(self, content: Any = "", encoding: Any = "latin-1") -> bytes:
        """Makes bytes from bytes or text. Refuses a number, for which ``bytes`` would allocate that size."""
        return _of(self.make(content), bytes) if type(content) is Call else self.text_as_bytes(content, encoding)

    def member(self, owner: Any, name: Any) -> Any:
        """Makes a member of an enum, as Python 3.11.0 pickles it."""
        return _enum(_of(owner, Name).text)[_of(name, str)]

    def simple(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a maker for a class whose objects need no more memory than their arguments."""

        def call(*args: Any) -> Any:
            values = [_short(self.make(arg)) for arg in args]
            # A path may have a part for every second character.
            self._spend(sum(len(value) for value in values if isinstance(value, str | bytes)))
            return kind(*values)

        return call

    def collected(self, items: Any) -> list[Any]:
        """Makes the elements of a set."""
        return [self._hashable(item) for item in _of(items, list, tuple)]

    def storage(self, kind: Any, key: Any, location: Any, count: Any) -> tuple[torch.Tensor, torch.dtype]:
        """Makes a storage once, and returns it with the dtype of its kind."""
        dtype = _storage_dtype(kind)
        record = f"data/{_of(key, str)}"
        size = self._size_of(record)
        if size != _of(count, int) * dtype.itemsize:
            raise ValueError(f"a storage of {count} elements in {size} bytes")
        if record not in self.storages:
            self.storages[record] = torch.empty(size, dtype=torch.uint8)
        return self.storages[record], dtype

    def stored(self, content: Any) -> tuple[torch.Tensor, torch.dtype]:
        """Makes a storage whose bytes are in the pickle, and returns it with the dtype of its kind."""
        call, elements = read_storage(_of(self.make(content), bytes), source="a storage")
        kind, _, _, count = call.args
        dtype = _storage_dtype(kind)
        if len(elements) != _of(count, int) * dtype.itemsize:
            raise ValueError(f"a storage of {count} elements in {len(elements)} bytes")
        self._spend(copied=len(elements))
        return torch.tensor(bytearray(elements), dtype=torch.uint8), dtype

    def tensor(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        grad: Any,
        hooks: Any,
        dtype: Any = None,
        _: Any = None,
    ) -> torch.Tensor:
        """Makes a tensor. Refuses one with more elements than its storage."""
        stored = self.stored if _of(storage, Call).name in STORED else self.storage
        data, of_storage = stored(*storage.args)
        wanted = of_storage if type(dtype) is not Name else _constant(dtype.text)
        sizes, strides = _sizes(self.make(shape)), _sizes(self.make(stride))
        if prod(sizes) * wanted.itemsize > data.numel():
            raise ValueError("a tensor larger than its storage")
        return data.view(wanted).as_strided(sizes, strides, _of(offset, int)).requires_grad_(_of(grad, bool))

    def parameter(self, data: Any, grad: Any, hooks: Any) -> torch.nn.Parameter:
        """Makes a parameter of a module."""
        return torch.nn.Parameter(_of(self.make(data), torch.Tensor), requires_grad=_of(grad, bool))

    def dtype(self, call: Call) -> np.dtype[Any]:
        """Makes a dtype of numpy for numbers or text."""
        code, *_ = call.args
        if not _DTYPE.fullmatch(_of(code, str)):
            raise ValueError("a dtype that no checkpoint needs")
        is_swapped = call.state is not None and _of(call.state, tuple)[1] == ">"
        found: np.dtype[Any] = np.dtype(code).newbyteorder(">" if is_swapped else "=")
        return found

    def scalar(self, dtype: Any, data: Any) -> Any:
        """Makes a scalar of numpy."""
        return self._array(data, (), dtype, "C")[()]

    def array(self, call: Call) -> np.ndarray[Any, Any]:
        """Makes an array of numpy from its state."""
        _, shape, dtype, is_fortran, data = _of(call.state, tuple)
        return self._array(data, shape, dtype, "F" if _of(is_fortran, bool) else "C")

    def array_of_buffer(self, data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
        """Makes an array of numpy, as protocol 5 pickles it."""
        return self._array(data, shape, dtype, "F" if order == "F" else "C")

    def _array(self, data: Any, shape: Any, dtype: Any, order: Any) -> np.ndarray[Any, Any]:
        found, sizes = _of(self.make(dtype), np.dtype), _sizes(self.make(shape))
        content = _of(self.make(data), bytes, bytearray)
        if found.itemsize * prod(sizes) != len(content):
            raise ValueError(f"an array of shape {sizes} in {len(content)} bytes")
        self._spend(copied=len(content))
        return np.ndarray(sizes, found, bytes(content), order=order).copy(order=order)


def _of(value: Any, *kinds: type) -> Any:
    """Returns the value if it has one of the types; else raises."""
    if not isinstance(value, kinds):
        raise TypeError(f"{type(value).__name__} in the place of {kinds[0].__name__}")
    return value


def _short(value: Any) -> Any:
    """Returns the value if it is small enough to be an argument of any constructor; else raises."""
    if type(value) not in _SHORT or (isinstance(value, str | bytes) and len(value) > _SHORT_LENGTH):
        raise TypeError(f"a {type(value).__name__} to make an object of")
    return value


def _storage_dtype(kind: Any) -> torch.dtype:
    """Returns the dtype of a kind of storage."""
    name = _of(kind, Name).text.rpartition(".")[2].removesuffix("Storage")
    dtype: torch.dtype = torch.uint8 if name == "Untyped" else getattr(torch, STORAGE_DTYPES[name])
    return dtype


def _sizes(value: Any) -> tuple[int, ...]:
    """Returns the value if it can be a shape or strides; else raises, since the product of its sizes may take a day."""
    sizes: tuple[int, ...] = _of(value, tuple)
    if len(sizes) > _DIMENSIONS or not all(type(size) is int and 0 <= size <= _LARGEST for size in sizes):
        raise ValueError("a shape that no array has")
    return sizes


def _class(name: str) -> Any:
    module, _, found = name.rpartition(".")
    return getattr(importlib.import_module(module), found)


def _enum(name: str) -> Any:
    found = _class(name)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise TypeError(f"{name} is no enum")
    return found


def _constant(name: str) -> Any:
    """Returns the dtype, or the Python type, that a name stands for."""
    module, _, found = name.rpartition(".")
    if module == "torch" and found in ITEM_BITS:
        return getattr(torch, found)
    if name in _TYPES:
        return _TYPES[name]
    raise TypeError(f"{name} by itself")


_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr)}

_TYPES = {f"builtins.{kind.__name__}": kind for kind in (bool, dict, float, int, list, set, str, tuple)}

_MAKERS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _Maker.text_as_bytes,
    "builtins.bytes": _Maker.text_as_bytes,
    "builtins.bytearray": lambda maker, *args: bytearray(maker.content(*args)),
    "builtins.complex": lambda maker, *args: complex(*(_of(arg, float) for arg in args)),
    "builtins.frozenset": lambda maker, items=(): frozenset(maker.collected(items)),
    "builtins.getattr": _Maker.member,
    "builtins.set": lambda maker, items=(): set(maker.collected(items)),
    "storage": lambda maker, *args: maker.storage(*args)[0],
    LAYER_FORMAT: lambda maker, value: _enum(LAYER_FORMAT)(maker.make(value)),
    LAYER_FORMAT_VALUE: lambda maker, *limits: tuple(_of(limit, int, float) for limit in limits),
    "torch.Size": lambda maker, sizes=(): torch.Size(maker.make(sizes)),
    "torch.device": lambda maker, *args: maker.simple(torch.device)(*args),
    "torch.serialization._get_layout": lambda maker, name: _LAYOUTS[_of(name, str)],
    "torch._utils._rebuild_parameter": _Maker.parameter,
    "torch._utils._rebuild_tensor_v2": lambda maker, *args: maker.tensor(*args[:6]),
    "torch._utils._rebuild_tensor_v3": _Maker.tensor,
    **{
        f"datetime.{kind.__name__}": lambda maker, *args, kind=kind: maker.simple(kind)(*args)
        for kind in (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone)
    },
    **{
        f"{module}.{kind.__name__}": lambda maker, *args, kind=kind: maker.simple(kind)(*args)
        for module in ("pathlib", "pathlib._local")
        for kind in (pathlib.Path, pathlib.PosixPath, pathlib.PurePath, pathlib.PurePosixPath)
    },
    **{f"numpy.{core}.multiarray.scalar": _Maker.scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _Maker.array_of_buffer for core in ("core", "_core")},
}
"""Makers of values without a state, which take the arguments of the call."""

_STATEFUL: dict[str, Callable[[_Maker, Call], Any]] = {
    **{f"{kind.__module__}.{kind.__name__}": _Maker.plain for kind in (argparse.Namespace, types.SimpleNamespace)},
    **{
        f"{module}.{name}": _Maker.plain
        for module in COMMON_RECORDS
        if "optimizer" in module
        for name in COMMON_RECORDS[module]
    },
    **{f"{module}.{name}": _Maker.plain for module, found in LAYER_RECIPES.items() for name in found},
    "io.BytesIO": _Maker.stream,
    "_io.BytesIO": _Maker.stream,
    "numpy.dtype": _Maker.dtype,
    **{f"numpy.{core}.multiarray._reconstruct": _Maker.array for core in ("core", "_core")},
}
"""Makers of values with a state."""


def _default(maker: _Maker, call: Call) -> defaultdict[Any, Any]:
    factory = maker.make(call.args[0]) if call.args else None
    if factory is not None and factory not in _TYPES.values():
        raise TypeError("a default that is no type of Python's")
    return defaultdict(factory, maker._pairs(call.items))


_COLLECTIONS: dict[str, Callable[[_Maker, Call], Any]] = {
    "collections.OrderedDict": lambda maker, call: OrderedDict(maker._pairs(call.items)),
    "collections.defaultdict": _default,
}
"""Makers of values that are filled after they are made."""
