"""Reads the pickles of a torch_dist checkpoint without calling anything that they name.

A pickle is a program that may call whatever it can name. Three readers prevent this:

* ``.metadata``, which may be large, goes through Python's own reader. Each listed name gives a stand-in there: an inert
  `Record` that keeps its arguments. The pickle may still waste memory or time, so only a child process with limits
  reads it.
* The small pickles within archives of ``torch.save`` go through `read_tree`, which calls, hashes and compares nothing.
  It returns a tree of plain values and of calls that nobody has made.
* The extra state of a layer, which Transformer Engine pickles itself, goes through `read_layer_tree`. It is like
  `read_tree`, for the opcodes and names of such a state.

Each reader refuses a name that is not listed, before it makes anything of it.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

from rl_safe_workers.checkpoint.format import format_names as names
from rl_safe_workers.checkpoint.format.gc_pause import gc_paused
from rl_safe_workers.errors import CheckpointError, UnsafeCheckpointError
from rl_safe_workers.foreign_files import MALFORMED, TEXT_CHARACTERS, described, printable, read_foreign

METADATA_BYTES = 16 * 2**30
"""Largest ``.metadata``."""
STEPS = 10**6
"""Most reads of opcodes and arguments in a pickle within an archive. A usual pickle has thousands."""


class _Refused(Exception):
    """Carries the name that a reader refused."""


class _Sealed(type):
    """Makes a class read-only. The opcode BUILD sets attributes of any object on the stack, even of a class."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"a pickle may not change {cls.__name__}")

    __delattr__ = __setattr__  # type: ignore[assignment]


class Record(metaclass=_Sealed):
    """Stands for an object of a foreign class. Read its fields with ``vars(record)``; never call a method of it."""

    def __init__(self, *args: object) -> None:
        vars(self)["args"] = args


class _StatefulRecord(Record):
    """A record whose state is not always a dict of attributes."""

    def __setstate__(self, state: object) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


class EnumMember(Record):
    """Stands for a member of an enum; ``args`` holds its value, or its name."""


class _Getattr(metaclass=_Sealed):
    """Stands for ``getattr``, with which Python 3.11.0 pickles enum members. It gives nothing else."""

    def __new__(cls, owner: object, name: object) -> EnumMember:  # type: ignore[misc]
        if not (isinstance(owner, _Sealed) and issubclass(owner, EnumMember) and isinstance(name, str)):
            raise _Refused("builtins.getattr (of what is no enum)")
        return owner(name)


class _First(metaclass=_Sealed):
    """Stands for a function and returns its argument."""

    def __new__(cls, value: object) -> Any:
        return value


def _stand_ins(listed: names.Names, base: type[Record]) -> dict[tuple[str, str], Any]:
    return {(module, name): _Sealed(name, (base,), {}) for module, found in listed.items() for name in found}


METADATA_NAMES: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        **{("builtins", kind.__name__): kind for kind in (set, frozenset)},
        **{("__builtin__", kind.__name__): kind for kind in (set, frozenset)},
        ("builtins", "getattr"): _Getattr,
        ("__builtin__", "getattr"): _Getattr,
        ("collections", "OrderedDict"): OrderedDict,
        **_stand_ins(names.METADATA_RECORDS, Record),
        **_stand_ins(names.METADATA_STATEFUL, _StatefulRecord),
        **_stand_ins(names.METADATA_ENUMS, EnumMember),
        **{("torch", name): name for name in names.ITEM_BITS},
        ("torch", "Size"): tuple,
        ("torch.serialization", "_get_layout"): _First,
    }
)
"""Stand-in for each name that ``.metadata`` may use, by ``(module, name)``."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Looks a name up in the list and nowhere else. A dotted name reaches no attribute."""
        try:
            return METADATA_NAMES[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


def read_metadata_record(path: Path, *, within: Path) -> Record:
    """Reads a torch_dist ``.metadata`` file into records. Only for a bounded child: it may take any memory or time.

    Raises:
        UnsafeCheckpointError: If it asks for a name that the format does not need; the message has the name.
        CheckpointError: If it is missing or malformed.
    """
    try:
        data = read_foreign(path, limit_bytes=METADATA_BYTES, within=within)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; is this a torch_dist checkpoint?") from error
    # EXT opcodes bypass find_class: they use objects that an earlier, unrestricted pickle has cached.
    copyreg.clear_extension_cache()
    with gc_paused():
        record = _load(_MetadataUnpickler(io.BytesIO(data)), str(path))
    if not isinstance(record, Record):
        raise CheckpointError(f"{path} holds a {type(record).__name__}, not the metadata of a checkpoint")
    return record


def _load(unpickler: pickle.Unpickler | pickle._Unpickler, source: str) -> Any:
    try:
        return unpickler.load()
    except _Refused as error:
        raise UnsafeCheckpointError(
            f"{source} asks for {printable(str(error)[:TEXT_CHARACTERS])}, which no checkpoint needs: refused, and "
            "none of its code was run; use a checkpoint whose writer you trust"
        ) from None
    except MALFORMED as error:
        raise CheckpointError(
            f"{source} is damaged: it is not a pickle of a checkpoint ({described(error)}); use another one"
        ) from error


class Name:
    """A class, function or constant that a pickle names. Nothing is made of it."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text
        """``module.name``."""


class Pairs:
    """Alternating keys and values of a dict that is not yet made. Nothing has hashed them."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Any] = []


class Call:
    """A call that the pickle asks for: a name and its arguments. Nothing is called."""

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None
        """State that the pickle sets on the result."""
        self.items: list[Any] = []
        """Items that the pickle adds to the result: elements, or alternating keys and values."""


class _Steps(io.BytesIO):
    """Bytes that allow a limited number of reads."""

    left = STEPS

    def read(self, size: int | None = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise pickle.UnpicklingError(f"more than {STEPS} steps")
        return super().read(size)


_OPCODES = (
    pickle.PROTO,
    pickle.STOP,
    pickle.GLOBAL,
    pickle.REDUCE,
    pickle.NEWOBJ,
    pickle.BUILD,
    pickle.BINPERSID,
    pickle.MARK,
    pickle.TUPLE,
    pickle.TUPLE1,
    pickle.TUPLE2,
    pickle.TUPLE3,
    pickle.EMPTY_TUPLE,
    pickle.EMPTY_LIST,
    pickle.APPEND,
    pickle.APPENDS,
    pickle.EMPTY_DICT,
    pickle.SETITEM,
    pickle.SETITEMS,
    pickle.NONE,
    pickle.NEWTRUE,
    pickle.NEWFALSE,
    pickle.BININT,
    pickle.BININT1,
    pickle.BININT2,
    pickle.LONG1,
    pickle.BINFLOAT,
    pickle.BINUNICODE,
    pickle.BINPUT,
    pickle.LONG_BINPUT,
    pickle.BINGET,
    pickle.LONG_BINGET,
)
"""Opcodes that torch.save writes with its protocol, 2, and torch.load(weights_only=True) reads."""


class _TreeUnpickler(pickle._Unpickler):
    """Python's own unpickler, not the one in C: here single opcodes can be removed or replaced."""

    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}
    listed: ClassVar[frozenset[str]] = names.TREE_NAMES
    stack: list[Any]
    append: Any

    def find_class(self, module: str, name: str) -> Name:
        text = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if text not in self.listed:
            raise _Refused(f"{module}.{name}")
        return Name(text)

    def persistent_load(self, pid: Any) -> Call:
        """Returns a call that stands for a storage, which ``torch.save`` keeps beside the pickle."""
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
            raise pickle.UnpicklingError("a persistent id that is no storage")
        return Call("storage", pid[1:])

    def load_call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Name or type(args) is not tuple:
            raise pickle.UnpicklingError("a call of what is no function")
        self.append(Call(function.text, args))

    def load_state(self) -> None:
        state, call = self.stack.pop(), self.stack[-1]
        if type(call) is not Call or call.state is not None:
            raise pickle.UnpicklingError(f"a state for a {type(call).__name__}")
        call.state = state

    def load_dict(self) -> None:
        self.append(Pairs())

    def load_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._add([key, value])

    def load_items(self) -> None:
        self._add(self.pop_mark())

    def load_element(self) -> None:
        self._extend([self.stack.pop()])

    def load_elements(self) -> None:
        self._extend(self.pop_mark())

    def _add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (Pairs, Call) or len(items) % 2:
            raise pickle.UnpicklingError(f"items for a {type(target).__name__}")
        target.items += items

    def _extend(self, elements: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (list, Call):
            raise pickle.UnpicklingError(f"elements for a {type(target).__name__}")
        (target if type(target) is list else target.items).extend(elements)

    def pop_mark(self) -> list[Any]:
        items: list[Any] = super().pop_mark()  # type: ignore[misc]
        return items

    dispatch |= {
        pickle.REDUCE[0]: load_call,
        pickle.NEWOBJ[0]: load_call,
        pickle.BUILD[0]: load_state,
        pickle.EMPTY_DICT[0]: load_dict,
        pickle.SETITEM[0]: load_item,
        pickle.SETITEMS[0]: load_items,
        pickle.APPEND[0]: load_element,
        pickle.APPENDS[0]: load_elements,
    }


def read_tree(data: bytes, *, source: str) -> Any:
    """Reads the pickle of an archive of ``torch.save`` into a tree of values, `Name`, `Pairs` and `Call`.

    The tree may hold one part in many places, or in itself. Memory and time are proportional to the length of the data.

    Args:
        data: The record ``data.pkl``.
        source: How errors name it.

    Raises:
        UnsafeCheckpointError: If it asks for a name that no checkpoint needs; the message has the name.
        CheckpointError: If it is malformed.
    """
    return _load(_TreeUnpickler(_Steps(data)), source)


_LAYER_OPCODES = (
    pickle.FRAME,
    pickle.STACK_GLOBAL,
    pickle.MEMOIZE,
    pickle.SHORT_BINUNICODE,
    pickle.SHORT_BINBYTES,
    pickle.BINBYTES,
)
"""Opcodes that ``pickle.dumps`` writes with the protocols 4 and 5, beside `_OPCODES`."""
LAYER_BYTES = 2**20
"""Longest extra state of a layer. A usual one has some kilobytes."""


class _LayerUnpickler(_TreeUnpickler):
    dispatch: ClassVar[dict[int, Any]] = {
        **_TreeUnpickler.dispatch,
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _LAYER_OPCODES},
    }
    listed = names.LAYER_NAMES


class _StorageUnpickler(_TreeUnpickler):
    def persistent_load(self, pid: Any) -> Call:
        """Returns a call that stands for the storage. A sixth field says which part of another storage it is."""
        if type(pid) is not tuple or len(pid) != 6 or pid[5] is not None:
            raise pickle.UnpicklingError("a persistent id that is no storage")
        return super().persistent_load(pid[:5])


def read_layer_tree(data: bytes, *, source: str) -> Any:
    """Reads the extra state of a layer into a tree, as `read_tree` reads the pickle of an archive.

    Args:
        data: What Transformer Engine's ``get_extra_state`` has pickled.
        source: How errors name it.

    Raises:
        UnsafeCheckpointError: If it asks for a name that no layer's state needs; the message has the name.
        CheckpointError: If it is malformed, or longer than `LAYER_BYTES`.
    """
    if len(data) > LAYER_BYTES:
        raise CheckpointError(f"{source} has {len(data)} bytes: more than {LAYER_BYTES}, the most of a layer's state")
    return _load(_LayerUnpickler(_Steps(data)), source)


def read_storage(data: bytes, *, source: str) -> tuple[Call, bytes]:
    """Reads a storage that ``torch.save`` has written in its old format, without an archive.

    That format is a sequence of pickles: a magic number, a version, facts about the machine, the storage, and its key.
    After them come the number of elements, in eight bytes, and the elements.

    Args:
        data: All of it.
        source: How errors name it.

    Returns:
        The storage, as `read_tree` gives one, and the bytes of its elements.

    Raises:
        UnsafeCheckpointError: If it asks for a name that no checkpoint needs; the message has the name.
        CheckpointError: If it is malformed.
    """
    stream = _Steps(data)
    magic, version, _, storage, _ = (_load(_StorageUnpickler(stream), source) for _ in range(5))
    if (magic, version) != (_MAGIC, _VERSION) or type(storage) is not Call or storage.name != "storage":
        raise CheckpointError(f"{source} is damaged: it has no storage where a tensor's should be; use another one")
    stream.seek(_COUNT_BYTES, io.SEEK_CUR)
    return storage, stream.read()


_MAGIC, _VERSION, _COUNT_BYTES = 0x1950A86A20F9469CFC6C, 1001, 8
"""Facts of the old format, see torch/serialization.py."""
