"""Owns `Finding`, the result of every check in this package: a hazard, the ranks it concerns, and how to avoid it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class Severity(StrEnum):
    """The effect of a hazard on a run."""

    STOPS = "stops"
    """The run hangs, fails, or computes a wrong result."""
    RISKS = "risks"
    """The run may hang or fail: when memory is short, when a rank is late, or when it ends."""
    COSTS = "costs"
    """The run takes more time or memory."""


_STYLES = {Severity.STOPS: "bold red", Severity.RISKS: "yellow", Severity.COSTS: "cyan"}
_EFFECTS = {
    Severity.STOPS: "stop the run",
    Severity.RISKS: "put it at risk",
    Severity.COSTS: "cost time or memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A hazard that a check has found.

    Example: ``Finding(code="gpus-short", severity=Severity.STOPS, text="the run needs 2 GPUs, and there are 0",
    since="always", evidence=("platforms/cuda.py",), avoid="fewer ranks")``
    """

    code: str
    severity: Severity
    text: str
    """The consequence for the run, as a sentence without its full stop."""
    groups: tuple[str, ...] = ()
    ranks: str = ""
    since: str
    evidence: tuple[str, ...]
    avoid: str
    """The setting that avoids it."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as values for JSON."""
        return asdict(self) | {"severity": str(self.severity)}


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sorts findings by severity. The order within one severity stays the same."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def stops(findings: Iterable[Finding]) -> bool:
    """Returns True if any finding stops the run."""
    return any(finding.severity is Severity.STOPS for finding in findings)


def counted(number: int, noun: str) -> str:
    """Returns a number followed by its noun, in the plural unless the number is 1.

    >>> counted(1, "node"), counted(2, "node")
    ('1 node', '2 nodes')
    """
    return f"{number} {noun}" + "s" * (number != 1)


def lines(finding: Finding) -> Iterator[str]:
    """Yields the lines of a finding below its code."""
    yield f"{finding.text}."
    where = [", ".join(finding.groups), f"ranks {finding.ranks}" if finding.ranks else ""]
    if any(where):
        yield f"Where: {'; '.join(part for part in where if part)}."
    yield f"Since: {finding.since}. Evidence: {', '.join(finding.evidence)}."
    yield f"Avoid: {finding.avoid}."


def verdict(findings: Sequence[Finding]) -> str:
    """Returns a summary of the findings in one line."""
    counts = {severity: sum(finding.severity is severity for finding in findings) for severity in Severity}
    if not findings:
        return "no hazard found"
    return f"{counted(len(findings), 'hazard')}: " + ", ".join(
        f"{counts[severity]} {_EFFECTS[severity]}" for severity in Severity if counts[severity]
    )


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Prints each finding and the summary."""
    from rich.text import Text

    for finding in findings:
        console.print(
            Text.assemble((finding.severity, _STYLES[finding.severity]), " ", (finding.code, "bold")), soft_wrap=True
        )
        for line in lines(finding):
            console.print(f"  {line}", soft_wrap=True)
    console.print(verdict(findings))
