"""The phases of every rank over time, as SVG paths and as data for the page's hover."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rl_safe_workers.driver.charts import Axis, time_axis
from rl_safe_workers.lifecycle import Phase, PhaseEvent
from rl_safe_workers.ranks import Role, format_ranks

MIN_WIDTH_PX, MAX_WIDTH_PX, PX_PER_STAY = 640, 16_000, 5
"""The chart is at least wide enough to tell the stays of the busiest rank apart; beyond the page it scrolls."""
GAP_PX = 3
PX_PER_TICK = 80

Lane = tuple[Role, int]
"""A row: role and rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Where a failed stay is marked."""

    left_percent: float
    top_px: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Everything the page needs to draw the chart."""

    width_px: int
    height_px: int
    row_px: int
    axis: Axis
    labels: tuple[str, ...]
    """One per row, from the top."""
    phases: tuple[Phase, ...]
    """Those that occur, in the order of the run."""
    paths: Mapping[Phase, str]
    failures: tuple[Failure, ...]
    stays: tuple[tuple[tuple[int, float, float, int], ...], ...]
    """Per row: (index into ``phases``, start in s, seconds, 1 if it failed), ordered by start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """What the stays of one role in one phase add up to."""

    phase: Phase
    role: Role
    ranks: str
    stays: int
    """Of the rank with most."""
    failed: int
    """Stays that failed, over all ranks."""
    mean_s: float
    longest_s: float
    longest_rank: int
    total_s: float
    """Of the rank that spent most."""
    share: float
    """``total_s`` over the whole timeline."""


def row_height(rows: int) -> int:
    """Returns pixels per row: less for many ranks, never less than a label needs."""
    return 24 if rows <= 16 else 18 if rows <= 32 else 14


def lanes(events: Iterable[PhaseEvent]) -> dict[Lane, list[PhaseEvent]]:
    """Groups events by role and rank, trainers first, each ordered by start."""
    by_lane: dict[Lane, list[PhaseEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start_s):
        by_lane[event.role, event.rank].append(event)
    order = list(Role)
    return dict(sorted(by_lane.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))


def build_timeline(events: Sequence[PhaseEvent]) -> Timeline | None:
    """Lays out the chart; None if there is no event."""
    if not events:
        return None
    rows = lanes(events)
    origin_s = min(event.start_s for event in events)
    span_s = max(event.end_s for event in events) - origin_s
    busiest = max(map(len, rows.values()))
    width = min(MAX_WIDTH_PX, max(MIN_WIDTH_PX, busiest * PX_PER_STAY))
    axis = time_axis(span_s, parts=width // PX_PER_TICK)
    phases = tuple(phase for phase in Phase if any(event.phase is phase for event in events))
    height = row_height(len(rows))
    return Timeline(
        width_px=width,
        height_px=height * len(rows),
        row_px=height,
        axis=axis,
        labels=tuple(f"{role} {rank}" for role, rank in rows),
        phases=phases,
        paths=_phase_paths(rows, axis, origin_s, width, height),
        failures=_failures(rows, axis, origin_s, height),
        stays=tuple(_stays(row, phases, origin_s) for row in rows.values()),
    )


def _stays(
    row: Sequence[PhaseEvent], phases: Sequence[Phase], origin_s: float
) -> tuple[tuple[int, float, float, int], ...]:
    return tuple(
        (phases.index(e.phase), round(e.start_s - origin_s, 4), round(e.end_s - e.start_s, 4), int(not e.ok))
        for e in row
    )


def _phase_paths(
    rows: Mapping[Lane, Sequence[PhaseEvent]], axis: Axis, origin_s: float, width: int, height: int
) -> dict[Phase, str]:
    """Draws one path per phase: a page with 100 000 stays stays quick, which one with as many rectangles is not."""
    parts: dict[Phase, list[str]] = defaultdict(list)
    for index, row in enumerate(rows.values()):
        for event in row:
            left = axis.fraction(event.start_s - origin_s) * width
            right = max(axis.fraction(event.end_s - origin_s) * width, left + 1)  # a short stay is still to be seen
            parts[event.phase].append(f"M{left:.1f} {index * height + 1}H{right:.1f}v{height - GAP_PX}H{left:.1f}z")
    return {phase: "".join(path) for phase, path in parts.items()}


def _failures(
    rows: Mapping[Lane, Sequence[PhaseEvent]], axis: Axis, origin_s: float, height: int
) -> tuple[Failure, ...]:
    return tuple(
        Failure(
            left_percent=round(100 * axis.fraction(event.end_s - origin_s), 3),
            top_px=index * height + height // 2,
            text=f"{role} {rank}: {event.phase} failed after {event.end_s - event.start_s:.2f} s",
        )
        for index, ((role, rank), row) in enumerate(rows.items())
        for event in row
        if not event.ok
    )


def phase_rows(events: Sequence[PhaseEvent]) -> list[PhaseRow]:
    """Adds up the stays of each role in each phase, in the order of the run."""
    by_key: dict[tuple[Phase, Role], list[PhaseEvent]] = defaultdict(list)
    for event in events:
        by_key[event.phase, event.role].append(event)
    span_s = max((e.end_s for e in events), default=0.0) - min((e.start_s for e in events), default=0.0)
    return [_phase_row(by_key[phase, role], span_s) for phase in Phase for role in Role if (phase, role) in by_key]


def _phase_row(events: Sequence[PhaseEvent], span_s: float) -> PhaseRow:
    seconds_of: defaultdict[int, float] = defaultdict(float)
    for event in events:
        seconds_of[event.rank] += event.end_s - event.start_s
    longest = max(events, key=lambda event: event.end_s - event.start_s)
    total_s = max(seconds_of.values())
    return PhaseRow(
        phase=longest.phase,
        role=longest.role,
        ranks=format_ranks(list(seconds_of)),
        stays=max(Counter(event.rank for event in events).values()),
        failed=sum(not event.ok for event in events),
        mean_s=sum(seconds_of.values()) / len(events),
        longest_s=longest.end_s - longest.start_s,
        longest_rank=longest.rank,
        total_s=total_s,
        share=total_s / span_s if span_s > 0 else 0.0,
    )


def failure_lines(events: Sequence[PhaseEvent]) -> list[str]:
    """Says which ranks failed where, one line per phase and role, the first failure first."""
    failed: dict[tuple[Phase, Role], list[PhaseEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.end_s):
        if not event.ok:
            failed[event.phase, event.role].append(event)
    return [
        f"{phase} failed on {role} rank {format_ranks(sorted({stay.rank for stay in stays}))}"
        f" after {stays[0].end_s - stays[0].start_s:.2f} s"
        for (phase, role), stays in failed.items()
    ]
