"""The ``rl-safe`` command with trainers that count what they hold: ``python -m tests.chaos.counting_command run``."""

from __future__ import annotations

import os
import sys
from typing import Any

from rl_safe_workers.cli.main import main
from rl_safe_workers.driver.cluster import cluster
from rl_safe_workers.driver.cluster.actors import TrainerActor

COUNTS = "RL_SAFE_TEST_COUNTS"
"""Names the file that training rank 0 adds a line to in each step."""


class CountingActor(TrainerActor):
    """As text, because this process is to import no torch; Ray sends this class by value, and the file with it."""

    target = "tests.chaos.counting_trainer:CountingTrainer"
    file = os.environ.get(COUNTS, "")

    def _build(self) -> Any:
        worker = super()._build()
        worker.counts_to = self.file
        return worker


if __name__ == "__main__":
    cluster.TrainerActor = CountingActor  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[1:]))
