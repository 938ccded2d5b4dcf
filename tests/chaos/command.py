"""The ``rl-safe`` command with faults in its ranks: ``python -m tests.chaos.command run ...``.

The faults are in the environment variable of `tests.chaos.plan`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rl_safe_workers.cli.main import main
from rl_safe_workers.driver.cluster import cluster
from rl_safe_workers.driver.cluster.actors import ActorShell, RolloutActor, TrainerActor
from tests.chaos.plan import VARIABLE, from_json


class ChaosShell(ActorShell):
    """Tells its worker of the faults; Ray sends this class by value, and the faults with it."""

    faults = from_json(os.environ[VARIABLE])

    def _build(self) -> Any:
        worker = super()._build()
        worker.expect(self.faults)
        return worker


class ChaosTrainerActor(ChaosShell, TrainerActor):
    """As text, because this process is to import no torch."""

    target = "tests.chaos.workers:ChaosTrainer"


class ChaosRolloutActor(ChaosShell, RolloutActor):
    """As text, because this process is to import no vLLM."""

    target = "tests.chaos.rollouts:ChaosRollout"


if __name__ == "__main__":
    cluster.TrainerActor = ChaosTrainerActor  # type: ignore[attr-defined]
    cluster.RolloutActor = ChaosRolloutActor  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[1:]))
