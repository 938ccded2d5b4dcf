"""The result of every check of this package: the consequence, the ranks it hits, and the setting that avoids it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class Severity(StrEnum):
    """The effect of a finding on a run."""

    STOPS = "stops"
    """The run hangs, fails, or computes something else."""
    RISKS = "risks"
    """It may: when memory is short, a rank late, or at its end."""
    COSTS = "costs"
    """Time or memory."""


_STYLES = {Severity.STOPS: "bold red", Severity.RISKS: "yellow", Severity.COSTS: "cyan"}
_EFFECTS = {
    Severity.STOPS: "stop the run", Severity.RISKS: "put it at risk", Severity.COSTS: "cost time or memory",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A hazard that is there.

    Example: ``Finding(code="gpus-short", severity=Severity.STOPS, text="the run needs 2 GPUs, and there are 0",
    since="always", evidence=("platforms/cuda.py",), avoid="fewer ranks")``
    """

    code: str
    severity: Severity
    text: str
    """The consequence."""
    groups: tuple[str, ...] = ()
    ranks: str = ""
    since: str
    evidence: tuple[str, ...]
    avoid: str
    """The setting that avoids it."""

    def as_dict(self) -> dict[str, Any]:
        """Returns it for JSON."""
        return asdict(self) | {"severity": str(self.severity)}


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sorts findings by severity; those of one severity stay in their order."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def stops(findings: Iterable[Finding]) -> bool:
    """Returns True if any of them stops the run."""
    return any(finding.severity is Severity.STOPS for finding in findings)


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun.

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
    """Says in a line what the findings come to."""
    counts = {severity: sum(finding.severity is severity for finding in findings) for severity in Severity}
    if not findings:
        return "no hazard found"
    return f"{counted(len(findings), 'hazard')}: " + ", ".join(
        f"{counts[severity]} {_EFFECTS[severity]}" for severity in Severity if counts[severity]
    )


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Prints each finding, and what they come to."""
    from rich.text import Text

    for finding in findings:
        console.print(
            Text.assemble((finding.severity, _STYLES[finding.severity]), " ", (finding.code, "bold")), soft_wrap=True
        )
        for line in lines(finding):
            console.print(f"  {line}", soft_wrap=True)
    console.print(verdict(findings))
