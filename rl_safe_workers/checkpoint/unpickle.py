"""Reads the pickles of a torch_dist checkpoint without running anything they ask for.

A pickle is a program that may call whatever it can name. Here it can name only what the format needs, and each
foreign name gives a stand-in: an inert `Record` that keeps what it was given. No foreign class is imported or built,
so this needs no torch, and a name outside the list is refused before anything is made of it.

A hostile file may still waste memory or time. It cannot run code, import a module or change one.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import zipfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

from rl_safe_workers.checkpoint import format_names as names
from rl_safe_workers.checkpoint.collector import collector_paused
from rl_safe_workers.errors import CheckpointError, UnsafeCheckpointError

MALFORMED = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a pickle that is not well-formed raises: its opcodes work on whatever lies on its stack."""


class _Refused(Exception):
    """Carries the name that a pickle asked for in vain."""


class _Sealed(type):
    """Makes a class read-only: BUILD sets attributes of whatever lies on the stack, and that may be a class."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"a pickle may not change {cls.__name__}")

    __delattr__ = __setattr__  # type: ignore[assignment]


class Record(metaclass=_Sealed):
    """Stands for an object of a foreign class. Its fields are ``vars(record)``, never methods called on it."""

    qualified = ""
    """``module.name`` of the class that it stands for."""

    def __init__(self, *args: object) -> None:
        vars(self)["args"] = args


class _StatefulRecord(Record):
    """A record whose state is not always a dict of attributes."""

    def __setstate__(self, state: object) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


class EnumMember(Record):
    """Stands for a member of an enum; ``args`` holds its value, or its name."""


class _Getattr(metaclass=_Sealed):
    """``getattr`` as Python 3.11.0 pickles enum members with; nothing else may be had with it."""

    def __new__(cls, owner: object, name: object) -> EnumMember:  # type: ignore[misc]
        if not (isinstance(owner, _Sealed) and issubclass(owner, EnumMember) and isinstance(name, str)):
            raise _Refused("builtins.getattr (of what is no enum)")
        return owner(name)


class _Bytes(metaclass=_Sealed):
    """``bytes`` and ``bytearray`` of bytes or text: a number would be a size to allocate."""

    def __new__(cls, value: object = b"", encoding: object = "latin-1") -> bytes:  # type: ignore[misc]
        if isinstance(value, bytes):
            return value
        if isinstance(value, str) and encoding in ("latin1", "latin-1"):
            return value.encode("latin-1")
        raise TypeError(f"bytes of {type(value).__name__}")


class _First(metaclass=_Sealed):
    """A function whose result is as good as its argument."""

    def __new__(cls, value: object) -> Any:
        return value


def _stand_ins(listed: Mapping[str, tuple[str, ...]], base: type[Record]) -> dict[tuple[str, str], Any]:
    return {
        (module, name): _Sealed(name, (base,), {"qualified": f"{module}.{name}"})
        for module, found in listed.items()
        for name in found
    }


def _builtins() -> dict[tuple[str, str], Any]:
    """Python's own types, as they are where no argument of theirs is dangerous; protocol 2 uses Python 2's names."""
    types: dict[str, Any] = {t.__name__: t for t in (bool, complex, dict, float, frozenset, int, list, set, str, tuple)}
    types |= {"bytes": _Bytes, "bytearray": _Bytes, "getattr": _Getattr, "long": int, "unicode": str}
    found = {(module, name): value for module in ("builtins", "__builtin__") for name, value in types.items()}
    collected = {("collections", t.__name__): t for t in (OrderedDict, defaultdict, deque)}
    return found | collected | {("_codecs", "encode"): _Bytes}


METADATA_NAMES: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        **_builtins(),
        **_stand_ins(names.METADATA_RECORDS, Record),
        **_stand_ins(names.METADATA_STATEFUL, _StatefulRecord),
        **_stand_ins(names.METADATA_ENUMS, EnumMember),
        **{("torch", name): name for name in names.ITEM_BITS},
        ("torch", "Size"): tuple,
        ("torch.serialization", "_get_layout"): _First,
    }
)
"""What ``.metadata`` may ask for: ``(module, name)`` to what it gets instead."""

COMMON_NAMES: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        **METADATA_NAMES,
        **_stand_ins(names.COMMON_RECORDS, _StatefulRecord),
        **_stand_ins(names.COMMON_ENUMS, EnumMember),
    }
)
"""What ``common.pt``, a file of ``torch.save``, may ask for."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self.asked: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        """Looks a name up in the list, and nowhere else: dots in it reach nothing."""
        try:
            found = self._allowed[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None
        self.asked.add((module, name))
        return found


class _TensorUnpickler(_Unpickler):
    def persistent_load(self, pid: Any) -> Record:
        """Stands in for a storage, which ``torch.save`` keeps beside the pickle."""
        if not (isinstance(pid, tuple) and pid[:1] == ("storage",)):
            raise pickle.UnpicklingError("a persistent id that is no storage")
        return Record(*pid)


def _load(unpickler: _Unpickler, source: str) -> Any:
    # EXT opcodes take what an earlier, unrestricted pickle has cached past find_class.
    copyreg.clear_extension_cache()
    try:
        with collector_paused():
            return unpickler.load()
    except _Refused as error:
        raise UnsafeCheckpointError(
            f"{source} asks for {error}, which no checkpoint needs: refused, and nothing of it was run; "
            "take a checkpoint that you know the writer of"
        ) from None
    except MALFORMED as error:
        raise CheckpointError(
            f"{source} is damaged: it is not a pickle of a checkpoint ({type(error).__name__}: {error}); "
            "take another checkpoint"
        ) from error


def read_metadata_record(path: Path) -> Record:
    """Reads a torch_dist ``.metadata`` file into records.

    Raises:
        UnsafeCheckpointError: If it asks for a name that the format does not need; the message has the name.
        CheckpointError: If it is missing or malformed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; is this a torch_dist checkpoint?") from error
    record = _load(_Unpickler(data, METADATA_NAMES), str(path))
    if not isinstance(record, Record):
        raise CheckpointError(f"{path} holds a {type(record).__name__}, not the metadata of a checkpoint")
    return record


def read_archive(file: IO[bytes], *, source: str) -> tuple[Any, set[tuple[str, str]]]:
    """Reads a file of ``torch.save`` into plain containers and records.

    Args:
        file: Seekable, at any position; ``common.pt``, or the bytes of one object within a shard.
        source: What to call it in errors.

    Returns:
        The object, and each ``(module, name)`` that it asked for.

    Raises:
        UnsafeCheckpointError: If it asks for a name that no checkpoint needs; the message has the name.
        CheckpointError: If it is no archive of ``torch.save`` or malformed.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = [e for e in archive.infolist() if e.filename.endswith("/data.pkl")]
            # torch.save does not compress; a small file that inflates to a huge one is not its work.
            if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile("it has no data.pkl as torch.save writes it")
            data = archive.read(entries[0])
    except (zipfile.BadZipFile, OSError, *MALFORMED) as error:
        raise CheckpointError(f"{source} is damaged: no archive of torch.save ({error}); take another one") from error
    unpickler = _TensorUnpickler(data, COMMON_NAMES)
    return _load(unpickler, source), unpickler.asked


def read_common_record(path: Path) -> tuple[Any, set[tuple[str, str]]]:
    """Reads ``common.pt``; see `read_archive`."""
    try:
        with path.open("rb") as file:
            return read_archive(file, source=str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
