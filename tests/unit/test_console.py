from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from rl_safe_workers.driver.outputs.console import RunConsole, format_step
from rl_safe_workers.driver.outputs.metrics import PhaseTotal
from rl_safe_workers.plain_console import PlainConsole

METRICS = {
    "reward/mean": 0.25,
    "rollout/logprob_gap_max": 3.14e-06,
    "actor/loss": -0.0123,
    "actor/grad_norm": 0.5,
    "timing_s/step": 1.5,
}


def plain() -> tuple[RunConsole, io.StringIO]:
    out = io.StringIO()
    return RunConsole(Console(file=out, force_terminal=False, force_interactive=False)), out


def terminal() -> tuple[RunConsole, io.StringIO]:
    out = io.StringIO()
    return RunConsole(Console(file=out, force_terminal=True, force_interactive=True, width=120)), out


def test_a_phase_is_one_line_with_its_seconds_without_a_terminal() -> None:
    view, out = plain()
    with view.phase("bootstrap", 300.0):
        assert out.getvalue() == ""
    assert re.fullmatch(r"✓ bootstrap \d+\.\d\d s\n", out.getvalue())


def test_a_failed_phase_is_marked_and_its_exception_passes() -> None:
    view, out = plain()
    with pytest.raises(KeyError), view.phase("bootstrap", 300.0):
        raise KeyError
    assert re.fullmatch(r"✗ bootstrap \d+\.\d\d s\n", out.getvalue())


def test_text_from_files_is_shown_as_it_is() -> None:
    out = io.StringIO()
    view = RunConsole(PlainConsole(file=out, force_terminal=False, force_interactive=False, width=200))
    hostile = "[red]x[/] :boom: \x1b[2J\x07\u202e"
    view.header({"run": hostile})
    view.warn(hostile)
    view.summary({"step": PhaseTotal()}, 1.0, 0, Path(hostile))
    table = Table("name", title=hostile)
    table.add_row(hostile)
    view.console.print(table)
    view.console.print(hostile)
    assert out.getvalue().count(r"[red]x[/] :boom: \x1b[2J\x07\u202e") == 6
    assert all(line.isprintable() for line in out.getvalue().splitlines())


def test_output_without_a_terminal_has_no_escape_code() -> None:
    view, out = plain()
    view.header({"run": "quickstart", "layout": "TP1 EP2"})
    with view.steps(total=2, start=0):
        view.step_phase("rollout")
        view.step_done(1, METRICS)
        with view.phase("save", 60.0):
            pass
    view.summary({"start": PhaseTotal(count=1, total_s=1.0)}, 2.0, 2**30, Path("outputs/x"))
    assert "\x1b" not in out.getvalue()
    assert "rollout" not in out.getvalue()


def test_a_terminal_shows_the_timeout_of_the_running_phase() -> None:
    view, out = terminal()
    with view.phase("bootstrap", 300.0):
        view._progress.refresh()
    assert "s of at most 300 s" in out.getvalue()


def test_a_terminal_shows_the_phase_of_the_step() -> None:
    view, out = terminal()
    with view.steps(total=20, start=4):
        view.step_phase("logprob")
        view._progress.refresh()
    assert "step 4/20  logprob" in out.getvalue()


def test_the_bars_are_gone_after_an_exception() -> None:
    view, _ = terminal()
    with pytest.raises(KeyError), view.steps(total=20, start=0), view.phase("save", 60.0):
        raise KeyError
    assert view._progress.tasks == []
    assert not view._progress.live.is_started


def test_a_long_line_is_not_wrapped() -> None:
    view, out = plain()
    view.header({"versions": "x" * 300})
    assert out.getvalue() == f"versions  {'x' * 300}\n"


def test_text_that_looks_like_markup_is_shown_as_it_is() -> None:
    view, out = plain()
    view.header({"model": "models/[bold]tiny"})
    with view.phase("[red]odd", 1.0):
        pass
    assert "models/[bold]tiny" in out.getvalue()
    assert "[red]odd" in out.getvalue()


def test_a_step_line_holds_every_figure() -> None:
    line = format_step(3, 20, METRICS)
    assert line == ("step  3/20  mean reward 0.2500  logprob gap 3.14e-06  loss -1.23e-02  grad norm 0.5000  1.50 s")


def test_an_absent_or_infinite_figure_does_not_break_the_step_line() -> None:
    assert "loss +nan" in format_step(1, 2, {"actor/loss": float("nan")})
    assert "mean reward -" in format_step(1, 2, {})


def test_the_summary_gives_count_seconds_and_share_of_each_phase() -> None:
    view, out = plain()
    totals = {"rollout": PhaseTotal(count=20, total_s=10.0), "train": PhaseTotal(count=20, total_s=5.0)}
    view.summary(totals, 20.0, 3 * 2**30, Path("outputs/quickstart"))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert ["rollout", "20", "10.00", "0.500", "50.0%"] in rows
    assert ["outside phases", "", "5.00", "5.000", "25.0%"] in rows
    last = out.getvalue().splitlines()[-1]
    assert last == "wall 20.0 s, peak memory 3.00 GiB over all processes, report outputs/quickstart/report.html"


def test_a_summary_of_overlapping_phases_has_no_negative_rest() -> None:
    view, out = plain()
    view.summary({"start": PhaseTotal(count=2, total_s=8.0)}, 5.0, 0, Path("x"))
    assert "outside phases" not in out.getvalue()


@pytest.mark.parametrize("live", [False, True])
def test_an_ascii_output_gets_ascii(live) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    view = RunConsole(Console(file=out, force_terminal=live, force_interactive=live))
    with view.phase("save", 1.0):
        view._progress.refresh()
    view.summary({}, 1.0, 0, Path("x"))
    out.seek(0)
    assert "ok" in out.read()
