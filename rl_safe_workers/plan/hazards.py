"""Finds all hazards in a plan."""

from __future__ import annotations

from rl_safe_workers.findings import Finding, worst_first
from rl_safe_workers.plan import hazards_comms, hazards_layout, hazards_saves, hazards_world
from rl_safe_workers.plan.hazard import Hazard
from rl_safe_workers.plan.plan import Plan

HAZARDS: tuple[Hazard, ...] = (
    *hazards_layout.HAZARDS,
    *hazards_world.HAZARDS,
    *hazards_comms.HAZARDS,
    *hazards_saves.HAZARDS,
)


def find(plan: Plan) -> list[Finding]:
    """Returns the hazards of a plan as findings, the worst first."""
    return worst_first(finding for hazard in HAZARDS for finding in hazard.findings(plan))
