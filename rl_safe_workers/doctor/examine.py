"""Runs the whole examination: every check in turn, and a live bootstrap if the user asks for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rl_safe_workers.doctor.check import Check, Fact, Report, Subject
from rl_safe_workers.doctor.children import CHILDREN
from rl_safe_workers.doctor.gpus import GPUS
from rl_safe_workers.doctor.live import NAME, Live
from rl_safe_workers.doctor.machine import MACHINE
from rl_safe_workers.doctor.ray_cluster import RAY_CLUSTER
from rl_safe_workers.doctor.ray_here import RAY_HERE
from rl_safe_workers.doctor.storage import STORAGE
from rl_safe_workers.doctor.support import VERSIONS
from rl_safe_workers.doctor.variables import ENVIRONMENT
from rl_safe_workers.findings import Finding, stops, worst_first
from rl_safe_workers.recipe import LOCAL_RAY

HERE: tuple[Check[Any], ...] = (VERSIONS, MACHINE, ENVIRONMENT, STORAGE, CHILDREN, GPUS)
"""Checks of this machine, the quick checks first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The result of an examination.

    Example: ``examine(subject)``
    """

    facts: tuple[Fact, ...]
    findings: tuple[Finding, ...]
    """The findings, the worst first."""
    live: Live | None = None

    @property
    def stops(self) -> bool:
        """True if a finding stops the run."""
        return stops(self.findings)


def checks_for(subject: Subject) -> Iterator[Check[Any]]:
    """Yields the checks to make for a subject."""
    yield from HERE
    yield RAY_HERE if subject.ray == LOCAL_RAY else RAY_CLUSTER


def examine(subject: Subject, live: Callable[[Subject], Live] | None = None) -> Examination:
    """Makes every check, each within its own deadline.

    Args:
        subject: What to examine.
        live: Runs a live bootstrap. Is not called if a check has already found something that stops the run.
    """
    reports = [check.run(subject) for check in checks_for(subject)]
    found = None
    if live is not None:
        stopped = [finding.code for report in reports for finding in report.findings if stops([finding])]
        found = Live(report=_not_tried(stopped)) if stopped else live(subject)
        reports.append(found.report)
    return Examination(
        facts=tuple(fact for report in reports for fact in report.facts),
        findings=tuple(worst_first(finding for report in reports for finding in report.findings)),
        live=found,
    )


def _not_tried(codes: Sequence[str]) -> Report:
    return Report(facts=(Fact(name=NAME, value=f"not checked: {', '.join(codes)} would stop it"),))
