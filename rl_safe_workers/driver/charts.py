"""Axes and curves as plain numbers and SVG paths; nothing here knows what is plotted.

Curves are drawn in a box of ``WIDTH`` x ``HEIGHT`` units that the page stretches to the room it has. Strokes keep their
width under that (``vector-effect: non-scaling-stroke``), and tick labels are HTML at ``Tick.percent``, so that text has
one size on a phone and on a wide screen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 1000, 200
MAX_DOTS = 60
"""A curve of more points shows its line only, and dots where a point has no neighbour to draw a line to."""

_TIME_STEPS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400)
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A labelled position of an axis.

    Example: ``Tick(percent=50.0, label="0.5")``
    """

    percent: float
    """Of the axis' length, from its low end."""
    label: str
    exponent: str = ""
    """Written raised after the label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A linear or base-10 logarithmic mapping of values to 0..1, and its ticks."""

    low: float
    high: float
    ticks: tuple[Tick, ...] = ()
    log: bool = False

    def fraction(self, value: float) -> float:
        """Returns where ``value`` lies between low (0) and high (1), held to the axis; 0 on a log axis goes to low."""
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def nice_step(span: float, count: int) -> float:
    """Returns the smallest of 1, 2, 5 x 10^n that divides ``span`` into at most ``count`` parts.

    >>> nice_step(0.93, 5)
    0.2
    """
    raw = span / count
    magnitude: float = 10.0 ** math.floor(math.log10(raw))
    return next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * (1 - _EPSILON))


def _ticks(low: float, high: float, positions: Sequence[float], labels: Sequence[str]) -> tuple[Tick, ...]:
    return tuple(
        Tick(percent=round(100 * (position - low) / (high - low), 3), label=label)
        for position, label in zip(positions, labels, strict=True)
    )


def linear_axis(values: Sequence[float], *, parts: int = 5) -> Axis:
    """Returns an axis that starts and ends on round values around ``values``.

    It includes 0 when all values are of one sign and the smallest is less than half the largest.
    """
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low, high = (0.0 if 0 <= low < high / 2 else low), (0.0 if low / 2 < high <= 0 else high)
    if high - low <= _EPSILON * max(abs(low), abs(high)):
        padding = abs(low) / 2 or 0.5
        low, high = low - padding, high + padding
    step = nice_step(high - low, parts)
    first, last = math.floor(low / step + _EPSILON), math.ceil(high / step - _EPSILON)
    positions = [index * step for index in range(first, last + 1)]
    decimals = max(0, -math.floor(math.log10(step)))
    scientific = decimals > 4 or step >= 1e6
    labels = [f"{p:.3g}" if scientific else f"{p:.{decimals}f}" for p in positions]
    return Axis(low=positions[0], high=positions[-1], ticks=_ticks(positions[0], positions[-1], positions, labels))


def step_axis(first: int, last: int, *, parts: int = 10) -> Axis:
    """Returns an axis over whole steps with half a step of room at both ends."""
    low, high = first - 0.5, last + 0.5
    step = max(1, round(nice_step(max(1, last - first), parts)))
    positions = [s for s in range(first, last + 1) if s % step == 0 or s == first]
    if len(positions) > 1 and positions[1] - positions[0] < 0.75 * step:  # the labels would touch
        del positions[1]
    return Axis(low=low, high=high, ticks=_ticks(low, high, positions, [str(p) for p in positions]))


def log_axis(values: Sequence[float], *, max_labels: int = 6) -> Axis:
    """Returns an axis over whole decades. If a value is 0, a decade is added at the low end and labelled 0."""
    positive = [value for value in values if value > 0]
    low = math.floor(math.log10(min(positive)) + _EPSILON) if positive else -1
    high = math.ceil(math.log10(max(positive)) - _EPSILON) if positive else 0
    high = max(high, low + 1)
    has_zero = len(positive) < len(values)
    stride = math.ceil((high - low + 1) / max_labels)
    decades = range(low, high + 1, stride)
    low -= stride if has_zero else 0
    ticks = [
        Tick(
            percent=round(100 * (d - low) / (high - low), 3), label="10", exponent=str(d).replace("-", "\N{MINUS SIGN}")
        )
        for d in decades
    ]
    zero = [Tick(percent=0.0, label="0")] if has_zero else []
    return Axis(low=low, high=high, ticks=(*zero, *ticks), log=True)


def time_axis(span_s: float, *, parts: int = 10) -> Axis:
    """Returns an axis from 0 to ``span_s`` seconds with ticks at round seconds, or minutes and seconds."""
    span_s = max(span_s, _EPSILON)
    raw = span_s / parts
    step = next((s for s in _TIME_STEPS_S if s >= raw), nice_step(span_s / 3600, parts) * 3600)
    positions = [index * step for index in range(math.floor(span_s / step + _EPSILON) + 1)]
    return Axis(low=0.0, high=span_s, ticks=_ticks(0.0, span_s, positions, [format_time(p, step) for p in positions]))


def format_time(seconds: float, step: float = 1.0) -> str:
    """Formats a tick of a time axis.

    >>> format_time(90, 30), format_time(0.2, 0.1), format_time(7200, 600)
    ('1:30', '0.2 s', '2:00:00')
    """
    if step >= 30 or seconds >= 600:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
    decimals = max(0, -math.floor(math.log10(step)))
    return f"{seconds:.{decimals}f} s"


Point = tuple[float, float]
"""Position in the box, y downwards."""


def place(x_axis: Axis, y_axis: Axis, x: float, y: float) -> Point:
    """Returns the position of a value in the box."""
    return x_axis.fraction(x) * WIDTH, (1 - y_axis.fraction(y)) * HEIGHT


def line_path(points: Sequence[Point | None]) -> str:
    """Returns the path of a curve, broken at None."""
    parts, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        parts.append(f"{pen}{point[0]:.1f} {point[1]:.1f}")
        pen = "L"
    return "".join(parts)


def dots_path(points: Sequence[Point | None]) -> str:
    """Returns a path of strokes without length, which round caps make dots that no stretching distorts."""
    padded = [None, *points, None]
    alone = [
        p for before, p, after in zip(padded, padded[1:], padded[2:], strict=False) if before is None and after is None
    ]
    chosen = points if len(points) <= MAX_DOTS else alone
    return "".join(f"M{point[0]:.1f} {point[1]:.1f}h0" for point in chosen if point is not None)
