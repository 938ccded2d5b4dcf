from __future__ import annotations

import pytest

from rl_safe_workers.driver.charts import (
    MAX_DOTS,
    dots_path,
    format_time,
    line_path,
    linear_axis,
    log_axis,
    nice_step,
    place,
    step_axis,
    time_axis,
)


def labels(axis):
    return [tick.label + tick.exponent for tick in axis.ticks]


@pytest.mark.parametrize(("span", "step"), [(1.0, 0.2), (0.93, 0.2), (7.0, 2.0), (100.0, 20.0), (3e-7, 1e-7)])
def test_a_step_is_one_two_or_five_times_a_power_of_ten(span, step) -> None:
    assert nice_step(span, 5) == pytest.approx(step)


def test_a_linear_axis_has_round_ends_and_includes_a_near_zero() -> None:
    axis = linear_axis([0.09, 0.81])
    assert (axis.low, axis.high) == pytest.approx((0.0, 1.0))
    assert labels(axis) == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def test_a_linear_axis_of_one_value_has_room_around_it() -> None:
    for value in (0.0, 0.5, -3.0):
        axis = linear_axis([value])
        assert axis.low < value < axis.high


def test_every_value_lies_on_its_axis() -> None:
    for values in ([-0.3, 0.2], [5.01, 5.02], [1e6, 3e6], [-8.0, -1.0]):
        axis = linear_axis(values)
        assert axis.low <= min(values)
        assert axis.high >= max(values)
        assert 3 <= len(axis.ticks) <= 8


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 20), (11, 20), (1, 300), (7, 1000)])
def test_steps_are_labelled_with_distinct_whole_numbers(first, last) -> None:
    shown = [int(label) for label in labels(step_axis(first, last))]
    assert shown[0] == first
    assert shown == sorted(set(shown))
    assert len(shown) <= 12


def test_a_log_axis_covers_whole_decades() -> None:
    axis = log_axis([3e-7, 2e-6, 1e-5])
    assert labels(axis) == ["10\N{MINUS SIGN}7", "10\N{MINUS SIGN}6", "10\N{MINUS SIGN}5"]
    assert axis.fraction(1e-6) == pytest.approx(0.5)


def test_zero_gets_a_place_of_its_own_on_a_log_axis() -> None:
    axis = log_axis([0.0, 1e-6, 1e-5])
    assert labels(axis)[0] == "0"
    assert axis.fraction(0.0) == 0.0
    assert axis.fraction(1e-6) > 0.3


def test_many_decades_are_not_all_labelled() -> None:
    assert len(log_axis([1e-20, 1.0]).ticks) <= 7


def test_a_log_axis_of_zeros_alone_is_drawn() -> None:
    assert log_axis([0.0]).fraction(0.0) == 0.0


@pytest.mark.parametrize("span_s", [0.0, 0.05, 3.2, 51.0, 700.0, 5000.0, 90000.0])
def test_a_time_axis_starts_at_zero_and_stays_within_its_span(span_s) -> None:
    axis = time_axis(span_s)
    assert axis.ticks[0].percent == 0.0
    assert all(tick.percent <= 100.0 for tick in axis.ticks)
    assert len(axis.ticks) <= 11


def test_times_carry_their_unit() -> None:
    assert format_time(5, 5) == "5 s"
    assert format_time(0.25, 0.05) == "0.25 s"
    assert format_time(3660, 60) == "1:01:00"


def test_a_curve_breaks_where_a_value_is_missing() -> None:
    assert line_path([(0.0, 1.0), (2.0, 3.0), None, (4.0, 5.0)]) == "M0.0 1.0L2.0 3.0M4.0 5.0"


def test_a_point_without_neighbours_keeps_its_dot_in_a_long_curve() -> None:
    points = [(float(x), 0.0) for x in range(MAX_DOTS)]
    assert dots_path(points).count("M") == MAX_DOTS
    assert dots_path([*points, None, (999.0, 0.0)]) == "M999.0 0.0h0"


def test_larger_values_are_drawn_higher() -> None:
    axis = linear_axis([0.0, 1.0])
    assert place(axis, axis, 0.0, 1.0)[1] < place(axis, axis, 0.0, 0.5)[1]
