"""Owns `Explanation`, the answer of ``rl-safe explain``: the root cause, the next step, and where each rank is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line about one rank, process or file.

    Example: ``Row(who="rank 1 (process 4711)", what="is stopped (SIGSTOP)", is_culprit=True)``
    """

    who: str
    what: str
    """The end of a sentence that begins with ``who``."""
    is_culprit: bool = False
    when: str = ""
    """Local time; empty if it is not known."""
    evidence: str = ""
    """A line that a log quotes, or what the operating system says."""
    source: str = ""
    """The file of the evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A collective of one rank, for a trace.

    Example: ``Slice(track="rank 0", name="all_reduce", start_s=1.0, end_s=None, details={"group": "WORLD"})``
    """

    track: str
    name: str
    start_s: float
    """Unix time in seconds."""
    end_s: float | None
    """None if it has not ended, or the record does not tell when."""
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer about a run that has died or stands still.

    Example: ``Explanation(verdict="rank 1 is stopped (SIGSTOP)", advice="continue it: kill -CONT 4711")``
    """

    verdict: str
    """One line: the root cause, or ``"not known, because ..."``."""
    advice: str
    """One line: what to do."""
    is_known: bool = True
    """False if the root cause is not known."""
    cause: str = ""
    """The kind of the root cause, one of a few words; empty if it is not known."""
    culprits: Sequence[str] = ()
    """Names of the ranks or processes that it began with; empty if none is known."""
    rows: Sequence[Row] = ()
    notes: Sequence[str] = ()
    """Sentences about what was not looked at."""
    slices: Sequence[Slice] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as values for JSON."""
        fields = {name: value for name, value in asdict(self).items() if name != "slices"}
        return {"format": FORMAT, **fields, "collectives": len(self.slices)}
