"""Guards a host's trainer process. The host makes the default group and calls our methods. All adapters share this."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from rl_safe_workers.adapters.patches import replaced
from rl_safe_workers.adapters.rank_answers import RankNotes, listen_in
from rl_safe_workers.adapters.shards import ShardWriter
from rl_safe_workers.comms.megatron_groups import nccl_config, sizes_of_groups, world_options
from rl_safe_workers.config import BootstrapConfig, MegatronConfig, RlSafeConfig
from rl_safe_workers.control.deadline import attempt
from rl_safe_workers.control.plane import NO_OUTCOME
from rl_safe_workers.diagnostics.blame import blame, blame_for_the_end
from rl_safe_workers.diagnostics.neighbours import PATIENCE_S, Neighbours
from rl_safe_workers.errors import (
    CheckpointError,
    CommunicatorError,
    LifecycleError,
    PhaseTimeoutError,
    RlSafeError,
    RunError,
    first_line,
    in_one_line,
)
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId
from rl_safe_workers.rollout.sent_digests import SentDigests
from rl_safe_workers.rollout.sync_proof import SentWeights
from rl_safe_workers.setting_names import timeout_setting
from rl_safe_workers.topology.budget import LIMITS
from rl_safe_workers.topology.groups import Traffic
from rl_safe_workers.workers.communicators import HostComms
from rl_safe_workers.workers.safe_trainer import SafeTrainer
from rl_safe_workers.worlds.training_world import device_of_world

logger = logging.getLogger(__name__)

_HEARD = timedelta(seconds=5)
"""How long a rank that has failed alone waits for the others to learn of its failure."""
_TOLD = timedelta(seconds=2)
"""Timeout of each step after a failure: reporting it, exchanging verdicts, and reading the other ranks' reports."""
_JUDGED_S = 3 * PATIENCE_S
"""Longest time to find out where a failure began. `Neighbours.judge` takes two thirds of it."""


def limited_world(
    settings: BootstrapConfig, *, stages: int, carries_weights: bool = False
) -> AbstractContextManager[None]:
    """Limits the NCCL channels of a default group that the host makes in the body.

    Without pipeline stages, hosts send only scalars and small objects over the group. One channel is enough for them.
    The group then takes 22 MiB of device memory instead of 484 MiB; see ``docs/communicators.md``.

    Args:
        settings: ``budget=false`` turns the limit off.
        stages: Number of pipeline stages. The group may carry activations between stages, so it then has no limit.
        carries_weights: True if weight syncs use the group. It then has no limit, either.
    """
    if stages != 1 or carries_weights or not settings.budget or not torch.cuda.is_available():
        return nullcontext()
    limits = {"world": LIMITS[Traffic.CONTROL]}
    return replaced(dist, "init_process_group", lambda init: partial(init, pg_options=world_options(limits)))


class HostedTrainer:
    """A host's trainer process. It holds a `SafeTrainer`, once the host has made the default group."""

    _trainer: SafeTrainer | None = None
    notes: RankNotes
    """This rank's notes for the verdict. Set by `take_world`."""
    neighbours: Neighbours | None = None
    """The job's ranks on this machine. Set by `meet_neighbours`; None if a driver asks the ranks instead."""
    _writer: ShardWriter | None = None
    """Writes the shards in place of the host; None if the host's saves do not go through it."""
    digests: SentDigests | None = None
    """Collects the digests of the weights in a sync that is to be proved; None if no sync is to be proved."""
    _has_ended = False
    """True once this rank has ended its part of the job, in order or after a failure."""

    @property
    def has_world(self) -> bool:
        """True if the default group exists and is the training world."""
        return self._trainer is not None and self._trainer.has_world

    @property
    def trainer(self) -> SafeTrainer:
        """The `SafeTrainer` of this process.

        Raises:
            LifecycleError: If `take_world` has not run.
        """
        if self._trainer is None:
            raise LifecycleError("there is no training world yet: the host has not made its default group")
        return self._trainer

    def take_world(
        self, rl_safe: RlSafeConfig, *, comms: HostComms, outside_timeout: timedelta, releases_comms: bool = False
    ) -> None:
        """Adopts the host's default group as the training world. The group must contain only trainers.

        Collective over: the host's default group, through its store.

        Args:
            rl_safe: Our settings.
            comms: The communication that the host adds to Megatron's.
            outside_timeout: Longest wait of one collective outside of phases.
            releases_comms: Whether the communicators' memory is given to the rollout.

        Raises:
            PhaseTimeoutError: If a rank does not come within the timeout of phase ``world``; names it.
        """
        self._trainer = SafeTrainer(
            training_rank=dist.get_rank(),
            training_size=dist.get_world_size(),
            rl_safe=rl_safe,
            megatron=MegatronConfig(),
            device=device_of_world(),
            host_comms=comms,
            releases_comms=releases_comms,
            outside_timeout=outside_timeout,
        )
        self.notes = RankNotes(self._trainer)
        self._trainer.add_part(self.notes)
        self._trainer.entry.adopt_world()

    def prove_sync(self) -> None:
        """Begins to take digests of the weights in the next sync, in `digests`."""
        self.digests = SentDigests()

    def sent_weights(self) -> SentWeights:
        """Returns the digests taken since `prove_sync`, and stops taking them. Waits for the device."""
        digests, self.digests = self.digests, None
        assert digests is not None, "prove_sync comes before it"
        return digests.sent()

    def meet_neighbours(self, *, stop_limit_s: float) -> None:
        """Lets the ranks on this machine find the rank that failed first, in a job without a driver of ours.

        Args:
            stop_limit_s: Seconds after which a stopped rank is ended; 0: no rank is watched.
        """
        self.neighbours = Neighbours(
            self.trainer.entry.job_key, rank=self.trainer.training_rank, stop_limit_s=stop_limit_s
        )
        listen_in(self.neighbours.folder)

    def create_groups(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Creates Megatron's groups by the host's own call, with our limits and timeouts, and connects them.

        Collective over: the training world. The device holds no model yet.

        Args:
            original: Megatron's ``initialize_model_parallel``.
            *args: The host's positional arguments for ``original``.
            **kwargs: The host's keyword arguments for ``original``.
        """
        trainer, comms = self.trainer, self.trainer.comms
        asked = inspect.signature(original).bind(*args, **kwargs).arguments
        with trainer.phase(Phase.GROUPS):
            trainer.megatron = _asked(asked)
            given = asked.get("nccl_communicator_config_path")
            comms.limits = comms.wanted_limits() if comms.has_nccl and given is None else {}
            with nccl_config(comms.limits) if comms.limits else nullcontext() as path:
                if path is not None:
                    asked["nccl_communicator_config_path"] = path
                asked["distributed_timeout_minutes"] = self.timeout_minutes()
                original(**asked)
            trainer.megatron = sizes_of_groups()
            self.create_own_groups()
            comms.check_memory()
        comms.plan().check_backend(dist.get_backend_config())
        comms.bootstrap()

    def create_own_groups(self) -> None:
        """Creates early the groups that the host would create after the bootstrap. Adapters override it."""

    def timeout_minutes(self, *, in_phase: bool = False) -> float:
        """Returns Megatron's ``distributed_timeout_minutes``: the time left in the phase, or the timeout outside.

        Megatron annotates it as an int, but makes a timedelta of it, which accepts a fraction.

        Args:
            in_phase: Whether this is part of work that has a deadline but is not a phase of the lifecycle.
        """
        outside = self.trainer.outside_timeout
        if outside is None or in_phase or self.trainer.lifecycle.current is not None:
            outside = self.trainer.remaining()
        return outside.total_seconds() / 60

    @contextmanager
    def outermost(self, phase: Phase) -> Iterator[None]:
        """Enters a phase as `SafeTrainer.phase`. Does nothing if this rank is already in a phase.

        Collective over: the training world.
        """
        with nullcontext() if self.trainer.lifecycle.current is not None else self.trainer.phase(phase):
            yield

    @contextmanager
    def saving(self, *, optimizer_replicated: bool) -> Iterator[None]:
        """Enters phase ``save``, and writes shards in place of megatron-core. Collective over: the training world."""
        with (
            self.trainer.phase(Phase.SAVE),
            self.written("training", optimizer_replicated=optimizer_replicated),
            self.failing_together(Phase.SAVE),
        ):
            yield

    @contextmanager
    def written(self, kind: str, *, optimizer_replicated: bool) -> Iterator[None]:
        """Writes shards in place of megatron-core while the body runs.

        Args:
            kind: Names the saver, e.g. ``"training"``.
            optimizer_replicated: Whether there is no distributed optimizer.
        """
        assert self._writer is not None, "made with the world"
        with self._writer.saving(kind, remaining=self.trainer.remaining, optimizer_replicated=optimizer_replicated):
            yield

    @contextmanager
    def failing_together(self, phase: Phase) -> Iterator[None]:
        """Calls `fail` if the body fails on this rank alone. An `RlSafeError` passes, because every rank raises it."""
        try:
            yield
        except RlSafeError:
            raise  # on every rank
        except Exception as error:
            self.fail(phase, error)

    def fail(self, phase: Phase, error: Exception) -> NoReturn:
        """Reports this rank's failure to the ranks that wait for it in an agreement, and raises it.

        Raises:
            CheckpointError: If the others have not learned of it within a few seconds.
        """
        trainer = self.trainer
        trainer.deadline = trainer.deadline.at_most(_HEARD)
        try:
            self.fail_pending_save(error)
            trainer.together(phase, lambda: None, failure=error)
        except PhaseTimeoutError:
            raise CheckpointError(f"training rank {trainer.training_rank}: {type(error).__name__}: {error}") from error
        raise AssertionError("an agreement with a failure raises")

    def fail_pending_save(self, error: Exception) -> None:
        """Fails the save in which other ranks wait for this rank, if any; see `ShardWriter.fail`.

        Args:
            error: The error that only this rank has failed with.
        """
        if self._writer is not None:
            self._writer.fail(error, self.trainer.remaining())

    def end(self, failure: str | None = None) -> dict[int, str]:
        """Tears down as `SafeTrainer.teardown`; does nothing if there is no world yet."""
        return self.trainer.teardown(failure) if self.has_world else {}

    def leave(self) -> None:
        """Ends the job in order, if this rank has not failed. Collective over: the training world.

        Raises:
            CommunicatorError: If another rank has failed; names it. Also as `SafeTrainer.teardown`.
            PhaseTimeoutError: If a rank that has not failed does not come in time; names it.
        """
        started_s = time.monotonic()
        if self.neighbours is not None:
            self.neighbours.watch_exit(self.trainer.timeout(Phase.TEARDOWN).total_seconds())
        failed = self.end()
        self._has_ended = True
        with self.speaking():
            if failed:
                self._blame_for_the_end(failed, time.monotonic() - started_s)
        if self.neighbours is not None:
            self.neighbours.leave()

    def _blame_for_the_end(self, failed: Mapping[int, str], waited_s: float) -> NoReturn:
        """Logs the ranks that did not report at the teardown in time, if any, and raises the error of the end.

        Args:
            failed: The reason for each failure, by training rank.
            waited_s: Seconds that this rank has waited.
        """
        trainer = self.trainer
        if silent := [rank for rank, reason in failed.items() if reason == NO_OUTCOME]:
            late, culprits, why = blame_for_the_end(
                silent,
                rank=trainer.training_rank,
                size=trainer.training_size,
                waited_s=waited_s,
                setting=timeout_setting(Phase.TEARDOWN),
                among=self.neighbours,
            )
            self.notes.failed(Phase.TEARDOWN, late)
            self.say(culprits, why)
        reasons = "; ".join(f"training rank {rank}: {reason}" for rank, reason in failed.items())
        raise CommunicatorError(f"this rank succeeded, but the job has failed: {reasons}")

    def end_failed(self, error: BaseException, phase: str) -> None:
        """Tells the other ranks of this rank's failure, ends its groups, and logs where the failure began.

        Not collective. It takes at most three times `_TOLD`, plus `_JUDGED_S`, plus the time to abort the groups. It
        logs its own errors. If one step fails, the next one runs.

        Args:
            error: The error of this rank.
            phase: The phase that the rank was in, or `errors.OUTSIDE`.
        """
        trainer = self.trainer
        if isinstance(error, Exception):
            self.notes.failed(phase, error)
        elif self.neighbours is not None:
            self.neighbours.leave()  # the user has ended this rank, so the others must not report it as dead
        seconds = min(trainer.rl_safe.timeouts.teardown, _TOLD.total_seconds())
        timeouts = trainer.rl_safe.timeouts.model_copy(update={"teardown": seconds})
        trainer.rl_safe = trainer.rl_safe.model_copy(update={"timeouts": timeouts})
        text = first_line(error) if isinstance(error, RlSafeError) else in_one_line(error)
        reported = error if isinstance(error, Exception) else RuntimeError(text)
        if trainer.has_control:
            attempt(
                "reporting the failure",
                lambda: trainer.control.report_failure(reported, phase=phase),
                timeout_s=_TOLD.total_seconds(),
            )
        failed: dict[int, str] = {}
        # The teardown stays on this thread, because this thread has the rank's device. Each wait has a deadline.
        try:
            failed = self.end(text)
        except Exception as lost:  # the caller raises the job's own error
            logger.warning("training rank %d: ending the groups: %s", trainer.training_rank, in_one_line(lost))
        if trainer.has_control:
            self._say_where_it_began([rank for rank, reason in failed.items() if reason == NO_OUTCOME])

    def _say_where_it_began(self, silent: Collection[int]) -> None:
        """Logs the ranks with which the failure began. Judges by the ranks' reports, and by the silent ranks."""
        reports: dict[RankId, RunError] = {}
        attempt(
            "reading the failures",
            lambda: reports.update(self.trainer.control.reported_failures()),
            timeout_s=_TOLD.total_seconds(),
        )
        if reports:
            attempt(
                "finding out where the failure began",
                lambda: self.say(*blame(reports, silent=silent, among=self.neighbours)),
                timeout_s=_JUDGED_S,
            )

    def say(self, culprits: Collection[RankId], why: str) -> None:
        """Logs the ranks with which the job's failure began, if this rank has neighbours."""
        if self.neighbours is not None:
            self.neighbours.say(culprits, why)

    def speaking(self) -> AbstractContextManager[None]:
        """Delays SIGTERM until the body has reported a failure; see `Neighbours.ending`."""
        return nullcontext() if self.neighbours is None else self.neighbours.ending()


def _asked(arguments: Mapping[str, Any]) -> MegatronConfig:
    """Returns the parallel sizes in a host's arguments of ``initialize_model_parallel``."""
    tensor = arguments.get("tensor_model_parallel_size") or 1
    return MegatronConfig(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=arguments.get("pipeline_model_parallel_size") or 1,
        virtual_pipeline_model_parallel_size=arguments.get("virtual_pipeline_model_parallel_size"),
        expert_model_parallel_size=arguments.get("expert_model_parallel_size") or 1,
        expert_tensor_parallel_size=arguments.get("expert_tensor_parallel_size") or tensor,
        context_parallel_size=arguments.get("context_parallel_size") or 1,
        num_distributed_optimizer_instances=arguments.get("num_distributed_optimizer_instances") or 1,
    )
