"""verl's trainers for each mode, changed to use our workers, report our metrics, and always end their groups."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from rl_safe_workers import env
from rl_safe_workers.adapters.driver_waits import DriverWaits, Party
from rl_safe_workers.adapters.group_ends import AFTER_FAILURE_S, end_of, error_of
from rl_safe_workers.adapters.job_verdict import JobVerdict
from rl_safe_workers.adapters.verl.guarded_objects import GuardedRows, guarded_agents, guarded_samples, guarded_transfer
from rl_safe_workers.adapters.verl.proved_transfer import ProvedTransfer
from rl_safe_workers.adapters.verl.settings import VerlSettings, read_settings
from rl_safe_workers.adapters.verl.workers import safe_worker
from rl_safe_workers.errors import RunError, in_one_line
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role, trainer_id

logger = logging.getLogger(__name__)

_GRACE_S = 15.0
"""Seconds that a worker may take longer than its own deadline."""
_GROUPS = ("actor_rollout_wg", "critic_wg", "ref_policy_wg")
_TRANSFERS = ("checkpoint_manager", "standalone_checkpoint_manager")


class _Guarded:
    """Descriptor for a trainer attribute whose calls block. Stores a wrapper around the object that verl assigns."""

    def __init__(self, guard: Callable[[Any, Any], Any]) -> None:
        self._guard = guard

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        try:
            return vars(trainer)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, trainer: Any, value: Any) -> None:
        vars(trainer)[self._name] = self._guard(value, trainer)


def _transfer(manager: Any, trainer: Any) -> Any:
    """Guards verl's ``CheckpointEngineManager``. Checks packed syncs, and proves syncs, if the settings say so."""
    guarded, settings = guarded_transfer(manager, trainer.rl_safe_waits), trainer.rl_safe_settings
    if settings.prove_sync_freq < 0 and not settings.packed_sync:
        return guarded
    return ProvedTransfer(
        guarded, trainer.rl_safe_waits, every=settings.prove_sync_freq, is_packed=settings.packed_sync
    )


def _within(name: str, phase: Phase) -> Callable[..., Any]:
    """Returns a method that calls verl's method of the same name, and notes the phase in which it waits."""

    def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with trainer.rl_safe_waits.waiting(phase):
            return getattr(super(SafeTrainerMixin, trainer), name)(*args, **kwargs)

    return method


class SafeTrainerMixin:
    """Overrides parts of verl's trainers. Of its public names, only `end_groups` and ``rl_safe_*`` are ours."""

    config: Any
    role_worker_mapping: dict[Any, Any]
    checkpoint_manager = _Guarded(_transfer)
    standalone_checkpoint_manager = _Guarded(_transfer)
    agent_loop_manager = _Guarded(lambda manager, trainer: guarded_agents(manager, trainer.rl_safe_waits))
    train_dataloader = _Guarded(lambda loader, trainer: GuardedRows(loader, trainer.rl_safe_waits))
    val_dataloader = _Guarded(lambda loader, trainer: GuardedRows(loader, trainer.rl_safe_waits))
    replay_buffer = _Guarded(lambda buffer, trainer: guarded_samples(buffer, trainer.rl_safe_waits))
    # These only note the phase. The training ranks keep the deadlines, because one call may run several phases.
    _compute_old_log_prob = _within("_compute_old_log_prob", Phase.LOGPROB)
    _compute_ref_log_prob = _within("_compute_ref_log_prob", Phase.LOGPROB)
    _compute_values = _within("_compute_values", Phase.LOGPROB)
    _update_critic = _within("_update_critic", Phase.TRAIN)
    _update_actor = _within("_update_actor", Phase.TRAIN)
    _save_checkpoint = _within("_save_checkpoint", Phase.SAVE)
    _load_checkpoint = _within("_load_checkpoint", Phase.LOAD)
    _setup = _within("_setup", Phase.START)
    _rl_safe_has_ended = False

    @cached_property
    def rl_safe_settings(self) -> VerlSettings:
        """The settings of the adapter."""
        return read_settings(self.config)

    @cached_property
    def rl_safe_waits(self) -> DriverWaits:
        """The deadlines of this trainer's waits."""
        return DriverWaits(self.rl_safe_settings.timeouts, self._parties)

    @cached_property
    def rl_safe_verdict(self) -> JobVerdict:
        """Judges a failure, and keeps the evidence beside the run's checkpoints."""
        root = Path(self.config.trainer.default_local_dir).absolute()
        return JobVerdict(self._parties, root / f"rl_safe_failure_{env.run_id() or os.getpid()}")

    def _parties(self) -> list[Party]:
        """Lists the processes that exist so far and that this trainer waits for."""
        found = {}
        for group in self._worker_groups():
            for rank, worker in enumerate(group.workers):
                ask = worker.__ray_ready__.remote
                found[worker] = Party(f"training rank {rank}", trainer_id(rank), worker, ask)
        for name in _TRANSFERS:
            for replica in getattr(getattr(self, name, None), "replicas", ()):
                rank_id = RankId(Role.ROLLOUT, replica.replica_rank)
                for server in replica.servers:
                    # The server's engine must answer this call, too. Clearing the cache is harmless: the job is over.
                    ask = server.clear_kv_cache.remote
                    found[server] = Party(f"rollout replica {replica.replica_rank}", rank_id, server, ask)
        for number, worker in enumerate(getattr(getattr(self, "agent_loop_manager", None), "agent_loop_workers", ())):
            rank_id = RankId(Role.AGENT_LOOP, number)
            found[worker] = Party(str(rank_id), rank_id, worker, worker.__ray_ready__.remote)
        for number, worker in enumerate(getattr(getattr(self, "reward_loop_manager", None), "reward_loop_workers", ())):
            rank_id = RankId(Role.REWARD, number)
            found[worker] = Party(str(rank_id), rank_id, worker, worker.__ray_ready__.remote)
        return list(found.values())

    def _worker_groups(self) -> list[Any]:
        """Lists the worker groups that exist, each once."""
        found = {id(group): group for name in _GROUPS if (group := getattr(self, name, None)) is not None}
        return list(found.values())

    @contextmanager
    def _ended_on_failure(self, when: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            verdict = self.rl_safe_verdict.on(error, self.rl_safe_waits.failed_in)
            # Tell the workers, then raise the error, whatever they answer.
            cause = error.cause if verdict is error and isinstance(error, ray.exceptions.RayTaskError) else verdict
            failure = f"{when}: {in_one_line(cause)}"
            logger.error("%s", failure)
            self.end_groups(failure)
            if verdict is error:
                raise
            raise verdict from error

    def _init_resource_pool_mgr(self) -> None:
        """Chooses workers as verl does, then replaces each by ours."""
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        self.role_worker_mapping = {
            role: ray.remote(safe_worker(_plain(cls))) for role, cls in self.role_worker_mapping.items()
        }

    def init(self) -> None:
        """Starts workers as verl does. Ends their groups if that fails."""
        with self._ended_on_failure("driver, in init"):
            if self.rl_safe_settings.prove_sync_freq >= 0 or self.rl_safe_settings.packed_sync:
                from rl_safe_workers.adapters.verl.vllm_engine import use_replicas

                use_replicas()
            super().init()  # type: ignore[misc]

    def fit(self, agent_loop_manager: Any) -> None:
        """Trains as verl does, then ends the groups. If nothing has failed, all ranks end them together.

        Raises:
            RunError: If training succeeded and ending the groups failed; names the ranks.
        """
        with self._ended_on_failure("driver, in fit"):
            super().fit(agent_loop_manager)  # type: ignore[misc]
            with self.rl_safe_waits.waiting(Phase.TEARDOWN):
                failed = self.end_groups(None)
                if failed is not None:
                    raise failed

    def on_step_end(self) -> None:
        """Ends a step as verl does, and adds the adapter's metrics of every worker group to the step's metrics."""
        super().on_step_end()  # type: ignore[misc]
        everyone = [metrics for group in self._worker_groups() for metrics in group.rl_safe_metrics()]
        pending = dict(getattr(self, "_pending_sync_metrics", None) or {})
        self._pending_sync_metrics = {**pending, **_worst(everyone), **self._proof()}

    def _proof(self) -> dict[str, float]:
        """Returns the metrics of a sync that was proved since the last call; empty if no sync was proved."""
        transfer = getattr(self, "checkpoint_manager", None)
        if not isinstance(transfer, ProvedTransfer):
            return {}
        return transfer.prover.take_metrics()

    def end_groups(self, failure: str | None) -> RunError | None:
        """Makes every worker end its groups, within the deadline of teardown. Logs failures.

        Args:
            failure: One line about the failure; None if nothing has failed.

        Returns:
            The error of the teardown, which names ranks that have not ended; None if all have ended well.
        """
        if self._rl_safe_has_ended:
            return None  # an earlier call of this method has failed
        self._rl_safe_has_ended = True
        timeouts = self.rl_safe_settings.timeouts
        # Without a failure, the workers first finish saves in the background.
        patience_s = timeouts.teardown + timeouts.save + _GRACE_S if failure is None else AFTER_FAILURE_S
        ends = [end_of(group.teardown_groups(failure), patience_s) for group in self._worker_groups()]
        for end in ends:
            if end.text:
                logger.warning("teardown: %s", end.text)
        return error_of(ends)


def _worst(everyone: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the largest values over all ranks. For ``rl_safe/active`` it is the smallest: 1 if every rank is ours."""
    names = {name for metrics in everyone for name in metrics}
    found = {name: max(metrics.get(name, 0.0) for metrics in everyone) for name in sorted(names)}
    found["rl_safe/active"] = min((metrics.get("rl_safe/active", 0.0) for metrics in everyone), default=0.0)
    return found


def _plain(cls: Any) -> type:
    plain: type = getattr(cls, "__ray_actor_class__", cls)
    return plain


class SafeTrainerSync(SafeTrainerMixin, PPOTrainerSync):
    """verl's trainer of mode ``sync``."""


class SafeTrainerColocateAsync(SafeTrainerMixin, PPOTrainerColocateAsync):
    """verl's trainer of mode ``colocate_async``."""


class SafeTrainerSeparateAsync(SafeTrainerMixin, PPOTrainerSeparateAsync):
    """verl's trainer of mode ``separate_async``."""


TRAINERS = {
    "sync": SafeTrainerSync,
    "colocate_async": SafeTrainerColocateAsync,
    "separate_async": SafeTrainerSeparateAsync,
}
"""Our trainers by ``trainer.v1.trainer_mode``. The names must be verl's: verl takes any other name for an asynchronous
mode."""


def use_trainers() -> None:
    """Registers our trainers under verl's names in this process. verl's decorator would refuse a name that is taken."""
    TRAINER_REGISTRY.update(TRAINERS)
