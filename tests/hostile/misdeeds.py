"""Commands that do harm by themselves, to see whether the harness notices."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rl_safe_workers.errors import ConfigError

SECRET = Path("../outside/secret.txt")


def _refuse() -> int:
    raise ConfigError("x is wrong; change it")


def _traceback() -> int:
    raise KeyError("x")


def _block() -> int:
    time.sleep(60)
    return 0


def _block_in_child() -> int:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)  # rl_safe_workers"], check=False)
    return 0


def _take_memory() -> int:
    return len(bytearray(2**31 + 2**30)) * 0


def _take_memory_in_child() -> int:
    subprocess.run([sys.executable, "-c", "len(bytearray(2**31 + 2**30))  # rl_safe_workers"], check=False)
    return 0


def _run_program() -> int:
    return os.system("true")


def _start_program() -> int:
    return subprocess.run(["true"], check=False).returncode


def _leave_program() -> int:
    command = [sys.executable, "-c", "import time; time.sleep(60)  # rl_safe_workers"]
    subprocess.Popen(command, start_new_session=True)
    return 0


def _touch_canary() -> int:
    Path("../canary/ran").touch()
    return 0


def _read_secret() -> int:
    SECRET.read_text()
    return 0


def _read_secret_in_child() -> int:
    subprocess.run([sys.executable, "-c", f"open({str(SECRET)!r})  # rl_safe_workers"], check=False)
    return 0


def _read_secret_without_python() -> int:
    # As a library in C would: no audit event says so.
    import ctypes

    libc = ctypes.CDLL(None)
    libc.open(os.fsencode(SECRET), os.O_RDONLY)
    return 0


def _print_secret() -> int:
    sys.stdout.write(SECRET.read_text())
    return 0


def _read_password_file() -> int:
    Path("/etc/passwd").read_bytes()
    return 0


def _read_through_link() -> int:
    Path("zero").symlink_to("/dev/zero")
    with Path("zero").open("rb") as file:
        file.read(1)
    return 0


def _remove_secret() -> int:
    SECRET.unlink()
    return 0


def _remove_folder() -> int:
    shutil.rmtree(SECRET.parent)
    return 0


def _write_far_away() -> int:
    path = Path("/dev/shm/rl-safe-hostile-canary")
    path.touch()
    path.unlink()
    return 0


def _write_and_restore() -> int:
    text = SECRET.read_text()
    SECRET.write_text("x")
    SECRET.write_text(text)
    return 0


def _make_and_remove() -> int:
    path = SECRET.with_name("x")
    path.touch()
    path.unlink()
    return 0


def _remove_far_away() -> int:
    Path("/dev/shm/rl-safe-hostile-nothing").unlink(missing_ok=True)
    return 0


def _read_much_and_write() -> int:
    for number in range(100):
        with suppress(OSError):
            Path(f"/etc/rl-safe-hostile-{number}").read_bytes()
    return _write_far_away()


def _change_enum() -> int:
    signal.SIGTERM.__dict__["_value_"] = 99
    return 0


def _change_environment() -> int:
    os.putenv("RL_SAFE_CANARY", "ran")
    return 0


def _change_folder() -> int:
    os.chdir("/")
    return 0


def _change_recursion_limit() -> int:
    sys.setrecursionlimit(2000)
    return 0


def _exit_at_once() -> int:
    os._exit(0)


def _crash() -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def _print_escape() -> int:
    sys.stdout.write("\x1b[2J\n")
    return 0


def _print_surrogate() -> int:
    sys.stdout.reconfigure(errors="strict")  # type: ignore[union-attr]
    sys.stdout.write("\ud800\n")
    return 0


def _print_bytes() -> int:
    os.write(1, b"\xff\n")
    return 0


def _nothing() -> int:
    return 0


def _read_own_input() -> int:
    """Reads what is there, and writes a temporary file."""
    list(Path.cwd().iterdir())
    Path("../temp/x").write_text("x")
    Path("../temp/x").unlink()
    Path("/proc/self/statm").read_text()
    return _refuse()


def _start_own_child() -> int:
    code = "import rl_safe_workers.errors"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode


_ALL: dict[str, tuple[Callable[[], int], str]] = {
    "traceback": (_traceback, "traceback: KeyError"),
    "blocks": (_block, "blocked: killed"),
    "blocks-in-child": (_block_in_child, "blocked: killed"),
    "memory": (_take_memory, "memory: "),
    "memory-in-child": (_take_memory_in_child, "memory: "),
    "os-system": (_run_program, "ran code: os.system"),
    "program": (_start_program, "ran code: subprocess.Popen"),
    "leaves-process": (_leave_program, "left 1 processes"),
    "canary": (_touch_canary, "added canary/ran"),
    "reads": (_read_secret, "touched files of others: read outside/secret.txt"),
    "reads-in-child": (_read_secret_in_child, "touched files of others: read outside/secret.txt"),
    "reads-in-c": (_read_secret_without_python, "touched files of others: read outside/secret.txt"),
    "prints-secret": (_print_secret, "printed a file of others"),
    "reads-passwords": (_read_password_file, "touched files of others: read /etc/passwd"),
    "reads-device": (_read_through_link, "touched files of others: read /dev/zero"),
    "removes": (_remove_secret, "removed outside/secret.txt"),
    "removes-folder": (_remove_folder, "removed outside"),
    "writes-far-away": (_write_far_away, "touched files of others: open /dev/shm/rl-safe-hostile-canary"),
    "writes-and-restores": (_write_and_restore, "touched files of others: wrote outside/secret.txt"),
    "makes-and-removes": (_make_and_remove, "touched files of others: removed outside/x"),
    "removes-far-away": (_remove_far_away, "touched files of others: os.remove /dev/shm/rl-safe-hostile-nothing"),
    "reads-much-and-writes": (
        _read_much_and_write,
        "touched files of others: open /dev/shm/rl-safe-hostile-canary",
    ),
    "enum": (_change_enum, "changed the process: signal.Signals"),
    "environment": (_change_environment, "changed the process: environment variable RL_SAFE_CANARY"),
    "folder": (_change_folder, "changed the process: working directory"),
    "recursion-limit": (_change_recursion_limit, "changed the process: recursion limit"),
    "exits": (_exit_at_once, "ended without a report"),
    "crash": (_crash, "died of SIGSEGV"),
    "escape": (_print_escape, "control characters"),
    "surrogate": (_print_surrogate, "UnicodeEncodeError"),
    "bytes": (_print_bytes, "not UTF-8"),
}
MISDEEDS = {name: complaint for name, (_, complaint) in _ALL.items()}
"""By name: what the harness has to say of it."""
GOOD_DEEDS: dict[str, Callable[[], int]] = {
    "nothing": _nothing,
    "refuses": _refuse,
    "reads-own-input": _read_own_input,
    "starts-own-child": _start_own_child,
}


def misdeed(name: str) -> int:
    """Does it."""
    return (GOOD_DEEDS.get(name) or _ALL[name][0])()
