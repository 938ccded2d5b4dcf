"""Shows a run in a terminal, or line by line in a log file."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from rl_safe_workers.driver.outputs import metrics as names
from rl_safe_workers.driver.outputs.metrics import PhaseTotal
from rl_safe_workers.foreign_files import printable
from rl_safe_workers.plain_console import PlainConsole

GIB = 2**30
OUTSIDE_PHASES = "outside phases"

_STEP_COLUMNS = (
    ("mean reward", names.REWARD_MEAN, "{:.4f}"),
    ("logprob gap", names.LOGPROB_GAP_MAX, "{:.2e}"),
    ("loss", names.LOSS, "{:+.2e}"),
    ("grad norm", names.GRAD_NORM, "{:.4f}"),
)


class _Status(ProgressColumn):
    """A progress column. A phase shows its seconds and its timeout; the run shows its step and current phase."""

    def render(self, task: Task) -> RenderableType:
        if task.total is None:
            return Text(f"{task.elapsed or 0.0:.1f} s of at most {task.fields['timeout_s']:g} s", style="cyan")
        return Text(f"step {int(task.completed)}/{int(task.total)}  {task.fields['phase']}", style="cyan")


def format_step(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """Formats one line for a finished step. Shows a missing metric as ``-``.

    >>> format_step(3, 20, {"reward/mean": 0.25, "timing_s/step": 1.5})
    'step  3/20  mean reward 0.2500  logprob gap -  loss -  grad norm -  1.50 s'
    """
    cells = [f"{label} {form.format(metrics[key]) if key in metrics else '-'}" for label, key, form in _STEP_COLUMNS]
    seconds = f"{metrics[names.STEP_SECONDS]:.2f} s" if names.STEP_SECONDS in metrics else "- s"
    return "  ".join([f"step {step:>{len(str(total))}}/{total}", *cells, seconds])


class RunConsole:
    """Shows a run: live progress bars in a terminal, plain single lines anywhere else.

    Without a terminal it writes no escape codes. Each phase and each step is one line, written when it ends. Make one
    instance per process. Not thread-safe.

    Attributes:
        console: The console for all output. Give it to ``rich.logging.RichHandler``, so that log lines and progress
            bars do not mix.
    """

    def __init__(self, console: Console | None = None) -> None:
        # FORCE_COLOR may ask for colours in a log file, but a log file can never show moving bars.
        self.console = console or PlainConsole(force_interactive=None if sys.stdout.isatty() else False)
        ascii_only = self.console.options.ascii_only
        self._ok, self._failed = ("ok", "FAILED") if ascii_only else ("✓", "✗")
        self._progress = Progress(
            SpinnerColumn("line" if ascii_only else "dots"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            _Status(),
            console=self.console,
            transient=True,
            refresh_per_second=5,  # leaves the machine's cores to the trainers
            disable=not self.console.is_interactive,
        )
        self._steps: TaskID | None = None
        self._total = 0

    def header(self, lines: Mapping[str, str]) -> None:
        """Prints a description of the run, one aligned line ``label  value`` for each entry."""
        width = max(map(len, lines), default=0)
        for label, value in lines.items():
            self._print(Text(f"{label:<{width}}  ", style="bold").append(Text(printable(value), style="not bold")))

    @contextmanager
    def phase(self, name: str, timeout_s: float) -> Iterator[None]:
        """Shows a phase while the body runs, then prints one line with its seconds. An exception marks it as failed.

        Phases may nest, and may run inside ``steps``.

        Args:
            name: Name of the phase.
            timeout_s: Timeout of the phase in seconds. It is shown, not enforced.
        """
        started_s, ok = time.monotonic(), False
        try:
            with self._task(name, total=None, timeout_s=timeout_s):
                yield
                ok = True
        finally:
            mark, style = (self._ok, "green") if ok else (self._failed, "bold red")
            self._print(
                Text(mark, style=style).append(f" {name} {time.monotonic() - started_s:.2f} s", style="default")
            )

    @contextmanager
    def steps(self, total: int, start: int) -> Iterator[None]:
        """Shows the overall bar over training steps while the body runs.

        Args:
            total: Number of steps of the whole run.
            start: Number of steps that the checkpoint had completed; 0 for a run from the beginning.
        """
        self._total = total
        try:
            with self._task("training", total=total, completed=start) as self._steps:
                yield
        finally:
            self._steps = None

    def step_phase(self, name: str) -> None:
        """Shows the current phase in the bar over steps. Does nothing without a terminal or outside ``steps``."""
        if self._steps is not None:
            self._progress.update(self._steps, phase=name)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line of a finished step and moves the bar. The line is red if a number in it is not finite.

        Call it inside ``steps``.

        Args:
            step: The step, counted from 1.
            metrics: The step's metrics, by the names of ``driver.metrics``.
        """
        if self._steps is not None:
            self._progress.update(self._steps, completed=step)
        finite = all(math.isfinite(metrics[key]) for _, key, _ in _STEP_COLUMNS if key in metrics)
        self._print(Text(format_step(step, self._total, metrics), style="default" if finite else "red"))

    def warn(self, *lines: str) -> None:
        """Prints warnings above the bars."""
        for line in lines:
            self._print(Text(printable(line), style="yellow"))

    def summary(self, phases: Mapping[str, PhaseTotal], wall_s: float, peak_bytes: int, run_dir: Path) -> None:
        """Prints the table of phases and a closing line.

        Args:
            phases: Totals by phase, in the order to show.
            wall_s: Seconds from start to end.
            peak_bytes: Peak memory in bytes of all processes together.
            run_dir: Folder that holds ``report.html``.
        """
        self.console.print(_phase_table(phases, wall_s))
        memory = f"peak memory {peak_bytes / GIB:.2f} GiB over all processes"
        line = f"wall {wall_s:.1f} s, {memory}, report {run_dir / 'report.html'}"
        self._print(Text(printable(line), style="bold"))

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)

    @contextmanager
    def _task(
        self, description: str, *, total: int | None, completed: int = 0, timeout_s: float = 0.0
    ) -> Iterator[TaskID]:
        if not self._progress.tasks:
            self._progress.start()
        task = self._progress.add_task(description, total=total, completed=completed, timeout_s=timeout_s, phase="")
        try:
            yield task
        finally:
            self._progress.remove_task(task)
            if not self._progress.tasks:
                self._progress.stop()


def _phase_table(phases: Mapping[str, PhaseTotal], wall_s: float) -> Table:
    table = Table(title="phases", title_justify="left", highlight=False)
    table.add_column("phase")
    for heading in ("count", "total s", "mean s", "share of wall"):
        table.add_column(heading, justify="right")
    for name, total in phases.items():
        table.add_row(Text(name), str(total.count), *_seconds_cells(total, wall_s))
    outside = PhaseTotal().plus(wall_s - sum(total.total_s for total in phases.values()))
    if outside.total_s > 0:  # phases that overlap may add up to more than the wall time
        table.add_row(Text(OUTSIDE_PHASES, style="dim"), "", *_seconds_cells(outside, wall_s))
    return table


def _seconds_cells(total: PhaseTotal, wall_s: float) -> tuple[str, str, str]:
    share = total.total_s / wall_s if wall_s > 0 else 0.0
    return f"{total.total_s:.2f}", f"{total.mean_s:.3f}", f"{share:.1%}"
