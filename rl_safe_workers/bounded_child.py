"""Calls a function of this package in a child process, under limits of memory and time that the kernel enforces.

A malicious file can make its reader use any amount of memory or time, and C code does not run the checks of this
package. The child gets only its arguments and the caller's module path. Its answer is bytes, never a pickle. It does
not outlive the caller. It cannot write a byte to a file. If the kernel has Landlock, it cannot create, empty or remove
a file either.

Pure Python: starts in milliseconds, as does the process.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rl_safe_workers import errors
from rl_safe_workers.errors import RlSafeError
from rl_safe_workers.foreign_files import TEXT_CHARACTERS, described, printable
from rl_safe_workers.own_process import module_path

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rl_safe_workers.bounded_child import serve; serve()"
)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
"""System call numbers, the same on every platform."""
_LANDLOCK_VERSION = 1
"""Flag that asks for the kernel's Landlock version."""
_CHANGES, _TRUNCATION = 0b1_1111_1111_0010, 1 << 14
"""Landlock rights: to write, create and remove files and folders (version 1); to truncate files (version 3)."""
_BLOCK_BYTES = 2**20
_ERROR_BYTES = 16 * TEXT_CHARACTERS
"""Bytes allowed for an answer that is an error, beyond the largest answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one call: memory, time and the size of its answer."""

    memory_bytes: int
    """Bytes of memory, on top of the memory that Python and our modules take."""
    cpu_s: int
    """Seconds of processor time, until the function calls `lift_time_limit`."""
    wall_s: float | None
    """Seconds until the answer must be complete; None for no limit."""
    answer_bytes: int
    """Size in bytes of the largest answer."""


class _Exceeded(Exception):
    """Reports the limit that a call has exceeded."""


def call_bounded(
    function: Callable[..., bytes],
    arguments: Mapping[str, Any],
    *,
    limits: Limits,
    subject: str,
    failure: type[RlSafeError],
) -> bytes:
    """Calls a function in a child process and waits for its answer.

    Args:
        function: A function from a module of this package that does not import torch.
        arguments: Its keyword arguments, as JSON values. Paths are absolute.
        limits: The limits of the call.
        subject: The file that the function reads, for error messages.
        failure: Class of the error that is raised if the child exceeds a limit or dies.

    Returns:
        The function's return value.

    Raises:
        RlSafeError: The function's own error, if its class is ours and its constructor takes only a message. In all
            other cases an error of class ``failure``, whose message says in one line what happened.
    """
    request = {
        "function": [function.__module__, function.__qualname__],
        "arguments": dict(arguments),
        "limits": asdict(limits),
        "parent": os.getpid(),
    }
    with os.fdopen(os.memfd_create("complaints"), "w+b") as complaints:
        # Isolated from the environment and the working directory, which may be the untrusted folder itself.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", f"-Xutf8={sys.flags.utf8_mode}", "-c", _START, json.dumps(module_path())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            cwd="/",
            start_new_session=True,
        )
        try:
            answer = _exchange(process, json.dumps(request).encode(), limits)
        except _Exceeded as error:
            raise failure(f"{subject} {error}; a valid file of its size needs less: use another one") from None
        finally:
            process.kill()
            process.wait()
        if answer is None:
            raise failure(f"{subject} cannot be read: {_cause_of_death(process.returncode, limits, complaints)}")
    if answer[:1] == b"+":
        return answer[1:]
    kind, text = json.loads(answer[1:])
    if kind == "MemoryError":
        memory = f"{limits.memory_bytes // 2**20} MiB of memory"
        raise failure(f"{subject} needs over {memory}; a valid file of its size needs less: use another one")
    raise getattr(errors, kind)(text) if kind else failure(f"{subject} cannot be read: {text}")


def _exchange(process: subprocess.Popen[bytes], request: bytes, limits: Limits) -> bytes | None:
    """Sends the request and returns the answer; None if the child dies before the answer is complete."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline_s = math.inf if limits.wall_s is None else time.monotonic() + limits.wall_s
    with process.stdin, suppress(BrokenPipeError):
        process.stdin.write(request)
        process.stdin.flush()
    waiting = select.poll()
    waiting.register(process.stdout, select.POLLIN)
    answer = bytearray()
    with process.stdout:
        while True:
            left_s = deadline_s - time.monotonic()
            if not waiting.poll(None if left_s == math.inf else max(0.0, left_s) * 1000):
                raise _Exceeded(f"was not read within {limits.wall_s:.0f} s")
            block = os.read(process.stdout.fileno(), _BLOCK_BYTES)
            if not block:
                break
            answer += block
            if len(answer) > limits.answer_bytes + _ERROR_BYTES:
                raise _Exceeded(f"says more than {limits.answer_bytes} bytes")
    if len(answer) < 9 or len(answer) != 8 + int.from_bytes(answer[:8], "little"):
        return None
    return bytes(memoryview(answer)[8:])


def _cause_of_death(returncode: int, limits: Limits, complaints: BinaryIO) -> str:
    if returncode == -signal.SIGXCPU:
        return f"it takes over {limits.cpu_s} s of processor time, more than a valid one of its size; use another one"
    complaints.seek(0)
    said = complaints.read(_BLOCK_BYTES).decode(errors="replace").strip().splitlines()
    if returncode < 0:
        name = signal.Signals(-returncode).name
        blame = "is the host short of memory?" if returncode == -signal.SIGKILL else "use another one"
        return f"its reader was killed by {name}; {blame}"
    return (
        f"its reader ended with exit code {returncode}: {printable(said[-1])[:TEXT_CHARACTERS] if said else 'silent'}"
    )


def lift_time_limit() -> None:
    """Lifts the limit of processor time.

    Call it before work whose time is proportional to the bytes that the file really has.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (resource.getrlimit(resource.RLIMIT_CPU)[1],) * 2)


def serve() -> None:
    """Runs in the child: calls the function that stdin names, and writes the answer to stdout."""
    request = json.loads(sys.stdin.buffer.read())
    _tie_to_parent(request["parent"])
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # printed text must not mix with the answer
    module, name = request["function"]
    function = getattr(importlib.import_module(module), name)
    # After this the process cannot write to any file, and stderr is one.
    silence = os.open(os.devnull, os.O_WRONLY)
    _forbid_changes()
    os.dup2(silence, sys.stderr.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _bound(Limits(**request["limits"]))
    mark, answer = _call(function, request["arguments"])
    with os.fdopen(output, "wb") as file:
        file.write((1 + len(answer)).to_bytes(8, "little") + mark)
        file.write(answer)
    os._exit(0)  # freeing a million objects one by one takes as long as making them


def _call(function: Callable[..., bytes], arguments: Mapping[str, Any]) -> tuple[bytes, bytes]:
    try:
        return b"+", function(**arguments)
    except RlSafeError as error:
        kind, text = type(error).__name__, str(error)
    except MemoryError:
        kind, text = "MemoryError", ""
    except Exception as error:
        kind, text = "", described(error)
    return b"-", json.dumps([kind, printable(text)[:TEXT_CHARACTERS]]).encode()


def _tie_to_parent(parent: int) -> None:
    import ctypes  # the parent does not need it

    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # a crash leaves no core file, and wakes no core dump handler


def landlock_version() -> int:
    """Returns the kernel's Landlock version; a number below 1 if it has no Landlock, or forbids its use."""
    import ctypes

    size, flags = ctypes.c_size_t(0), ctypes.c_uint(_LANDLOCK_VERSION)
    return int(ctypes.CDLL(None).syscall(_LANDLOCK_CREATE_RULESET, None, size, flags))


def _forbid_changes() -> None:
    """Drops this process's right to change files, if the kernel has Landlock (Linux 5.13) and allows its use."""
    import ctypes

    version = landlock_version()
    if version < 1:
        return
    system_call = ctypes.CDLL(None).syscall
    handled = ctypes.c_uint64(_CHANGES | (_TRUNCATION if version >= 3 else 0))
    size = ctypes.c_size_t(ctypes.sizeof(handled))
    rules = system_call(_LANDLOCK_CREATE_RULESET, ctypes.byref(handled), size, ctypes.c_uint(0))
    # Without this flag the kernel refuses: the process could regain the rights by running a setuid program.
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if system_call(_LANDLOCK_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0)) != 0:
        raise OSError("the kernel has Landlock and does not apply it")


def _bound(limits: Limits) -> None:
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGXCPU})
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _set_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + limits.memory_bytes)
    _set_limit(resource.RLIMIT_CPU, limits.cpu_s)
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, (0, 0))


def _set_limit(kind: int, value: int) -> None:
    """Sets a soft limit, within the hard one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
