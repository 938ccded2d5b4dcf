"""The places in NeMo RL's code in which a training rank waits for the rollout in a refit."""

from __future__ import annotations

from collections.abc import Sequence

from rl_safe_workers.adapters.weight_update import ROLLOUT
from rl_safe_workers.frames import Frame

ROLLOUT_PLACES = {
    "nemo_rl/utils/packed_tensor.py": ROLLOUT,
    "nemo_rl/distributed/stateless_process_group.py": ROLLOUT,
    "nemo_rl/weight_sync/": ROLLOUT,
    "megatron/core/resharding/": ROLLOUT,
    "nemo_rl/models/policy/workers/megatron_remote_sparse_refit.py": ROLLOUT,
    "nemo_rl/models/policy/utils.py": f"{ROLLOUT} engine on its GPU",
}
"""Files whose functions send weights to the rollout, and what a rank waits for there."""
BETWEEN_TRAINERS = ("megatron/core/", "megatron/bridge/", "nemo_rl/models/megatron/")
"""Files whose functions gather weights among the training ranks."""


def awaited_rollout(frames: Sequence[Frame]) -> str | None:
    """Returns the rollout that a sync waits for; None if it waits for training ranks, as far as its stack shows.

    Weights are gathered by a generator that the sending function asks, so the innermost of both decides.

    Args:
        frames: Of the sync's thread, innermost first.
    """
    for frame in frames:
        if found := [name for place, name in ROLLOUT_PLACES.items() if place in frame.file]:
            return found[0]
        if any(place in frame.file for place in BETWEEN_TRAINERS):
            return None
    return None
