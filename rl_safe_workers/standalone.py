"""What the mixins do, as plain functions for a Megatron script under torchrun: three lines, and no Ray.

The script creates the default group and Megatron's groups itself. Every rank is a training rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.comms.bootstrap import Bootstrap
from rl_safe_workers.comms.catalog import live_groups
from rl_safe_workers.comms.late import LateWatch
from rl_safe_workers.comms.report import BootstrapReport
from rl_safe_workers.comms.teardown import abort_groups, destroy_groups
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.shared_secret import SharedSecret
from rl_safe_workers.errors import CommunicatorError, Failure, LifecycleError, RlSafeError, in_one_line
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.platforms import cuda
from rl_safe_workers.platforms.device_memory import free_bytes, outside_torch
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.topology.comms_plan import CommsPlan
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.workers.base import SafeWorker
from rl_safe_workers.worlds.training_world import TrainingWorld

MINUTES_5 = timedelta(minutes=5)
_SECOND = timedelta(seconds=1)
_ABORT = timedelta(seconds=10)
"""Longest time to abort groups that cannot be destroyed."""


@dataclass(kw_only=True)
class _Script:
    """What the functions of one process share, of one default group."""

    world: ReferenceType[Any]
    """The default group."""
    store: Store
    """Its store, from the first bootstrap on over a connection of its own."""
    control: ControlPlane | None = None
    """This rank's place among all; None until a call needs it."""
    shared: SharedSecret | None = None
    groups: frozenset[str] = frozenset()
    """torch's names of the groups that the bootstrap has connected or left out."""
    late: LateWatch | None = None
    """None until the bootstrap has run."""
    watched: dict[str, int] = field(default_factory=dict)
    not_ended: str | None = None
    """Why a teardown has not ended the groups in order."""


class _Rank(SafeWorker):
    """This process among the script's, with one deadline for all waits of a call."""

    def __init__(self, script: _Script, timeout: timedelta, *, phase: Phase) -> None:
        self.training_rank, self.training_size = dist.get_rank(), dist.get_world_size()
        self.deadline = self._deadline = Deadline.after(timeout)
        if script.control is None:
            store = PrefixStore("rl_safe", script.store)
            script.shared = SharedSecret(
                store, rank=self.training_rank, size=self.training_size, phase=phase, deadline=self.deadline
            )
            script.control = ControlPlane(
                store,
                world="script",
                rank=self.training_rank,
                members=trainer_ids(range(self.training_size)),
                secret=script.shared.secret,
            )
        self.control = script.control


_script: _Script | None = None


def bootstrap(
    *, features: Features | None = None, max_ctas: Mapping[str, int] | None = None, timeout: timedelta = MINUTES_5
) -> BootstrapReport:
    """Connects every communicator for what it will carry. Collective over: the default group. Idempotent.

    Call it after ``initialize_model_parallel`` and before the model is built, and again after groups were built anew.
    What Megatron's groups tell is taken from them: the parallel sizes, the number of optimizer instances, and that
    there are virtual pipeline stages.

    Args:
        features: What else decides which collectives the groups carry. None: for each feature what connects more,
            experts among them, and the all-to-all dispatcher. For a dense model ``Features(moe=False)`` leaves the
            expert groups out, and what is not said of it has the defaults of `Features`.
        max_ctas: The limits that the script gave Megatron in ``nccl_communicator_config_path``, for the prediction.
        timeout: Longest time for all of it.

    Returns:
        What each op class of each group has cost this rank.

    Raises:
        ConfigError: On a rank whose ``max_ctas`` names no group, or limits one to no number of CTAs.
        CommunicatorError: On every rank, if Megatron's groups do not exist, plans differ, a rank has less memory free
            than its groups will take, or fails otherwise; names it.
        PhaseTimeoutError: On every rank, if one does not come in time; names it.
    """
    if not dist.is_initialized():
        raise CommunicatorError(
            "there is no default group: call init_process_group and initialize_model_parallel before bootstrap()"
        )
    script = _current()
    if script.late is None:
        # NCCL's first collectives wait in the group's own connection. Where they never end, a teardown still needs one.
        script.store = c10d._get_default_store().clone()  # type: ignore[attr-defined]
    rank = _Rank(script, timeout, phase=Phase.BOOTSTRAP)
    plan, device = _agreed_plan(rank, features, max_ctas or {}, check_memory=script.late is None)
    _withdraw(script)
    probe = outside_torch(device)
    work = Bootstrap(
        rank.control, layout=plan.layout, features=plan.features, limits=plan.limits, device=device, probe=probe
    )
    report = work.run(timeout=rank.remaining())
    script.groups = frozenset(group.group.group_name for group in live_groups())
    script.late, script.watched = LateWatch(work.connected, probe=probe), {}
    return report


@contextmanager
def guard(phase: str = "train", *, watch_steps: int = 3, refuse: bool = False) -> Iterator[None]:
    """Refuses a phase before the bootstrap; looks in its first bodies for device memory that collectives take late.

    Not collective.

    Args:
        phase: Its name, for errors.
        watch_steps: In how many bodies of the phase to look.
        refuse: Whether to raise if something is found, after the body; else it is in the warnings.

    Raises:
        LifecycleError: If `bootstrap` has not run, or groups were built since.
        CommunicatorError: If ``refuse``, and the bootstrap has missed something.
    """
    script, late = _require(phase)
    if script.watched.get(phase, 0) >= watch_steps:
        yield
        return
    script.watched[phase] = script.watched.get(phase, 0) + 1
    with late.watching(phase) as found:
        yield
    late.report(found, who=f"rank {dist.get_rank()}", refuse=refuse)


def teardown(*, timeout: timedelta = timedelta(seconds=60)) -> None:
    """Ends the script's groups: together if all ranks are well, else without a collective. For a ``finally``.

    Collective over: the default group, through its store. A rank that is leaving on an exception tells the others, none
    of whom then waits for it; its exception goes on. A ``SystemExit`` without an error code is an orderly end.
    Idempotent: after a failure it raises again.

    Args:
        timeout: Longest time for all of it. To abort the groups, where that is needed, may take ten seconds more.

    Raises:
        CommunicatorError: On ranks that are well, if another is not, and names it; or if the groups could not be ended
            together. They are aborted.
        PhaseTimeoutError: On ranks that are well, if one is lost after it has said that all is well; names it. The
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
    script.late = None
    try:
        _end(script, leaving_on, timeout)
    except Exception as error:
        script.not_ended = in_one_line(error)
        abort_groups(_world(), timeout=_ABORT)
        if leaving_on is None:
            raise
        return
    _script = None


def _end(script: _Script, leaving_on: str | None, timeout: timedelta) -> None:
    """Ends all groups together; raises what keeps this rank from it."""
    # A rank that has failed tells so and goes: others may be in a collective that ends only with its process.
    rank = _Rank(script, timeout if leaving_on is None else min(timeout, _SECOND), phase=Phase.TEARDOWN)
    failed = rank.control.exchange_verdicts(leaving_on, phase=Phase.TEARDOWN, deadline=rank.deadline)
    if failed:
        # Some may have yet to read the secret; it goes with this process.
        raise CommunicatorError("teardown: " + "; ".join(f"rank {other} {reason}" for other, reason in failed.items()))
    _withdraw(script)
    rank.control.barrier(Phase.TEARDOWN, rank.deadline)
    destroy_groups(_world(), timeout=rank.remaining())
    # The store may be rank 0's, which stays until every other rank has left its groups.
    rank.control.sign_off(Phase.TEARDOWN, rank.deadline)


def _withdraw(script: _Script) -> None:
    """Removes the secret from where all have read it."""
    if script.shared is not None:
        script.shared.withdraw()


def _failure_in_flight() -> str | None:
    """The exception that this rank is leaving on; None if there is none, or it is an orderly end."""
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    return f"{type(error).__name__}: {error}"


def _current() -> _Script:
    """What is known of the default group, which may be another one than before."""
    global _script
    if _script is None or not _is_of_this_world(_script):
        _script = _Script(world=ref(dist.group.WORLD), store=c10d._get_default_store())
    return _script


def _is_of_this_world(script: _Script) -> bool:
    return not dist.is_initialized() or script.world() is dist.group.WORLD


def _world() -> TrainingWorld:
    size = dist.get_world_size()
    return TrainingWorld(training_rank=dist.get_rank(), size=size, joint_ranks=tuple(range(size)))


def _require(phase: str) -> tuple[_Script, LateWatch]:
    missing = "bootstrap() has not run"
    if _script is not None and _script.late is not None and _is_of_this_world(_script):
        names = {group.group.group_name for group in live_groups()}
        if names <= _script.groups:
            return _script, _script.late
        missing = "groups were built since bootstrap()"
    raise LifecycleError(
        f"phase {phase} on rank {dist.get_rank()}: {missing}, so communicators would connect later, when memory is "
        "full; call bootstrap() after initialize_model_parallel()"
    )


def _agreed_plan(
    rank: _Rank, features: Features | None, max_ctas: Mapping[str, int], *, check_memory: bool
) -> tuple[CommsPlan, torch.device]:
    """Plans; raises on every rank if one cannot. Collective over: the default group, through its store."""
    planned: tuple[CommsPlan, torch.device] | Exception
    try:
        planned = _plan(features, max_ctas, check_memory=check_memory)
    except Exception as error:
        planned = error
    failure = planned if isinstance(planned, Exception) else None
    try:
        failed = rank.failed_ranks(Phase.BOOTSTRAP, None if failure is None else Failure.of(failure))
    except RlSafeError as error:
        if failure is None:
            raise
        # What this rank knows best, whatever became of the others.
        raise failure from error
    if isinstance(planned, Exception):
        raise planned
    for other, (text, foreign) in failed.items():
        raise CommunicatorError(f"bootstrap: rank {other}: {text}", culprit=trainer_id(other), foreign=foreign)
    return planned


def _plan(
    features: Features | None, max_ctas: Mapping[str, int], *, check_memory: bool
) -> tuple[CommsPlan, torch.device]:
    live_groups()  # says what is missing where there are none
    device = _device()
    # The script has made the groups already, with no limits but its own.
    plan = CommsPlan.of(_layout(), _features(features), max_ctas, budget=False)
    plan.check_backend(dist.get_backend_config())
    room = _room(device)
    if check_memory and room is not None:
        try:
            plan.check_fits(free_bytes=room, gpus_per_node=cuda.gpus_of_this_node())
        except CommunicatorError as error:
            raise CommunicatorError(
                f"{error}, in the file that Megatron reads through nccl_communicator_config_path and in the max_ctas "
                "of bootstrap()"
            ) from None
    return plan, device


def _room(device: torch.device) -> int | None:
    """Bytes of device memory that nobody uses; None where communicators take none."""
    return free_bytes(device) if device.type == "cuda" else None


def _device() -> torch.device:
    """Where the groups' tensors are. Several backends of one group have no common name, so the one for GPUs counts."""
    backends = dict(part.split(":", 1) for part in dist.get_backend_config().split(","))
    if "nccl" in backends.get("cuda", "") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _layout() -> ParallelLayout:
    return ParallelLayout(
        world_size=dist.get_world_size(),
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
    )


def _features(given: Features | None) -> Features:
    """Those given, or for each what connects more; what Megatron's groups tell is taken from them in both cases."""
    if given is None:
        given = Features(
            moe=True,
            distributed_optimizer=False,
            fp8=True,
            expert_bias=True,
            aux_loss=True,
            context_exchange=frozenset({"p2p", "a2a"}),
        )
    # Attention and experts share it; there is none for a single instance.
    between = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    virtual_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return replace(
        given,
        optimizer_instances=1 if between is None else between.size(),
        # A script may also tell Megatron's schedule alone.
        virtual_pipeline=given.virtual_pipeline or virtual_size is not None,
    )
