"""Asks questions of other processes. They import packages that the doctor does not import, and may hang or crash.

Each probe is a module of this package that is run by its name. It answers with one line of JSON, the last line of its
stdout.
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
    """Why there are no values."""


def ask(probe: str, *arguments: str, deadline_s: float) -> Answer:
    """Runs a probe and returns its answer. Ends the probe at the deadline.

    Args:
        probe: Name of a module beside this one.
        *arguments: The probe's arguments.
        deadline_s: Seconds that it may take, including its imports.
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
    """Returns the last line that is not blank; empty if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def run_tool(*command: str, deadline_s: float) -> str | None:
    """Returns a tool's stdout; None if the tool is not installed, fails, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=deadline_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
