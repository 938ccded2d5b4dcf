"""The results of the whole matrix as ``docs/reliability.md``."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_safe_workers.versions import installed_versions
from tests.chaos.cases import GENEROUS_TIMEOUT_S, SLACK_S, TIMEOUT_S, TRAINERS, Case
from tests.chaos.machine import ENDS, WAIT_S
from tests.chaos.plan import Kind
from tests.chaos.striker import LATE_S, NOTICED_S

FAILED = "FAILED"

HEAD = """# Reliability

What happens when a rank fails. Each cell of the table is one fault, of one rank, in one phase of a whole run. The runs
have Ray, gloo, {trainers} trainers and one vLLM rollout rank. `scripts/test --chaos` runs all cells and writes this
page.

| column | the rank |
|---|---|
| kill | gets SIGKILL inside the phase |
| raise | raises an exception inside the phase |
| stall | stops inside the phase and never continues |
| late | comes to the phase {late:.0f} s after its timeout has passed |
| exit | ends with status 0 on entering the phase, without teardown |
| kill, restart; raise, restart | the same on entering the phase, with `rl_safe.restarts` |

Without restarts, every cell is a run of its own. With restarts, one run takes the faults of a phase one after another.
`scripts/test --chaos --chaos-again -k NAME` repeats the cells of that name and keeps the rest of the page.

A cell gives the seconds from the fault to the end of the run. With a restart, it gives the seconds until the run has
come to the same phase again, or to its end if nothing was left to train. Each cell is a test that passed:

- The run ended within the timeout of the phase + {slack:.0f} s. The timeout was {short:.0f} s for stall and late, and
  {generous:.0f} s for the others. The exit code was 1. The error named the rank and the phase.
- No process, no file in `/dev/shm` and no temporary file was left.
- The newest complete checkpoint had the digests of an undisturbed run. Every byte of it was read.
- With a restart, the run completed. Each step was recorded once, with the reward of the undisturbed run. The last
  checkpoint was the same, too.

`-` is a fault that cannot happen. A rank that takes no part in a phase runs none of its code and waits to be called. It
can be killed or exit, but it cannot raise, stall or be late.
"""

MACHINE_HEADING = "## Faults of the machine"
MACHINE_HEAD = (
    MACHINE_HEADING
    + """

Each row is a test that passed. The run ended as the row says. No process, no file in `/dev/shm` and no temporary file
was left. The newest complete checkpoint had the digests of an undisturbed run.

The seconds are from the fault to the end of the run, if the fault ends the run. The bound is {slack:.0f} s. If the
others have to wait for a rank, it is longer by the timeout of the phase, {short:.0f} s. If that rank was idle, it is
longer by another {noticed:.1f} s, because nobody misses the rank until the next phase.
`scripts/test --chaos --chaos-again -k machine` runs these tests alone and
keeps the rest of the page.
"""
)


def render(results: Mapping[Case, float | None], notes: Sequence[str]) -> str:
    """The page.

    Args:
        results: Seconds of each case; None for one that failed.
        notes: Sentences about the rest.
    """
    columns = list(dict.fromkeys(case.column for case in sorted(results, key=lambda case: case.restarts)))
    rows = list(dict.fromkeys(case.row for case in results))
    cells = {(case.row, case.column): FAILED if s is None else f"{s:.1f}" for case, s in results.items()}
    lines = [
        HEAD.format(
            trainers=TRAINERS, late=LATE_S, slack=SLACK_S, short=TIMEOUT_S[Kind.STALL], generous=GENEROUS_TIMEOUT_S
        ),
        _line(["phase", "rank", *columns]),
        _line(["---"] * 2 + ["---:"] * len(columns)),
        *(
            _line([phase, f"{role} {rank}", *(cells.get(((phase, role, rank), column), "-") for column in columns)])
            for phase, role, rank in rows
        ),
        "",
        _wrap(f"{sum(s is not None for s in results.values())} of {len(results)} cases passed. {' '.join(notes)}"),
        "",
        _wrap(_machine()),
    ]
    return "\n".join(lines) + "\n"


def render_machine(results: Mapping[str, float | None]) -> str:
    """The part about faults of the machine.

    Args:
        results: Seconds of each `MachineFault`, 0 where none are counted; None for one that failed.
    """
    cells = {name: FAILED if s is None else f"{s:.1f}" if s else "" for name, s in results.items()}
    lines = [
        MACHINE_HEAD.format(slack=SLACK_S, short=WAIT_S, noticed=NOTICED_S),
        _line(["fault", "how the run ends", "s"]),
        _line(["---", "---", "---:"]),
        *(_line([fault, ends, cells[fault]]) for fault, ends in ENDS.items()),
        "",
        f"{sum(s is not None for s in results.values())} of {len(results)} cases passed.",
        "",
        _wrap(_machine()),
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _wrap(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def _machine() -> str:
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    return f"Machine: {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}. Versions: {versions}."


def write(path: Path, *, matrix: str | None = None, machine: str | None = None) -> None:
    """Writes the page.

    Args:
        path: The page.
        matrix: What `render` returns; None leaves what is there.
        machine: What `render_machine` returns; None leaves what is there.
    """
    before, heading, after = path.read_text().partition(MACHINE_HEADING)
    path.write_text((matrix or before.rstrip("\n") + "\n") + "\n" + (machine or heading + after))
