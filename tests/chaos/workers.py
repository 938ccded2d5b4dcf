"""Workers with a marked point inside each phase, at which a fault can strike.

phase       role      point
groups      trainer   after Megatron's groups were made
bootstrap   trainer   in the place of the first collective with another rank
convert     trainer   after the model was built, before its weights are read
load        trainer   after everything was read and restored, before the ranks have agreed that it was
rollout     rollout   after the generation, before its result is returned
train       trainer   before the first optimizer step
sync        trainer   while it makes the second weight to be sent
sync        rollout   before it loads the second bucket
save        trainer   after the first tensor was written
teardown    trainer   after the verdicts, before the groups are destroyed
teardown    rollout   before it leaves the joint group
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_safe_workers.checkpoint.folders.manifest import Manifest
from rl_safe_workers.checkpoint.save import saver
from rl_safe_workers.checkpoint.save.writer import WrittenFile, write_items
from rl_safe_workers.comms.bootstrap import Bootstrap
from rl_safe_workers.comms.live_groups import LiveGroup
from rl_safe_workers.comms.teardown import destroy_groups
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.topology.groups import OpClass
from rl_safe_workers.trainer.batch import SequenceBatch
from rl_safe_workers.trainer.trainer_worker import TrainerWorker
from rl_safe_workers.workers import communicators, safe_trainer
from tests.chaos.plan import Fault
from tests.chaos.striker import ChaosLifecycle, Striker

SECOND = 1


def _marked(items: Iterable[Any], striker: Striker, phase: Phase) -> Iterator[Any]:
    for number, item in enumerate(items):
        if number == SECOND:
            striker.inside(phase)
        yield item


class ChaosTrainer(TrainerWorker):
    """A training rank in which a fault may strike."""

    striker: Striker

    def expect(self, faults: Sequence[Fault]) -> None:
        """Prepares this process for the run's faults, which may be others'. Comes before everything else."""
        self.striker = striker = Striker(
            faults, role=Role.TRAINER, rank=self._rank, timeouts=self.config.rl_safe.timeouts
        )

        class ChaosBootstrap(Bootstrap):
            def _issue(self, op_class: OpClass, group: LiveGroup) -> tuple[float, int | None]:
                if group.size > 1:
                    striker.inside(Phase.BOOTSTRAP)
                return super()._issue(op_class, group)

        def write(path: Path, items: Iterable[Any], **options: Any) -> WrittenFile:
            return write_items(path, _marked(items, striker, Phase.SAVE), **options)

        def destroy(*arguments: Any, **options: Any) -> None:
            striker.inside(Phase.TEARDOWN)
            destroy_groups(*arguments, **options)

        communicators.Bootstrap = ChaosBootstrap  # type: ignore[attr-defined]
        saver.write_items = write  # type: ignore[attr-defined]
        safe_trainer.destroy_groups = destroy  # type: ignore[attr-defined]

    def setup_worker(self, **arguments: Any) -> None:
        super().setup_worker(**arguments)
        self.safe.lifecycle = ChaosLifecycle(self.striker)
        check = self.safe.loads._check_digest

        def check_digest(manifest: Manifest, path: Path) -> None:
            check(manifest, path)
            self.striker.inside(Phase.LOAD)

        self.safe.loads._check_digest = check_digest  # type: ignore[method-assign]

    def load_hf_weights(self, path: str) -> None:
        self.striker.inside(Phase.CONVERT)
        super().load_hf_weights(path)

    def update_policy(self, batch: SequenceBatch, **arguments: Any) -> list[dict[str, float]]:
        self.striker.inside(Phase.TRAIN)
        return super().update_policy(batch, **arguments)

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        specs = super().weight_specs()
        outgoing = self.safe.weights._outgoing
        assert outgoing is not None
        self.safe.weights._outgoing = dataclasses.replace(
            outgoing, weights=lambda neighbours: _marked(outgoing.weights(neighbours), self.striker, Phase.SYNC)
        )
        return specs
