"""The ``rl-safe`` command with a faulty wire: ``python -m tests.integration.corrupted_command N run ...``.

One bit of the first ``N`` weight syncs arrives flipped in the rollout rank.
"""

from __future__ import annotations

import sys
from typing import Any

from rl_safe_workers.cli.main import main
from rl_safe_workers.driver.cluster import cluster
from rl_safe_workers.driver.cluster.actors import RolloutActor


class CorruptedActor(RolloutActor):
    """As text, because this process is to import no vLLM; Ray sends this class by value, and the number with it."""

    target = "tests.integration.corrupted_rollout:CorruptedRollout"
    syncs = int(sys.argv[1])

    def _build(self) -> Any:
        worker = super()._build()
        worker.corrupt(self.syncs)
        return worker


if __name__ == "__main__":
    cluster.RolloutActor = CorruptedActor  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[2:]))
