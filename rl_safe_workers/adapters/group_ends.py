"""Waits in the driver for the end of a host's worker groups, and reports ranks that are late or have failed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import ray

from rl_safe_workers.adapters.driver_waits import last_line
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import NO_OUTCOME
from rl_safe_workers.diagnostics.blame import late_for_the_end
from rl_safe_workers.errors import RunError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import format_ranks
from rl_safe_workers.setting_names import timeout_setting

AFTER_FAILURE_S = 4.0
"""Seconds that ranks get to abort their groups after a failure. A rank that waits for another one does not answer."""
_LATER_THAN_OTHERS = timedelta(seconds=2)
"""Extra time for a late rank to end, after another rank has given up waiting for it."""


class GroupEnd(NamedTuple):
    """How the ranks of a worker group have ended."""

    size: int
    late: frozenset[int]
    """Ranks that have not ended."""
    waited_s: float
    text: str
    """The errors of ranks; empty if no rank has failed."""


def end_of(calls: Sequence[Any], patience_s: float) -> GroupEnd:
    """Waits until every rank has ended its groups. Stops early if a rank has already given up on a late rank.

    Args:
        calls: For each rank, in order, the Ray reference to the result of `SafeTrainer.teardown`: failures by rank.
        patience_s: Longest wait, in seconds.
    """
    ranks = {call: rank for rank, call in enumerate(calls)}
    deadline, waiting, wrong, unheard = Deadline.after(patience_s), list(calls), list[str](), set[int]()
    while waiting and (done := ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline.left_s))[0]):
        waiting.remove(done[0])
        try:
            failures = ray.get(done[0])
        except ray.exceptions.RayError as error:
            wrong.append(f"rank {ranks[done[0]]}: {last_line(error)}")
            continue
        wrong += [f"rank {other}: {text}" for other, text in sorted(failures.items())]
        unheard.update(other for other, text in failures.items() if text == NO_OUTCOME)
        if unheard:
            deadline = deadline.at_most(_LATER_THAN_OTHERS)
    late = frozenset(ranks[call] for call in waiting)
    # The other late ranks only need a while to abort their groups.
    late = (late & unheard) or late
    if late:
        wrong.append(f"rank {format_ranks(late)} did not end within {deadline.waited_s:.0f} s")
    return GroupEnd(len(calls), late, deadline.waited_s, "; ".join(dict.fromkeys(wrong)))


def error_of(ends: Sequence[GroupEnd]) -> RunError | None:
    """Returns an error if a group ended late or with failures; None if all ended well. The error names late ranks."""
    late = {rank for end in ends for rank in end.late}
    if late:
        return late_for_the_end(
            late,
            size=max(end.size for end in ends),
            waited_s=max(end.waited_s for end in ends),
            setting=timeout_setting(Phase.TEARDOWN),
        )
    wrong = [end.text for end in ends if end.text]
    return RunError(f"teardown: {'; '.join(wrong)}") if wrong else None
