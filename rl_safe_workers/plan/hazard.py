"""A hazard: data about something that can go wrong, and a function that finds where a plan has it.

If a plan has a hazard, the hazard becomes a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rl_safe_workers.findings import Finding, Severity
from rl_safe_workers.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The place of a hazard in a plan.

    Example: ``Where(groups=("EXPERT_DATA_PARALLEL_GROUP",), ranks="0-31", detail="2.1 GiB")``
    """

    groups: Sequence[str] = ()
    ranks: str = ""
    detail: str = ""
    """The part of the text that is specific to this plan."""
    severity: Severity | None = None
    """The severity here; None: the hazard's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """Something that can be wrong with a run.

    Example: see ``hazards_world.HAZARDS``
    """

    code: str
    severity: Severity
    text: str
    """The consequence, in one sentence without a full stop. ``Where.detail`` follows in brackets."""
    since: str
    evidence: tuple[str, ...]
    avoid: str
    """The setting that avoids it. ``{name}`` stands for a fact, and is replaced by the key in the plan's source."""
    find: Callable[[Plan], Iterable[Where]]

    def findings(self, plan: Plan) -> list[Finding]:
        """Returns a finding for each place where a plan has this hazard."""
        return [
            Finding(
                code=self.code,
                severity=where.severity or self.severity,
                text=f"{self.text} ({where.detail})" if where.detail else self.text,
                groups=tuple(where.groups),
                ranks=where.ranks,
                since=self.since,
                evidence=self.evidence,
                avoid=_in_words_of(plan, self.avoid),
            )
            for where in self.find(plan)
        ]


class _Settings(dict[str, str]):
    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __missing__(self, name: str) -> str:
        return self._plan.request.setting(name)


def _in_words_of(plan: Plan, text: str) -> str:
    return text.format_map(_Settings(plan))
