"""Makes the error about a vLLM engine that has not answered in time."""

from __future__ import annotations

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import RolloutError
from rl_safe_workers.ranks import RankId
from rl_safe_workers.setting_names import timeout_setting


def silent_engine(engine: str, phase: str, deadline: Deadline, rank_id: RankId | None = None) -> RolloutError:
    """Returns the error about a vLLM engine that has not answered in time.

    Args:
        engine: Words for the engine.
        phase: The phase whose timeout applies.
        deadline: The deadline that has passed.
        rank_id: The engine's rank; None if the driver does not know the engine as a process.
    """
    return RolloutError(
        f"phase {phase}: {engine} did not answer within {deadline.waited_s:.1f} s; "
        f"to wait longer raise {timeout_setting(phase)}",
        culprit=rank_id,
    )
