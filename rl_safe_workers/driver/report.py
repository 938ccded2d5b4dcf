"""``report.html``: one self-contained file that tells how a run went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rl_safe_workers.driver import charts, timeline
from rl_safe_workers.driver import metrics as names
from rl_safe_workers.driver.charts import Axis, Point
from rl_safe_workers.driver.console import GIB
from rl_safe_workers.lifecycle import FREE_BYTES, Phase, PhaseEvent
from rl_safe_workers.ranks import Role

TEMPLATE = "report.html.j2"

_TABLE_COLUMNS = (
    ("mean reward", names.REWARD_MEAN),
    ("logprob gap", names.LOGPROB_GAP_MAX),
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
"""Labels of the owners of device memory, in the order of the columns; an owner that is not here comes after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve of a chart."""

    label: str
    values: tuple[float | None, ...]
    """One per step; None where the step has no finite value."""
    line: str
    dots: str
    above_bound: str
    """Dots of the values above the chart's bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over training steps."""

    title: str
    unit: str
    x_axis: Axis
    y_axis: Axis
    steps: tuple[int, ...]
    curves: tuple[Curve, ...]
    not_finite: str
    """Path of a line at each step where a value is not a finite number."""
    not_finite_count: int
    bound: float | None = None
    bound_percent: float = 0.0
    """Height of the bound, from the low end of the y axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Device memory at the end of a phase."""

    role: Role
    phase: Phase
    rank: int
    """The rank that held most."""
    cells: tuple[str, ...]
    """GiB, one per owner; empty where this role has no such owner."""
    total: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """Device memory by owner at the end of each phase."""

    owners: tuple[str, ...]
    rows: tuple[MemoryRow, ...]


def build_chart(
    title: str,
    unit: str,
    records: Sequence[Mapping[str, Any]],
    curves: Mapping[str, str],
    *,
    bound: float | None = None,
) -> Chart | None:
    """Lays out a chart; None if no record has any of the metrics.

    Args:
        title: Title of the chart.
        unit: Unit of the y axis, empty for a plain number.
        records: Lines of ``metrics.jsonl``, in order of steps.
        curves: Metric name by label.
        bound: Draws a line at this value, on a logarithmic axis.
    """
    records = [record for record in records if any(name in record for name in curves.values())]
    if not records:
        return None
    steps = tuple(int(record["step"]) for record in records)
    columns = {label: tuple(finite(record.get(name)) for record in records) for label, name in curves.items()}
    shown = [value for column in columns.values() for value in column if value is not None]
    x_axis = charts.step_axis(min(steps), max(steps))
    y_axis = charts.linear_axis(shown) if bound is None else charts.log_axis([*shown, bound])
    broken = [
        step
        for step, record in zip(steps, records, strict=True)
        if any(name in record and finite(record[name]) is None for name in curves.values())
    ]
    return Chart(
        title=title,
        unit=unit,
        x_axis=x_axis,
        y_axis=y_axis,
        steps=steps,
        curves=tuple(_curve(label, steps, column, x_axis, y_axis, bound) for label, column in columns.items()),
        not_finite="".join(f"M{x_axis.fraction(step) * charts.WIDTH:.1f} 0v{charts.HEIGHT}" for step in broken),
        not_finite_count=len(broken),
        bound=bound,
        bound_percent=0.0 if bound is None else round(100 * y_axis.fraction(bound), 3),
    )


def finite(value: Any) -> float | None:
    """Returns a number that can be drawn, or None for text, null, NaN and infinities."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _curve(
    label: str,
    steps: Sequence[int],
    values: tuple[float | None, ...],
    x_axis: Axis,
    y_axis: Axis,
    bound: float | None,
) -> Curve:
    points: list[Point | None] = [
        None if value is None else charts.place(x_axis, y_axis, step, value)
        for step, value in zip(steps, values, strict=True)
    ]
    above = [
        point
        for point, value in zip(points, values, strict=True)
        if point is not None and value is not None and bound is not None and value > bound
    ]
    return Curve(
        label=label,
        values=values,
        line=charts.line_path(points),
        dots=charts.dots_path(points),
        above_bound="".join(f"M{x:.1f} {y:.1f}h0" for x, y in above),
    )


def _step_table(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    columns = [(label, name) for label, name in _TABLE_COLUMNS if any(name in record for record in records)]
    rows = [[str(record["step"]), *(_cell(record, name) for _, name in columns)] for record in records]
    return ["step", *(label for label, _ in columns)], rows


def _cell(record: Mapping[str, Any], name: str) -> str:
    if name not in record:
        return ""
    value = finite(record[name])
    return "not finite" if value is None else f"{value:.4g}"


def memory_table(events: Sequence[PhaseEvent]) -> MemoryTable | None:
    """Lays out device memory, trainers first, phases as they first appear; None if no event tells of any.

    A row shows the rank with the largest total, each rank as its last stay in the phase left it.
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


def _hover_data(drawn: Sequence[Chart], lanes: timeline.Timeline | None) -> dict[str, Any]:
    return {
        "charts": [
            {"x": [c.x_axis.low, c.x_axis.high], "steps": c.steps, "curves": [[k.label, k.values] for k in c.curves]}
            for c in drawn
        ],
        "timeline": lanes
        and {
            "span": lanes.axis.high,
            "row": lanes.row_px,
            "labels": lanes.labels,
            "phases": lanes.phases,
            "stays": lanes.stays,
        },
    }


def render_report(
    *,
    title: str,
    config_yaml: str,
    metrics: Sequence[Mapping[str, Any]],
    events: Sequence[PhaseEvent],
    summary: Mapping[str, str],
    logprob_bound: float,
) -> str:
    """Returns the page as text; see ``write_report`` for the arguments."""
    records = sorted((record for record in metrics if "step" in record), key=lambda record: int(record["step"]))
    reward = build_chart("Reward", "", records, {"mean": names.REWARD_MEAN, "max": names.REWARD_MAX})
    gap = build_chart(
        "Log-probability gap, rollout against trainer",
        "nats",
        records,
        {"max": names.LOGPROB_GAP_MAX, "mean": names.LOGPROB_GAP_MEAN},
        bound=logprob_bound,
    )
    drawn = [chart for chart in (reward, gap) if chart]
    lanes = timeline.build_timeline(events)
    environment = Environment(
        loader=PackageLoader("rl_safe_workers.driver", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        title=title,
        summary=summary,
        failures=timeline.failure_lines(events),
        charts=drawn,
        box=(charts.WIDTH, charts.HEIGHT),
        timeline=lanes,
        phase_rows=timeline.phase_rows(events),
        memory=memory_table(events),
        step_table=_step_table(records),
        config_yaml=config_yaml,
        hover=_hover_data(drawn, lanes),
    )


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
    """Writes the report of a run, finished or failed at any point.

    The page refers to nothing outside itself. It holds the reward and the log-probability gap over steps, every phase
    of every rank on a time line, the seconds per phase, device memory by owner if there is a device, the numbers of
    each step and the resolved configuration.

    Args:
        path: The HTML file; its directory is made if needed.
        title: Heading, normally the run's name.
        config_yaml: The resolved configuration.
        metrics: Lines of ``metrics.jsonl``; values that are null, NaN or infinite are marked in the charts.
        events: Phases of trainers and rollout ranks, in unix seconds.
        summary: What to state at the top, label to text.
        logprob_bound: Largest allowed log-probability gap in nats, more than 0.
    """
    page = render_report(
        title=title,
        config_yaml=config_yaml,
        metrics=metrics,
        events=events,
        summary=summary,
        logprob_bound=logprob_bound,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # An error of a run may quote bytes that are no text.
    path.write_text(page, encoding="utf-8", errors="backslashreplace")
