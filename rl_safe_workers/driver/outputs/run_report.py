"""Writes ``report.html``, a self-contained page with tables about a run."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_safe_workers.driver.outputs import metrics as names
from rl_safe_workers.driver.outputs.console import GIB
from rl_safe_workers.lifecycle import FREE_BYTES, Phase, PhaseEvent
from rl_safe_workers.output_files import render
from rl_safe_workers.ranks import Role, format_ranks

TEMPLATE = "report.html.j2"

_STEP_COLUMNS = (
    ("mean reward", names.REWARD_MEAN),
    ("max reward", names.REWARD_MAX),
    ("max logprob gap", names.LOGPROB_GAP_MAX),
    ("mean logprob gap", names.LOGPROB_GAP_MEAN),
    ("loss", names.LOSS),
    ("grad norm", names.GRAD_NORM),
    ("response tokens", names.RESPONSE_LENGTH_MEAN),
    ("seconds", names.STEP_SECONDS),
)

_OWNERS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "kv_cache": "KV cache",
    "cache": "allocator cache",
    "communicators": "communicators",
    "context": "context",
    "other": "other",
    FREE_BYTES: "free",
}
"""Labels of the owners of device memory, in the order of the columns. Owners without a label come last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """The totals of one role in one phase."""

    phase: Phase
    role: Role
    ranks: str
    """The ranks, as ranges, e.g. ``"0-3"``."""
    stays: int
    """Largest number of passes through the phase over all ranks."""
    failed: int
    """Number of failed passes over all ranks."""
    mean_s: float
    longest_s: float
    longest_rank: int
    total_s: float
    """Largest total of seconds over all ranks."""
    share: float
    """``total_s`` divided by the seconds from the start of the first phase to the end of the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Device memory at the end of a phase."""

    role: Role
    phase: Phase
    rank: int
    """The rank with the largest total."""
    cells: tuple[str, ...]
    """GiB of each owner, in the order of the table; empty if the rank has no such owner."""
    total: str
    """GiB of all owners, without free memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """Device memory by owner at the end of each phase."""

    owners: tuple[str, ...]
    rows: tuple[MemoryRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A number of one step, as text."""

    text: str
    is_bad: bool = False
    """True if the value is not finite or is above its bound."""


def write_report(
    path: Path,
    *,
    title: str,
    config_yaml: str,
    metrics: Sequence[Mapping[str, Any]],
    events: Sequence[PhaseEvent],
    summary: Mapping[str, str],
    logprob_bound: float,
) -> None:
    """Writes the report of a run that has finished, or failed at any point.

    The page refers to no other file and has no script. It shows the failures, the summary, the seconds per phase, the
    device memory by owner if there is a device, the metrics of each step and the resolved configuration.

    Args:
        path: The HTML file. Its directory is made if needed.
        title: Heading, normally the run's name.
        config_yaml: The resolved configuration.
        metrics: Lines of ``metrics.jsonl``. Null, NaN and infinite values are marked.
        events: Phases of trainers and rollout ranks, in Unix seconds.
        summary: Text by label, for the top of the page.
        logprob_bound: Largest allowed log-probability gap in nats, more than 0.
    """
    records = sorted((record for record in metrics if "step" in record), key=lambda record: int(record["step"]))
    headings, rows = _step_table(records, logprob_bound)
    page = render(
        "rl_safe_workers.driver",
        TEMPLATE,
        title=title,
        failures=failure_lines(events),
        summary=summary,
        phase_rows=phase_rows(events),
        memory=memory_table(events),
        bound_lines=bound_lines(records, logprob_bound),
        step_headings=headings,
        step_rows=rows,
        config_yaml=config_yaml,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # The error of a run may quote bytes that are not valid text.
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def phase_rows(events: Sequence[PhaseEvent]) -> list[PhaseRow]:
    """Returns the totals of each role in each phase, in the order of the phases."""
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
    """Returns one line for each phase and role that failed, with its ranks; the earliest failure is first."""
    failed: dict[tuple[Phase, Role], list[PhaseEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.end_s):
        if not event.ok:
            failed[event.phase, event.role].append(event)
    return [
        f"{phase} failed on {role.noun} {format_ranks(sorted({stay.rank for stay in stays}))}"
        f" after {stays[0].end_s - stays[0].start_s:.2f} s"
        for (phase, role), stays in failed.items()
    ]


def memory_table(events: Sequence[PhaseEvent]) -> MemoryTable | None:
    """Returns the table of device memory; None if no event has device memory.

    Trainers come first, and phases in the order of their first occurrence. A row shows the rank with the largest total
    at the end of its last pass through the phase.
    """
    last: dict[tuple[Role, Phase], dict[int, Mapping[str, int]]] = {}
    for event in sorted(events, key=lambda event: event.start_s):
        if event.device_bytes:
            last.setdefault((event.role, event.phase), {})[event.rank] = event.device_bytes
    if not last:
        return None
    found = {owner for by_rank in last.values() for held in by_rank.values() for owner in held}
    owners = [*(owner for owner in _OWNERS if owner in found), *sorted(found - _OWNERS.keys())]
    return MemoryTable(
        owners=tuple(_OWNERS.get(owner, owner) for owner in owners),
        rows=tuple(
            _memory_row(*key, by_rank, owners) for role in Role for key, by_rank in last.items() if key[0] is role
        ),
    )


def _memory_row(role: Role, phase: Phase, by_rank: Mapping[int, Mapping[str, int]], owners: Sequence[str]) -> MemoryRow:
    rank, held = max(by_rank.items(), key=lambda item: _total(item[1]))
    return MemoryRow(
        role=role,
        phase=phase,
        rank=rank,
        cells=tuple(f"{held[owner] / GIB:.2f}" if owner in held else "" for owner in owners),
        total=f"{_total(held) / GIB:.2f}",
    )


def _total(held: Mapping[str, int]) -> int:
    return sum(size for owner, size in held.items() if owner != FREE_BYTES)


def bound_lines(records: Sequence[Mapping[str, Any]], bound: float) -> list[str]:
    """Returns sentences about the log-probability gap and its bound, and about values that are not finite."""
    gaps = [
        (gap, int(record["step"]))
        for record in records
        if (gap := _finite(record.get(names.LOGPROB_GAP_MAX))) is not None
    ]
    lines = []
    if gaps:
        largest, at_step = max(gaps)
        above = [step for gap, step in gaps if gap > bound]
        kept = f"is above its bound at {_steps(above)}" if above else "stays within its bound"
        largest_gap = f"The largest gap is {largest:.4g} nats, at step {at_step}; the bound is {bound:g} nats."
        lines.append(f"The log-probability gap {kept}. {largest_gap}")
    for label, name in _STEP_COLUMNS:
        if broken := [int(r["step"]) for r in records if name in r and _finite(r[name]) is None]:
            lines.append(f"The {label} is not a finite number at {_steps(broken)}.")
    return lines


def _steps(steps: Sequence[int]) -> str:
    return f"step {format_ranks(steps)}" if len(steps) == 1 else f"{len(steps)} steps ({format_ranks(steps)})"


def _finite(value: Any) -> float | None:
    """Returns a finite number, or None for text, null, NaN and infinities."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _step_table(records: Sequence[Mapping[str, Any]], bound: float) -> tuple[list[str], list[list[Cell]]]:
    columns = [(label, name) for label, name in _STEP_COLUMNS if any(name in record for record in records)]
    bounds = {names.LOGPROB_GAP_MAX: bound}
    rows = [
        [Cell(text=str(record["step"])), *(_cell(record, name, bounds.get(name, math.inf)) for _, name in columns)]
        for record in records
    ]
    return ["step", *(label for label, _ in columns)], rows


def _cell(record: Mapping[str, Any], name: str, bound: float) -> Cell:
    if name not in record:
        return Cell(text="")
    value = _finite(record[name])
    return Cell(text="not finite", is_bad=True) if value is None else Cell(text=f"{value:.4g}", is_bad=value > bound)
