"""The error about a vLLM engine that has not answered in time."""

from __future__ import annotations

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import RolloutError
from rl_safe_workers.ranks import RankId


def silent_engine(engine: str, phase: str, deadline: Deadline, rank_id: RankId | None = None) -> RolloutError:
    """Returns the error.

    Args:
        engine: Which engine.
        phase: The phase whose timeout bounds it.
        deadline: What has passed.
        rank_id: The engine, where it is a process that the driver knows.
    """
    return RolloutError(
        f"phase {phase}: {engine} did not answer within {deadline.waited_s:.1f} s; "
        f"to wait longer raise rl_safe.timeouts.{phase}",
        culprit=rank_id,
    )
