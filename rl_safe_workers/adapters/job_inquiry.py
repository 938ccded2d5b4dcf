"""Where the ranks of a job are that run on one machine. Imports no torch: an actor on each node uses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_safe_workers.diagnostics.inquiry import Answers, RankProcess, ask_ranks
from rl_safe_workers.diagnostics.stacks import CallFrame
from rl_safe_workers.ranks import HELPERS, RankId

SYNC_CALL = CallFrame("adapters/weight_update.py", "_on_this_thread")
"""Where a weight sync runs."""
CALL_FRAME = CallFrame(
    "ray/_private/function_manager.py",
    "actor_method_executor",
    # verl's sync is a coroutine, and Ray runs those outside of its own function.
    CallFrame("adapters/verl/coroutine_update.py", "run", SYNC_CALL),
)
"""Where the calls of a rank's actor run. Of its constructor Ray says nothing, so that counts as no call."""
HELPER_FRAME = CallFrame(
    "verl/experimental/agent_loop/agent_loop.py",
    "_run_agent_loop",
    CallFrame("concurrent/futures/thread.py", "run", CALL_FRAME),
)
"""Where the work of an actor runs that neither trains nor generates: verl's agent loops are tasks of their own, and its
reward functions run on a pool of threads (reward_manager/naive.py:75). One that awaits something is in neither."""

Place = tuple[RankId, int]
"""A rank and the id of its process."""


def ask_here(places: Sequence[Place], patience_s: float, folder: Path | None, *, logs: Path | None = None) -> Answers:
    """Asks ranks on this machine where they are.

    Args:
        places: The ranks, each an actor of Ray's, with the ids of their processes.
        patience_s: Longest wait, in seconds.
        folder: Where they leave their answers; None: nobody knows.
        logs: The folder of Ray's logs on this machine; None: nobody knows.
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
