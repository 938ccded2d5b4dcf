"""Another user of the machine: writes to every socket, file and folder of a run that it can reach.

    python -m tests.integration.neighbour UID SECONDS CANARY FOLDER...

Started as root, it becomes user ``nobody`` once its imports are done. It knows of the run only what every user of the
machine can see: ports and sockets in ``/proc/net``, processes in ``/proc``, and the folders that are given. It prints
one JSON object: how much it has tried, and what it has changed.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # looked up by name once this process may read nothing of root any more
import json
import os
import pickle
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

NOBODY = 65534
PATIENCE_S, AT_ONCE = 0.5, 32
STORE_MAGIC, STORE_PING = struct.pack("<BI", 0, 0x3C85F7CE), struct.pack("<BI", 13, 12345)
"""How a client of torch's TCPStore begins, and a question that its server answers with the same number."""


class Runs:
    """Pickles as a command of the shell."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.canary}",)


class Neighbour:
    """One attack, repeated until its time is up."""

    def __init__(self, uid: int, canary: Path, folders: list[Path]) -> None:
        self._uid, self._canary, self._folders = uid, canary, folders
        program = pickle.dumps(Runs(canary))
        self._texts = [
            program,
            program.hex().encode(),
            b"",
            b"0",
            b"-1",
            b"[]",
            b"{}",
            b"null",
            b"true",
            b'{"ok": true}',
            b"[0]",
            b"[" * 5000,
            b"\xff\xfe",
            b"9" * 5000,
            b"x" * 2**20,
            b'["error", {"type": "os.system", "args": ["true"]}]',
        ]
        self._bytes = [
            program,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 64,
            *(struct.pack("<Q", number) + program for number in range(8)),
            b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\0" * 54,
            os.urandom(4096),
        ]
        self._is_store: dict[int, bool] = {}
        self.counts: Counter[str] = Counter()
        self.keys: set[str] = set()
        self.changed: set[str] = set()

    def attack(self) -> None:
        """One round of everything."""
        with ThreadPoolExecutor(AT_ONCE) as pool:  # most of the time goes into servers that read nothing
            list(pool.map(self._attack_port, _ports(self._uid)))
        for path in _sockets():
            self._send(socket.AF_UNIX, path)
        for folder in self._folders:
            self._attack_folder(folder)
        for file in Path("/dev/shm").iterdir():
            with contextlib.suppress(OSError):
                if file.lstat().st_uid == self._uid:
                    self._attack_file(file)
        for pid in _processes(self._uid):
            self._attack_process(pid)

    def _attack_port(self, port: int) -> None:
        if port not in self._is_store:
            self._is_store[port] = _answers_as_store(port)
        if self._is_store[port]:
            with contextlib.suppress(RuntimeError):
                self._attack_store(port)
        self._send(socket.AF_INET, ("127.0.0.1", port))

    def _attack_store(self, port: int) -> None:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
        self.counts["stores"] += 1
        for number, key in enumerate(store.list_keys()):
            self.keys.add(key)
            text = self._texts[(number + self.counts["stores"]) % len(self._texts)]
            store.set(key, text.decode("latin-1"))
            self.counts["keys written"] += 1

    def _send(self, family: socket.AddressFamily, address: Any) -> None:
        for data in self._bytes:
            with contextlib.suppress(OSError), socket.socket(family) as client:
                client.settimeout(PATIENCE_S)
                client.connect(address)
                client.sendall(data)
                self.counts["messages sent"] += 1

    def _attack_folder(self, folder: Path) -> None:
        for path, folders, files in os.walk(folder):
            self.counts["folders"] += 1
            self._try((Path(path) / "neighbour").touch, path)
            for name in [*files, *folders]:
                self._attack_file(Path(path) / name)

    def _attack_file(self, file: Path) -> None:
        self.counts["files"] += 1
        self._try(lambda: file.open("ab").close(), str(file))
        self._try(lambda: file.rename(file.with_name("neighbour")), str(file))

    def _attack_process(self, pid: int) -> None:
        self.counts["processes"] += 1
        self._try(lambda: os.kill(pid, 0), f"signal to {pid}")
        self._try(lambda: Path(f"/proc/{pid}/mem").open("r+b").close(), f"memory of {pid}")
        self._try(lambda: Path(f"/proc/{pid}/environ").read_bytes(), f"environment of {pid}")

    def _try(self, attempt: Callable[[], object], what: str) -> None:
        with contextlib.suppress(OSError):
            attempt()
            self.changed.add(what)


def _ports(uid: int) -> list[int]:
    """TCP ports that a user's processes listen on."""
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and int(row[7]) == uid]


def _sockets() -> Iterator[str]:
    """Paths of Unix sockets; a leading ``@`` marks one without a file."""
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        if match := re.search(r" ([@/]\S*)$", row):
            yield re.sub("^@", "\0", match[1])


def _processes(uid: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == uid and (folder / "cmdline").read_bytes().startswith(b"ray::"):
                yield int(folder.name)


def _answers_as_store(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
        client.settimeout(PATIENCE_S)
        client.sendall(STORE_MAGIC + STORE_PING)
        return client.recv(4) == STORE_PING[1:]
    return False


def main() -> None:
    """Attacks for the given time, and says what came of it."""
    uid, seconds, canary, *folders = sys.argv[1:]
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    neighbour = Neighbour(int(uid), Path(canary), [Path(folder) for folder in folders])
    deadline = time.monotonic() + float(seconds)
    while time.monotonic() < deadline:
        neighbour.attack()
        time.sleep(0.1)
    found = {"keys": sorted(neighbour.keys), "changed": sorted(neighbour.changed)}
    sys.stdout.write(json.dumps({**neighbour.counts, **found}) + "\n")


if __name__ == "__main__":
    main()
