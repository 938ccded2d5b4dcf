"""A fault in a job under some host, and what its user sees of it."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """What goes wrong."""

    phase: str
    """Where: ``start``, ``bootstrap``, ``train`` and so on."""
    act: str
    """How: ``hang``, ``raise``, ``kill``, ``stop``, ``exit`` or ``segv``."""
    rank: int = 1
    """The training rank at fault."""
    detail: str = ""


class Seen(NamedTuple):
    """What a user sees."""

    first_line: str
    """The root cause, as our package prints it; empty if it prints none."""
    advice: str
    evidence: str
    """The folder."""
    after_s: float
    """Seconds from the fault to the end of the job."""
    output: str
    status: int
