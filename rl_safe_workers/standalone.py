"""Offers a `SafeTrainer` as plain functions for a Megatron script under torchrun: three lines, no Ray.

The script creates the default group and Megatron's groups itself. Every rank is a training rank.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.comms.live_groups import live_groups
from rl_safe_workers.comms.megatron_groups import limits_of_groups, nccl_config, sizes_of_groups, world_options
from rl_safe_workers.comms.report import BootstrapReport
from rl_safe_workers.comms.teardown import abort_groups
from rl_safe_workers.config import ABORT_S, MegatronConfig, RlSafeConfig
from rl_safe_workers.control.deadline import Deadline, attempt
from rl_safe_workers.control.failure import Failure
from rl_safe_workers.control.plane import NO_OUTCOME
from rl_safe_workers.diagnostics.answering import note_event
from rl_safe_workers.diagnostics.blame import blame, blame_for_the_end, say_who_is_late
from rl_safe_workers.diagnostics.neighbours import Neighbours
from rl_safe_workers.errors import (
    OUTSIDE,
    CommunicatorError,
    ConfigError,
    LifecycleError,
    PhaseTimeoutError,
    RlSafeError,
    RunError,
    in_one_line,
)
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.platforms import cuda
from rl_safe_workers.platforms.device_memory import free_bytes
from rl_safe_workers.ranks import RankId, trainer_id
from rl_safe_workers.topology.budget import plan_limits
from rl_safe_workers.topology.comms_plan import CommsPlan
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.topology.layout import ParallelLayout, check_layout
from rl_safe_workers.topology.memory import MIB
from rl_safe_workers.workers.communicators import HostComms
from rl_safe_workers.workers.safe_trainer import SafeTrainer
from rl_safe_workers.worlds.training_world import device_of_world

logger = logging.getLogger(__name__)

MINUTES_5, SECONDS_10 = timedelta(minutes=5), timedelta(seconds=10)
WORTH_A_WARNING = 64 * MIB
"""Bytes that `channel_limits` must save to be worth a warning."""
_MOST = Features(
    moe=True,
    distributed_optimizer=False,
    fp8=True,
    expert_bias=True,
    aux_loss=True,
    context_exchange=frozenset({"p2p", "a2a"}),
)
"""The features that connect most."""
_SECOND = timedelta(seconds=1)
_HEARD_S = 1.0
"""Seconds within which a leaving rank reads the failures of other ranks."""


class _ScriptComms(HostComms):
    """The groups of a script. The script makes Megatron's groups, and only Megatron issues collectives on them."""

    missing_groups = "call bootstrap() after initialize_model_parallel()"
    makes_groups = True


@dataclass(kw_only=True)
class _Script:
    """The state that the functions of this module share, for one default group."""

    world: ReferenceType[Any]
    """A weak reference to the default group."""
    trainer: SafeTrainer
    groups: frozenset[str] = frozenset()
    """torch's names of the groups that the bootstrap has connected or left out."""
    neighbours: Neighbours | None = None
    """The ranks on this machine, once `bootstrap` has begun."""
    phase: str | None = None
    """The phase that this rank is in, or has left by an exception; None: outside of phases."""
    not_ended: str | None = None
    """The reason why a teardown could not destroy the groups in order; None if there was no such teardown."""

    def come_to(self, phase: str | None) -> None:
        """Notes the phase that this rank is in, and lets the other ranks read it. None: it is outside of phases."""
        self.phase = phase
        if self.neighbours is not None:
            self.neighbours.note(phase)

    def bound(self, timeout: timedelta) -> None:
        """Sets one common deadline for all waits of a call."""
        seconds = timeout.total_seconds()
        trainer = self.trainer
        every = {"world": seconds, "bootstrap": seconds, "teardown": seconds}
        timeouts = trainer.rl_safe.timeouts.model_copy(update=every)
        trainer.rl_safe = trainer.rl_safe.model_copy(update={"timeouts": timeouts})
        trainer.deadline = Deadline.after(timeout)


_script: _Script | None = None


@dataclass(frozen=True, kw_only=True)
class ChannelLimits:
    """Arguments that limit NCCL's channels where the groups are made.

    Example: ``ChannelLimits(world=options, megatron={"expert_model_parallel_size": 2,
    "nccl_communicator_config_path": "/tmp/rl_safe_nccl_x.yaml"})``
    """

    world: Any
    """``pg_options`` of ``init_process_group``; None for the backend's own."""
    megatron: Mapping[str, Any]
    """Arguments of ``initialize_model_parallel``: the sizes, and ``nccl_communicator_config_path``."""


_config_file = ExitStack()
"""Holds the file of the newest `ChannelLimits`. It is removed when this process ends, or calls `channel_limits`."""
atexit.register(_config_file.close)


def channel_limits(
    *,
    features: Features | None = None,
    max_ctas: Mapping[str, int] | None = None,
    world_size: int | None = None,
    **sizes: int | None,
) -> ChannelLimits:
    """Returns arguments with which the script's groups take no more device memory than they need.

    Groups that carry only scalars get one NCCL channel, which takes 22 MiB instead of 484 on an H200. Groups between
    pipeline stages get 12. Groups that carry large data have no limit. Without a GPU there are no limits. Not
    collective. Call it on every rank with the same arguments, before the groups are made.

    Args:
        features: As for `bootstrap`.
        max_ctas: Limits of your own, by the keys of Megatron's ``nccl_communicator_config_path`` file and ``world``.
        world_size: Number of ranks. None: the size of the default group, else ``WORLD_SIZE``, which torchrun sets.
        sizes: Sizes for ``initialize_model_parallel``, such as ``expert_model_parallel_size=2``.

    Raises:
        ConfigError: If a size or a key of ``max_ctas`` is unknown, a value is out of range, or there is no number of
            ranks.
        LayoutError: If the sizes do not divide the number of ranks.
    """
    config = MegatronConfig(**{"expert_tensor_parallel_size": sizes.get("tensor_model_parallel_size") or 1, **sizes})
    layout = ParallelLayout.of(config, world_size=world_size or _world_size())
    check_layout(layout)
    asked = _features(
        features,
        optimizer_instances=config.num_distributed_optimizer_instances,
        virtual_size=config.virtual_pipeline_model_parallel_size,
    )
    limits = plan_limits(layout, asked, max_ctas or {}, named=str)
    if not torch.cuda.is_available():
        return ChannelLimits(world=None, megatron=sizes)
    _config_file.close()
    path = _config_file.enter_context(nccl_config(limits))
    return ChannelLimits(world=world_options(limits), megatron={**sizes, "nccl_communicator_config_path": path})


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    try:
        return int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise ConfigError("channel_limits(): WORLD_SIZE is not set; start with torchrun, or pass world_size") from None


def bootstrap(
    *,
    features: Features | None = None,
    max_ctas: Mapping[str, int] | None = None,
    timeout: timedelta = MINUTES_5,
    stopped: timedelta = SECONDS_10,
) -> BootstrapReport:
    """Connects every communicator for all op classes that it will carry.

    Collective over: the default group. Idempotent.

    Call it after ``initialize_model_parallel`` and before the model is built. Call it again after groups were rebuilt.
    It reads three things from Megatron's groups: the parallel sizes, the number of optimizer instances, and the
    presence of virtual pipeline stages.

    Args:
        features: The other features of the model and the training that decide which collectives the groups carry.
            None: for each feature the value that connects more, for example experts with the all-to-all dispatcher.
            For a dense model ``Features(moe=False)`` leaves the expert groups out; all other features then have the
            defaults of `Features`.
        max_ctas: The limits that the groups were made with, by group name. They serve to predict the memory. None: the
            limits are read from NCCL's groups.
        timeout: Timeout of the whole call.
        stopped: Longest time for which a rank may stay stopped (SIGSTOP). Then another rank on its machine kills it.
            The watch begins at the first call. 0: no limit.

    Returns:
        The cost of each op class of each group on this rank.

    Raises:
        ConfigError: On a rank whose ``max_ctas`` names an unknown group or has a value that is not a number of CTAs.
        CommunicatorError: On every rank, if Megatron's groups do not exist, plans differ, a rank has less free memory
            than its groups will take, or a rank fails for another reason. It names the rank.
        PhaseTimeoutError: On every rank, if a rank does not arrive in time. It names the rank.
    """
    if not dist.is_initialized():
        raise CommunicatorError(
            "there is no default group: call init_process_group and initialize_model_parallel before bootstrap()"
        )
    script = _current()
    script.bound(timeout)
    trainer, lifecycle = script.trainer, script.trainer.lifecycle
    try:
        with _waiting_in(bootstrap.__name__, Phase.BOOTSTRAP):
            if not lifecycle.has_completed(Phase.WORLD):
                trainer.entry.adopt_world()
                script.neighbours = Neighbours(
                    trainer.entry.job_key, rank=trainer.training_rank, stop_limit_s=stopped.total_seconds()
                )
                script.neighbours.speak_before_sigterm()
            script.come_to(Phase.BOOTSTRAP)
            with lifecycle.enter(Phase.GROUPS):
                _agree_on_plan(trainer, features, max_ctas, check_memory=not script.groups)
            report = trainer.comms.bootstrap()
    except PhaseTimeoutError as late:
        if script.neighbours is None:
            say_who_is_late(late, rank=trainer.training_rank)
        raise
    script.groups = frozenset(group.group.group_name for group in live_groups())
    script.come_to(None)
    return report


@contextmanager
def _waiting_in(function: str, phase: Phase) -> Iterator[None]:
    """Makes a PhaseTimeoutError name this function's phase, and its ``timeout`` argument as the setting to raise."""
    try:
        yield
    except PhaseTimeoutError as late:
        told = late.as_of(phase, setting=f"{function}(timeout=...)")
        raise told.with_traceback(late.__traceback__) from late.__cause__


@contextmanager
def guard(phase: str = "train", *, watch_steps: int = 3, refuse: bool = False) -> Iterator[None]:
    """Runs the body as a phase of the script, e.g. one training step. Raises before it if the bootstrap has not run.

    Not collective. In the first ``watch_steps`` bodies of a phase, it looks for late allocations by collectives. After
    each body of the phase ``train``, it measures this process's memory, by owner, such as tensors or communicators. It
    warns of an owner that grows in each body.

    Args:
        phase: Name of the phase, for errors.
        watch_steps: Number of bodies of the phase to watch, from the first on.
        refuse: True to raise after a body in which a late allocation is found; False to log a warning.

    Raises:
        LifecycleError: If `bootstrap` has not run, or groups were built since.
        CommunicatorError: After the body, if ``refuse`` is True and a collective of the body took device memory or used
            an op class that the bootstrap has not connected.
    """
    trainer, script = _require(phase), _current()
    script.come_to(phase)
    with trainer.comms.watching(phase, steps=watch_steps, refuse=refuse):
        try:
            yield
        except Exception as error:
            note_event("guard", error, f"its script has gone on after an error in phase {phase}")
            raise
    script.come_to(None)
    if phase == Phase.TRAIN:
        trainer.memory.step()


def teardown(*, timeout: timedelta = timedelta(seconds=60)) -> None:
    """Destroys the script's groups: together if all ranks succeeded, else without a collective. Use it in ``finally``.

    It replaces ``torch.distributed.destroy_process_group``, which fails if it is called afterwards.

    Collective over: the default group, through its store. If a rank is leaving on an exception, it tells the other
    ranks, so that they do not wait for it; its exception propagates. A ``SystemExit`` without an error code counts as
    success. Idempotent; after a failure, later calls raise again.

    Args:
        timeout: Timeout of the whole call. If the groups must be aborted, that may take ten seconds more.

    Raises:
        CommunicatorError: On ranks that succeeded, if another rank failed (it names that rank), or if the groups could
            not be destroyed together. The groups are aborted.
        PhaseTimeoutError: On ranks that succeeded, if a rank is lost after it reported success. It names the rank. The
            groups are aborted.
    """
    global _script
    leaving_on = _failure_in_flight()
    if _script is not None and _script.not_ended is not None and _is_of_this_world(_script):
        if leaving_on is None:
            raise CommunicatorError(f"the groups were not ended in order before: {_script.not_ended}")
        return
    if not dist.is_initialized():
        return
    script = _current()
    script.groups = frozenset()
    try:
        _end(script, leaving_on, timeout)
    except Exception as error:
        script.not_ended = in_one_line(error)
        if leaving_on is None:
            raise
        return
    _script = None


def _end(script: _Script, leaving_on: str | None, timeout: timedelta) -> None:
    """Destroys all groups together. On a failure it aborts them and raises."""
    # A failed rank reports its failure and leaves at once: other ranks may be in a collective that ends only when this
    # process ends.
    script.bound(timeout if leaving_on is None else min(timeout, _SECOND))
    trainer = script.trainer
    if not trainer.lifecycle.has_completed(Phase.WORLD):
        try:
            trainer.entry.adopt_world()
        except Exception:
            abort_groups(trainer.world, timeout=timedelta(seconds=ABORT_S))
            raise
    error, neighbours = sys.exc_info()[1], script.neighbours
    if neighbours is not None:
        neighbours.watch_exit(timeout.total_seconds())
    with nullcontext() if neighbours is None or leaving_on is None else neighbours.ending():
        if leaving_on is None:
            script.come_to(Phase.TEARDOWN)
        elif isinstance(error, Exception):
            phase = str(script.phase or trainer.lifecycle.last_failed or OUTSIDE)
            trainer.control.report_failure(error, phase=phase)
            if neighbours is not None:
                neighbours.leave_failure(error, phase)
        elif neighbours is not None:
            neighbours.leave()  # the user ends the job, so no rank may report this one as dead
        with _waiting_in(teardown.__name__, Phase.TEARDOWN):
            failed = trainer.teardown(leaving_on)
        if failed:
            _blame(script, failed, is_well=leaving_on is None)
    if failed:
        raise CommunicatorError("teardown: " + "; ".join(f"rank {other} {reason}" for other, reason in failed.items()))
    if neighbours is not None:
        neighbours.leave()


def _blame(script: _Script, failed: Mapping[int, str], *, is_well: bool) -> None:
    """Logs which rank the failure began with, and where it is. Not collective."""
    trainer, neighbours = script.trainer, script.neighbours
    if neighbours is None:
        return
    reports: dict[RankId, RunError] = {}
    attempt("reading the failures", lambda: reports.update(trainer.control.reported_failures()), timeout_s=_HEARD_S)
    silent = [rank for rank, reason in failed.items() if reason == NO_OUTCOME]
    if reports and silent:
        neighbours.say(*blame(reports, silent=silent, among=neighbours))
    elif is_well and silent:
        _, culprits, why = blame_for_the_end(
            silent,
            rank=trainer.training_rank,
            size=trainer.training_size,
            waited_s=trainer.deadline.waited_s,
            setting=f"{teardown.__name__}(timeout=...)",
            among=neighbours,
        )
        neighbours.say(culprits, why)
    elif reports:
        neighbours.say(*blame(reports, silent=(), among=neighbours))


def _failure_in_flight() -> str | None:
    """Returns the exception that this rank is leaving on, as text; None if there is none, or for an orderly exit."""
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    return f"{type(error).__name__}: {error}"


def _current() -> _Script:
    """Returns the state for the current default group. Creates it if the default group is new."""
    global _script
    if _script is None or not _is_of_this_world(_script):
        trainer = SafeTrainer(
            training_rank=dist.get_rank(),
            training_size=dist.get_world_size(),
            rl_safe=RlSafeConfig(),
            megatron=MegatronConfig(),
            device=device_of_world(),
            host_comms=_ScriptComms(),
        )
        trainer.bounds_collectives = False  # the script's groups keep its own timeouts
        _script = _Script(world=ref(dist.group.WORLD), trainer=trainer)
    return _script


def _is_of_this_world(script: _Script) -> bool:
    return not dist.is_initialized() or script.world() is dist.group.WORLD


def _require(phase: str) -> SafeTrainer:
    missing, remedy = "bootstrap() has not run", _ScriptComms.missing_groups
    if _script is not None and _script.groups and _is_of_this_world(_script):
        if {group.group.group_name for group in live_groups()} <= _script.groups:
            return _script.trainer
        missing, remedy = "groups were built since bootstrap()", "call bootstrap() again, after the last of them"
    raise LifecycleError(
        f"phase {phase} on rank {dist.get_rank()}: {missing}, so communicators would connect later, when memory is "
        f"full; {remedy}"
    )


def _agree_on_plan(
    trainer: SafeTrainer, features: Features | None, max_ctas: Mapping[str, int] | None, *, check_memory: bool
) -> None:
    """Plans the groups. If a rank cannot, raises on every rank. Collective over: the default group, by its store."""
    failure: Exception | None = None
    try:
        _plan(trainer, features, max_ctas, check_memory=check_memory)
    except Exception as error:
        failure = error
    try:
        failed = trainer.failed_ranks(Phase.BOOTSTRAP, None if failure is None else Failure.of(failure))
    except RlSafeError as error:
        if failure is None:
            raise
        # This rank's own failure is more precise than the failed agreement.
        raise failure from error
    if failure is not None:
        raise failure
    for other, told in failed.items():
        text = f"bootstrap: rank {other}: {told.text}"
        raise CommunicatorError(text, culprit=trainer_id(other), foreign=told.foreign)


def _plan(
    trainer: SafeTrainer, features: Features | None, max_ctas: Mapping[str, int] | None, *, check_memory: bool
) -> None:
    limits = limits_of_groups()  # raises an error that says what is missing if there are no groups
    # The script has already made the groups, so only its own limits apply.
    trainer.comms.limits = limits if max_ctas is None else max_ctas
    trainer.megatron, trainer.features = sizes_of_groups(), _features_of_groups(features)
    plan = trainer.comms.plan()
    plan.check_backend(dist.get_backend_config())
    room = _room(trainer.device)
    if check_memory and room is not None:
        _warn_of_missing_limits(plan)
        try:
            plan.check_fits(free_bytes=room, gpus_per_node=cuda.gpus_of_this_node())
        except CommunicatorError as error:
            raise CommunicatorError(
                f"{error}; in a script, create the groups with the arguments that channel_limits(max_ctas=...) returns"
            ) from None


def _warn_of_missing_limits(plan: CommsPlan) -> None:
    """Logs on rank 0 how much memory `channel_limits` would save."""
    if dist.get_rank() != 0:
        return
    limited = CommsPlan.of(plan.layout, plan.features, plan.limits).bytes
    if plan.bytes - limited >= WORTH_A_WARNING:
        logger.warning(
            "the groups will take %.0f MiB of device memory on each GPU; created with the arguments that "
            "channel_limits() returns, they would take %.0f MiB",
            plan.bytes / MIB,
            limited / MIB,
        )


def _room(device: torch.device) -> int | None:
    """Returns the bytes of free device memory; None on a device where communicators take none."""
    return free_bytes(device) if device.type == "cuda" else None


def _features_of_groups(given: Features | None) -> Features:
    """Returns `_features` for Megatron's groups as they are."""
    # Attention and experts share this group; with a single instance it does not exist.
    between = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    return _features(
        given,
        optimizer_instances=1 if between is None else between.size(),
        virtual_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    )


def _features(given: Features | None, *, optimizer_instances: int, virtual_size: int | None) -> Features:
    """Returns the given features; for None, the value of each feature that connects more.

    The number of optimizer instances and the virtual pipeline stages are those of the groups in both cases.
    """
    given = given or _MOST
    return replace(
        given,
        optimizer_instances=optimizer_instances,
        # A script may have set virtual stages only in Megatron's schedule, not in parallel_state.
        virtual_pipeline=given.virtual_pipeline or virtual_size is not None,
    )
