"""The rollout rank of `tests.chaos.workers`, in a module of its own: trainers import no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role
from rl_safe_workers.rollout import vllm_transfer
from rl_safe_workers.rollout.protocol import Sample
from rl_safe_workers.rollout.vllm import VllmRollout
from rl_safe_workers.rollout.vllm_transfer import JointWeightTransferEngine
from tests.chaos.plan import Fault
from tests.chaos.striker import ChaosLifecycle, Striker


class ChaosRollout(VllmRollout):
    """A rollout rank in which a fault may strike."""

    striker: Striker

    def expect(self, faults: Sequence[Fault]) -> None:
        """Prepares this process for the run's faults, which may be others'. Comes before everything else."""
        self.striker = striker = Striker(
            faults, role=Role.ROLLOUT, rank=self.rollout_rank, timeouts=self.config.rl_safe.timeouts
        )
        self.lifecycle = lifecycle = ChaosLifecycle(striker)

        class ChaosEngine(JointWeightTransferEngine):
            def _load(self, number: int, *arguments: Any) -> None:
                if number == 1:
                    striker.inside(Phase.SYNC)
                super()._load(number, *arguments)

            def shutdown(self) -> None:
                if lifecycle.current is Phase.TEARDOWN:
                    striker.inside(Phase.TEARDOWN)
                super().shutdown()

        vllm_transfer.JointWeightTransferEngine = ChaosEngine  # type: ignore[misc]

    def _to_sample(self, output: Any) -> Sample:
        self.striker.inside(Phase.ROLLOUT)
        return super()._to_sample(output)
