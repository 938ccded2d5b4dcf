"""The findings of an audit, and of a comparison of two steps.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import TEXT_CHARACTERS, printable

LISTED = 20
"""How many problems of a kind a report lists; it counts them all."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    kind: str
    """``manifest``, ``format``, ``metadata``, ``common``, ``file``, ``coverage``, ``range`` or ``bytes``."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The findings of an audit, and of a comparison of two steps."""

    directory: str
    ok: bool
    deep: bool
    """True if the bytes themselves were read."""
    problems: tuple[Problem, ...]
    """The first 20 of each kind."""
    counts: Mapping[str, int]
    """How many there are of each kind."""
    has_manifest: bool
    """True if it is a checkpoint of ours."""
    step: int | None
    layout: Mapping[str, int] | None
    versions: Mapping[str, str] | None
    backend: str | None
    """``"torch_dist"``; None if ``metadata.json`` does not say."""
    tensors: int
    chunks: int
    objects: int
    files: int
    bytes: int
    """Size of all its files."""
    seconds: float
    """Duration of the audit."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, directory: str, fields: Mapping[str, Any]) -> AuditReport:
        """Rebuilds a report from the result of `as_dict`.

        Args:
            directory: How the caller names the checkpoint.
            fields: The result of `as_dict`, after a round trip through JSON.
        """
        problems = tuple(Problem(**problem) for problem in fields["problems"])
        return cls(**{**fields, "directory": directory, "problems": problems})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsReport:
    """The findings of a comparison of two steps of a run, see `audit_steps`."""

    first: str
    second: str
    steps: tuple[int | None, int | None]
    """None for a checkpoint without a manifest of ours."""
    ok: bool
    problems: tuple[Problem, ...]
    """The first 20 of each kind: ``keys``, ``copy``, ``weights`` or ``optimizer``."""
    counts: Mapping[str, int]
    """Number of problems of each kind."""
    units: int
    """Number of weights compared, each expert by itself, and each layer if they are stacked."""
    moved: int
    """Number of units whose weight moved."""
    not_judged: int
    """Number of units whose low-precision weight did not move and whose fp32 weight is not stored."""
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as JSON types."""
        return asdict(self)


class Findings:
    """Collects problems while an audit runs."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[Problem] = []

    def add(self, kind: str, text: str) -> None:
        """Counts a problem, and lists it if it is among the first of its kind."""
        self.counts[kind] += 1
        if self.counts[kind] <= LISTED:
            self.problems.append(Problem(kind, printable(text[:TEXT_CHARACTERS])))

    @contextmanager
    def catching(self, kind: str) -> Iterator[None]:
        """Records a checkpoint error as a problem, so that the audit goes on."""
        try:
            yield
        except CheckpointError as error:
            self.add(kind, str(error))
