"""Proves ms-swift's weight syncs to vLLM engines in the trainers' processes, if the settings say so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from rl_safe_workers.adapters.patches import replaced
from rl_safe_workers.adapters.swift.job import SwiftJob
from rl_safe_workers.adapters.swift.swift_settings import VARIABLE
from rl_safe_workers.comms.json_gather import gather_json
from rl_safe_workers.errors import ConfigError, WeightSyncError, in_short
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.rollout.packing import spec_of
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.proved_worker import ProvedWorker
from rl_safe_workers.rollout.sync_proof import NOTHING_CAME, SHOWN, HeldWeights, ProvedSyncs, SentWeights, SyncProof

_FIRST = 0
"""The training rank that takes digests of the sent weights. Every rank exports the same weights."""
_PROVED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "vllm_mode",
        lambda value: value == "colocate",
        "a server is another process, and has no call that reads weights back",
    ),
    ("vllm_enable_lora", lambda value: not value, "only whole weights are read back"),
)
"""Arguments of ms-swift's, a test for the values with which syncs can be proved, and the reason."""


def check_proof(args: Any, *, every: int) -> None:
    """Refuses a job whose weight syncs cannot be proved.

    Args:
        args: ms-swift's ``MegatronArguments``.
        every: The setting ``prove_sync_freq``.

    Raises:
        ConfigError: If an argument has an unsuitable value; names the argument.
    """
    for name, fits, reason in _PROVED:
        value = getattr(args, name)
        if not fits(value):
            raise _refused(f"{VARIABLE}.prove_sync_freq={every} with --{name} {value}: {reason}")


def _refused(why: str) -> ConfigError:
    return ConfigError(f"{why}; set {VARIABLE}.prove_sync_freq to -1")


class EngineReader(ProvedWorker):
    """Reads weights back from an engine in this process, or from this process's rank of a tensor-parallel engine.

    Attributes:
        size: Number of the engine's ranks.
    """

    def __init__(self, engine: Any, *, rank: int) -> None:
        """Checks that the engine's weights can be read back.

        Args:
            engine: ms-swift's ``GRPOVllmEngine``.
            rank: This training rank. ms-swift gives each engine consecutive training ranks.

        Raises:
            ConfigError: If the engine's weights cannot be read back; says why.
        """
        config = engine.engine.vllm_config
        self.model_runner = SimpleNamespace(model=engine.inner_model, vllm_config=config)
        self.rank, self.size = rank, config.parallel_config.tensor_parallel_size
        if (obstacle := self.rl_safe_prove()) is not None:
            raise _refused(f"weight syncs cannot be proved: {obstacle}")

    def received(self, trainer: Any, job: SwiftJob, send: Callable[[], object]) -> HeldWeights:
        """Sends weights as ms-swift does, and returns the weights that the engine then holds.

        Collective over: the training world, if engines have several ranks.

        Args:
            trainer: ms-swift's trainer. Its bridge exports the weights to send. It also has vLLM's group.
            job: The job of this rank. If it has ``digests``, it also takes digests of the sent weights.
            send: ms-swift's own sync.
        """
        self.rl_safe_prove()
        with self._rl_safe_proving(), replaced(trainer.bridge, "export_weights", exporting(job, self._rl_safe_watch)):
            send()
        held = self.rl_safe_held()
        if self.size > 1:
            # A rank that has failed does not come. This wait names it. A collective on vLLM's group would just hang.
            job.wait_for_all()
        answers = [held] if self.size == 1 else gather_json(held, group=trainer.vllm_tp_group)
        return HeldWeights.of_workers(answers) or NOTHING_CAME


def exporting(
    job: SwiftJob, at_end: Callable[[Sequence[WeightSpec]], None] = lambda specs: None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a wrapper for the bridge's ``export_weights`` that takes digests of the weights as they pass.

    Args:
        job: The job of this rank. It has ``digests`` if this rank takes them.
        at_end: Is called with the specs of all weights after the receiver has asked for one more. By then the receiver
            has loaded all weights.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def export_weights(*args: Any, **kwargs: Any) -> Iterator[Any]:
            weights, specs = original(*args, **kwargs), []
            for name, tensor in weights if job.digests is None else job.digests.passing(weights):
                specs.append(spec_of(name, tensor))
                yield name, tensor
            at_end(specs)

        return export_weights

    return wrap


class ColocatedSyncs:
    """The weight syncs of one rank to the engine in its process. All ranks prove their syncs together."""

    def __init__(self, job: SwiftJob) -> None:
        """Begins to count syncs.

        Args:
            job: The job of this rank.
        """
        self._job = job
        self._syncs = ProvedSyncs(every=job.settings.prove_sync_freq)
        self._reader: EngineReader | None = None
        self._wrong: list[int] = []
        """Training ranks whose engines held wrong weights after the last sync."""

    def add_engine(self, engine: Any) -> None:
        """Sets the engine of this rank, if syncs are to be proved.

        Raises:
            ConfigError: As `EngineReader`.
        """
        if self._job.settings.prove_sync_freq >= 0:
            self._reader = EngineReader(engine, rank=self._job.trainer.training_rank)

    def sync(self, trainer: Any, send: Callable[[], object]) -> None:
        """Sends weights as ms-swift does. Sends them again if an engine holds other weights than were sent.

        Collective over: the training world, within phase ``sync``.

        Args:
            trainer: ms-swift's trainer, which logs the metrics.
            send: The trainer's own sync.

        Raises:
            WeightSyncError: If an engine holds other weights than were sent, twice in a row; names its rank.
        """
        try:
            proved = self._syncs.run(
                functools.partial(self._once, trainer, send),
                what=f"the weight sync of step {trainer.state.iteration + 1}",
                agree=self._agree,
            )
        except WeightSyncError as error:
            if self._wrong:  # else ms-swift's own sync has failed
                error.culprit = trainer_id(self._wrong[0])
            raise
        if proved is not None:
            mode = "train" if trainer.unwrapped_models[0].training else "eval"
            for name, value in proved.metrics.items():
                trainer._metrics[mode][name].append(value)

    def _once(self, trainer: Any, send: Callable[[], object], prove: bool) -> SyncProof | None:
        if not prove:
            send()
            return None
        assert self._reader is not None, "the engine comes before its weights"
        rank = self._job.trainer.training_rank
        if rank == _FIRST:
            self._job.prove_sync()
        held = self._reader.received(trainer, self._job, send)
        # All ranks of an engine find the same mismatches, and name the engine's first rank.
        return SyncProof(sent=[self._sent()], held=[held], engines=[rank - rank % self._reader.size])

    def _sent(self) -> SentWeights:
        """Returns the digests that rank `_FIRST` has taken. Collective over: the training world, through the store."""
        if self._job.digests is None:
            return SentWeights(digests=self._settle("sent weights", None, lambda reports: reports[_FIRST]), seconds=0.0)
        sent = self._job.sent_weights()
        self._settle("sent weights", dict(sent.digests), lambda reports: reports[_FIRST])
        return sent

    def _agree(self, wrong: str) -> str:
        """Returns the mismatches in all engines. Collective over: the training world, through the store.

        Args:
            wrong: The mismatch in this rank's engine; empty if all weights are right.
        """
        told = self._settle("sync proof", wrong, lambda reports: [one for one in enumerate(reports) if one[1]])
        self._wrong = [rank for rank, _ in told]
        return in_short([*dict.fromkeys(one for _, one in told)], shown=SHOWN)

    def _settle(self, name: str, report: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        trainer = self._job.trainer
        gathering = trainer.control.gathering(name, phase=Phase.SYNC)
        return gathering.settle(trainer.deadline, report=report, decide=decide)
