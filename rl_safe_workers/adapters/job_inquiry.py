"""Asks the ranks of a job on one machine where they are. Imports no torch: an actor on each node uses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_safe_workers.diagnostics.inquiry import Answers, RankProcess, ask_ranks
from rl_safe_workers.diagnostics.stacks import CallFrame
from rl_safe_workers.ranks import HELPERS, RankId

SYNC_CALL = CallFrame("adapters/weight_update.py", "_on_this_thread")
"""The frame in which a weight sync runs."""
ROLLOUT = "the rollout"
"""Prefix of the words for the rollout, if a trainer does not know which engine its weight sync waits for."""
CALL_FRAME = CallFrame(
    "ray/_private/function_manager.py",
    "actor_method_executor",
    # verl's sync is a coroutine. Ray runs coroutines outside of `actor_method_executor`.
    CallFrame("adapters/verl/coroutine_update.py", "run", SYNC_CALL),
)
"""The frame in which the calls of a rank's actor run. Constructors count as no call: Ray reports nothing about them."""
HELPER_FRAME = CallFrame(
    "verl/experimental/agent_loop/agent_loop.py",
    "_run_agent_loop",
    CallFrame("concurrent/futures/thread.py", "run", CALL_FRAME),
)
"""The frame in which a helper works. A helper is an actor that neither trains nor generates. verl's agent loops are
tasks of their own. Its reward functions run on a thread pool (reward_manager/naive.py:75). A coroutine that awaits
something is in neither frame."""

Place = tuple[RankId, int]
"""A rank and the id of its process."""


def ask_here(places: Sequence[Place], patience_s: float, folder: Path | None, *, logs: Path | None = None) -> Answers:
    """Asks ranks on this machine where they are; returns their answers.

    Args:
        places: The ranks, each of them a Ray actor, with the ids of their processes.
        patience_s: Longest wait, in seconds.
        folder: Where the ranks leave their answers; None if that is unknown.
        logs: The folder of Ray's logs on this machine; None if that is unknown.
    """
    ranks = [
        RankProcess(
            rank_id=rank_id,
            pid=pid,
            folder=folder,
            never_ends=True,
            call_frame=HELPER_FRAME if rank_id.role in HELPERS else None,
        )
        for rank_id, pid in places
    ]
    return ask_ranks(lambda: ranks, patience_s=patience_s, folder=folder, call_frame=CALL_FRAME, logs=logs)
