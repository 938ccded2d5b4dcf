"""Builds commands that run a module of this package in a separate Python process.

``python -m`` searches the working directory first, which may hold untrusted files: a ``psutil.py`` there would run.
These commands give the new process the module path of its caller instead.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import json
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
