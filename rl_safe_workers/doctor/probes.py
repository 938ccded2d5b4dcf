"""Questions that only another process may be asked: it imports what the doctor does not, and may hang or crash.

Each probe is a module of this package, run by name; it answers with one line of JSON, the last of its stdout.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from rl_safe_workers.own_process import module_command

_LONGEST = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A probe's answer.

    Example: ``Answer(values={"torch": "2.13.0"})`` or ``Answer(reason="ImportError: …")``
    """

    values: dict[str, Any] | None = None
    reason: str = ""
    """Why there are none."""


def ask(probe: str, *arguments: str, deadline_s: float) -> Answer:
    """Runs a probe and returns its answer; ends it at the deadline.

    Args:
        probe: Name of a module beside this one.
        *arguments: What it is given.
        deadline_s: Seconds it may take, its imports included.
    """
    command = module_command(f"{__package__}.{probe}", *arguments)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(reason=f"no answer within {deadline_s:g} s")
    if done.returncode != 0:
        return Answer(reason=_last(done.stderr)[:_LONGEST] or f"it ended with code {done.returncode}")
    return Answer(values=json.loads(_last(done.stdout)))


def _last(text: str) -> str:
    """Returns the last line that has something in it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def run_tool(*command: str, deadline_s: float) -> str | None:
    """Returns what a tool prints; None where it is not installed, fails, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=deadline_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
