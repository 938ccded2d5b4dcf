"""The ``rl-safe`` command with a trainer that fails: ``python -m tests.integration.faulty_command FAULT run ...``."""

from __future__ import annotations

import os
import sys

from rl_safe_workers.cli.main import main
from rl_safe_workers.driver import cluster
from rl_safe_workers.driver.actors import TrainerActor


class FaultyActor(TrainerActor):
    """As text, because this process is to import no torch; Ray sends this class by value."""

    target = "tests.integration.faulty_trainer:FaultyTrainer"


if __name__ == "__main__":
    os.environ["RL_SAFE_TEST_FAULT"] = sys.argv[1]
    cluster.TrainerActor = FaultyActor  # type: ignore[misc]
    sys.exit(main(sys.argv[2:]))
