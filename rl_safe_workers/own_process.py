"""Builds commands that run a module of this package in a separate Python process, and bounds the end of this one.

``python -m`` searches the working directory first, which may hold untrusted files: a ``psutil.py`` there would run.
These commands give the new process the module path of its caller instead.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from pathlib import Path

_START = (
    "import json, runpy, sys; path, module = sys.argv[1:3]; del sys.argv[1:3]; sys.path[:] = json.loads(path); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of this package as ``__main__``, from any working directory."""
    return [sys.executable, "-P", "-c", _START, json.dumps(module_path()), module, *arguments]


def module_path() -> list[str]:
    """Returns the caller's module path, without the empty entry that stands for the current working directory."""
    return [*filter(None, sys.path), str(Path(__file__).parents[1])]


def end_within(seconds: float) -> None:
    """Gives this process some time to end, then ends it with exit code 1. Call it on the main thread.

    A library may hold up the end of a Python process, such as a pool whose worker was killed. So may a stdout that
    nobody reads. After the given time, stderr gets the line of code of each thread. If nobody reads stderr either, the
    kernel ends the process by SIGALRM five seconds later.

    Args:
        seconds: Longest time until the end.
    """
    # Both still work while the interpreter shuts down, when no Python thread runs any more.
    faulthandler.dump_traceback_later(seconds, exit=True)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + 5.0)
