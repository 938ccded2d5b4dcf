"""Sees what an input makes a process do that it has no business to: run code, or touch files of others.

Three witnesses, since none sees all: Python's audit events see each open and each program in the process itself; the
kernel's inotify sees whatever any process does to the files of others, also from C; and a comparison of the process's
state sees what a pickle has changed in memory.
"""

from __future__ import annotations

import copyreg
import ctypes
import importlib
import os
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hostile.case import Site

VARIABLE = "RL_SAFE_CANARY"
"""An environment variable that a payload sets."""
REPOSITORY = Path(__file__).parents[2]

_RUNS = {"os.system", "os.exec", "os.spawn", "pty.spawn", "webbrowser.open", "socket.bind"}
_STARTS = {"subprocess.Popen", "os.posix_spawn"}
"""Audit events of a program and its arguments. subprocess raises both since Python 3.13."""
_CHANGES = {
    "os.chmod": 1,
    "os.chown": 1,
    "os.link": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.utime": 1,
    "shutil.rmtree": 1,
    "shutil.move": 2,
}
"""Audit events that change files, and how many of their first arguments are paths."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READABLE = (
    *{sys.prefix, sys.base_prefix, str(REPOSITORY), sysconfig.get_paths()["stdlib"]},
    "/usr",
    "/lib",
    "/lib64",
    "/sys",
    "/proc/sys",
    "/proc/self",
    "/proc/stat",
    "/proc/meminfo",
    "/proc/cpuinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/os-release",
    "/etc/mime.types",
)
"""Files that Python and its libraries read by themselves."""
_DEVICES = ("/dev/null", "/dev/urandom", "/dev/shm")
_LISTED = 20


class Witness:
    """Listens to Python's audit events, from its making to the end of the process."""

    def __init__(self, site: Site) -> None:
        self.ran: list[str] = []
        """Programs that were started."""
        self.read: list[str] = []
        """Files outside the site that were opened for reading."""
        self.touched: list[str] = []
        """Files outside the site that were opened for writing, made, moved or removed."""
        self._input = os.path.realpath(site.input)
        self._temp = os.path.realpath(site.temp)
        self._root = os.path.realpath(site.root)
        self._busy = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            self._note(event, arguments)
        finally:
            self._busy = False

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        started = event in _STARTS and not _is_ours(arguments)
        if event in _RUNS or started or (event == "os.kill" and not _is_child(arguments[0])):
            _add(self.ran, f"{event}{arguments!r:.200}")
        elif event == "open" and not isinstance(arguments[0], int):
            path = _real(arguments[0])
            if path is None:
                return
            if (arguments[2] or 0) & _WRITING and path not in _DEVICES:
                self._check_change(event, path)
            elif not _lies_in(path, (self._input, self._temp, *_READABLE, *_DEVICES)) or path.endswith("/mem"):
                _add(self.read, f"read {self._named(path)}")
        elif event in _CHANGES:
            for path in arguments[: _CHANGES[event]]:
                # The last part of a path is not followed: a link itself is removed, not what it leads to.
                self._check_change(event, _real(path, _descriptor(event, arguments), follow=False))

    def _check_change(self, event: str, path: str | None) -> None:
        # What changes within the site is seen by comparing snapshots of it.
        if path is not None and not _lies_in(path, (self._root,)):
            _add(self.touched, f"{event} {self._named(path)}")

    def _named(self, path: str) -> str:
        """Returns a path as `Watch` has it, where it is of the site."""
        return os.path.relpath(path, self._root) if _lies_in(path, (self._root,)) else path


def _add(found: list[str], text: str) -> None:
    if len(found) < _LISTED:
        found.append(text)


def _is_ours(arguments: tuple[Any, ...]) -> bool:
    """Returns True if a process is one of our own bounded readers: this Python with a module of ours."""
    executable, command = arguments[0], arguments[1]
    words = [str(word) for word in command] if isinstance(command, (list, tuple)) else [str(command)]
    return str(executable or words[0]) == sys.executable and any("rl_safe_workers" in word for word in words)


def _is_child(process: int) -> bool:
    """Returns True if a process is a child of this one: whoever starts a reader may end it."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
    except (OSError, IndexError):
        return False


def _descriptor(event: str, arguments: tuple[Any, ...]) -> int:
    """The open folder that a relative path starts at; -1 for the working directory."""
    last = arguments[-1] if event in ("os.remove", "os.rmdir", "os.mkdir") else -1
    return last if isinstance(last, int) else -1


def _real(path: Any, descriptor: int = -1, *, follow: bool = True) -> str | None:
    if isinstance(path, int):
        return None
    try:
        text = os.fsdecode(path)
        if descriptor >= 0:
            text = str(Path(f"/proc/self/fd/{descriptor}").readlink() / text)
        if follow:
            return os.path.realpath(text)
        return str(Path(os.path.realpath(Path(text).parent)) / Path(text).name)
    except (OSError, TypeError, ValueError):
        return None


def _lies_in(path: str, folders: tuple[str, ...]) -> bool:
    own = f"/proc/{os.getpid()}"
    path = path.replace(own, "/proc/self", 1) if path.startswith(own) else path
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


# What a pickle may change in memory


def process_state() -> dict[str, str]:
    """Describes what a hostile input could change in a process for all that comes after it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    state = {
        "working directory": str(Path.cwd()),
        "environment": repr(sorted(os.environ.items())),
        f"environment variable {VARIABLE}": repr(getenv(VARIABLE.encode())),
        "sys.path": repr(sys.path),
        "recursion limit": repr(sys.getrecursionlimit()),
        "limit of digits": repr(sys.get_int_max_str_digits()),
        "pickle extensions": repr(copyreg.__dict__["_extension_registry"]),
        "data limit": repr(resource.getrlimit(resource.RLIMIT_DATA)),
        "SIGTERM handler": repr(signal.getsignal(signal.SIGTERM)),
    }
    for owner, name in _enums():
        state[f"{owner}.{name}"] = _describe_enum(owner, name)
    if (torch := sys.modules.get("torch")) is not None:
        state["torch's safe globals"] = repr(sorted(map(repr, torch.serialization.get_safe_globals())))
    return state


def _enums() -> Iterator[tuple[str, str]]:
    from rl_safe_workers.checkpoint.format.format_names import COMMON_ENUMS, METADATA_ENUMS

    for listed in (COMMON_ENUMS, METADATA_ENUMS):
        for module, names in listed.items():
            if module in sys.modules:
                yield from ((module, name) for name in names)


def _describe_enum(owner: str, name: str) -> str:
    kind = getattr(importlib.import_module(owner), name, None)
    members = getattr(kind, "__members__", {})
    return repr([(key, sorted((k, repr(v)) for k, v in vars(member).items())) for key, member in members.items()])


def changed_state(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Says what differs between two states."""
    return [f"{name} was {before[name]:.80} and is {after[name]:.80}" for name in before if before[name] != after[name]]


# What any process does to the files of others

_OPENED = {0x2: "wrote", 0x20: "read", 0x4: "changed", 0x40: "moved", 0x80: "moved", 0x100: "made", 0x200: "removed"}
_MASK = sum(_OPENED)
_IS_FOLDER = 0x40000000
_EVENT = struct.Struct("iIII")


class Watch:
    """Hears, through inotify, of each access to what lies in a folder."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify is not to be had, and the harness needs it")
        self._names: dict[int, str] = {}
        for path in [path for path, _, _ in os.walk(folder)]:  # before it is watched: the walk opens folders
            number = self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), _MASK)
            if number < 0:
                raise OSError(ctypes.get_errno(), f"{path} cannot be watched")
            self._names[number] = os.path.relpath(path, folder.parent)

    def close(self) -> tuple[list[str], list[str]]:
        """Ends the watch; returns what was read, and what was done besides, each once."""
        data = b""
        try:
            while block := os.read(self._descriptor, 2**20):
                data += block
        except BlockingIOError:
            pass
        os.close(self._descriptor)
        events = dict.fromkeys(self._events(data))
        read = [text for text in events if text.startswith("read ")]
        return read[:_LISTED], [text for text in events if not text.startswith("read ")][:_LISTED]

    def _events(self, data: bytes) -> Iterator[str]:
        at = 0
        while at < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0").decode(errors="replace")
            at += _EVENT.size + length
            path = f"{self._names.get(number, '?')}/{name}".rstrip("/")
            for bit, word in _OPENED.items():
                if mask & bit:
                    yield f"{word} {'folder ' if mask & _IS_FOLDER else ''}{path}"
