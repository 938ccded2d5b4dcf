"""Lists the places in NeMo RL's code in which a training rank waits for the rollout during a refit."""

from __future__ import annotations

from collections.abc import Sequence

from rl_safe_workers.adapters.job_inquiry import ROLLOUT
from rl_safe_workers.frames import Frame

ROLLOUT_PLACES = {
    "nemo_rl/utils/packed_tensor.py": ROLLOUT,
    "nemo_rl/distributed/stateless_process_group.py": ROLLOUT,
    "nemo_rl/weight_sync/": ROLLOUT,
    "megatron/core/resharding/": ROLLOUT,
    "nemo_rl/models/policy/workers/megatron_remote_sparse_refit.py": ROLLOUT,
    "nemo_rl/models/policy/utils.py": f"{ROLLOUT} engine on its GPU",
}
"""Files whose functions send weights to the rollout, each with words for what a rank waits for in it."""
BETWEEN_TRAINERS = ("megatron/core/", "megatron/bridge/", "nemo_rl/models/megatron/")
"""Files whose functions gather weights among the training ranks."""


def awaited_rollout(frames: Sequence[Frame]) -> str | None:
    """Returns words for the rollout if a sync's stack shows that it waits for the rollout; else None.

    The sending function calls a generator that gathers weights. So the innermost frame of either kind decides.

    Args:
        frames: The frames of the sync's thread, innermost first.
    """
    for frame in frames:
        if found := [name for place, name in ROLLOUT_PLACES.items() if place in frame.file]:
            return found[0]
        if any(place in frame.file for place in BETWEEN_TRAINERS):
            return None
    return None
