"""What the mixins do, as plain functions for a Megatron script under torchrun: three lines, and no Ray.

The script creates the default group and Megatron's groups itself. Every rank is a training rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.comms.bootstrap import Bootstrap
from rl_safe_workers.comms.catalog import live_groups
from rl_safe_workers.comms.late import LateWatch
from rl_safe_workers.comms.report import BootstrapReport
from rl_safe_workers.comms.teardown import abort_groups, destroy_groups, exchange_verdicts
from rl_safe_workers.errors import CommunicatorError, LifecycleError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.platforms.device_memory import free_bytes, outside_torch
from rl_safe_workers.topology.comms_plan import CommsPlan
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.worlds.roll_call import RollCall
from rl_safe_workers.worlds.training_world import TrainingWorld

MINUTES_5 = timedelta(minutes=5)
_SECOND = timedelta(seconds=1)


@dataclass(kw_only=True)
class _Script:
    """What the functions of one process share."""

    store: Store
    groups: frozenset[str]
    """torch's names of the groups that the bootstrap has connected or left out."""
    late: LateWatch
    watched: dict[str, int] = field(default_factory=dict)


_script: _Script | None = None


def bootstrap(
    *, features: Features | None = None, max_ctas: Mapping[str, int] | None = None, timeout: timedelta = MINUTES_5
) -> BootstrapReport:
    """Connects every communicator for what it will carry. Collective over: the default group. Idempotent.

    Call it after ``initialize_model_parallel`` and before the model is built, and again after groups were built anew.
    For a dense model the expert groups have one rank or carry nothing, and are left out.

    Args:
        features: What decides which collectives the groups carry; None: the all-to-all dispatcher, and what costs most
            where it cannot be known.
        max_ctas: The limits that the script gave Megatron in ``nccl_communicator_config_path``, for the prediction.
        timeout: Longest time for all of it.

    Returns:
        What each op class of each group has cost this rank.

    Raises:
        CommunicatorError: On every rank, if Megatron's groups do not exist, plans differ or a rank fails; names it.
        PhaseTimeoutError: On every rank, if one does not come to a group in time; names it.
    """
    global _script
    groups, device = live_groups(), _device()
    layout, probe = _layout(), outside_torch(device)
    store = PrefixStore("rl_safe", c10d._get_default_store())
    plan = CommsPlan.of(layout, features or Features(), max_ctas or {})
    plan.check_backend(dist.get_backend_config())
    if device.type == "cuda" and _script is None:
        plan.check_fits(free_bytes=free_bytes(device))
    work = Bootstrap(
        store, training_rank=dist.get_rank(), layout=layout, features=plan.features, limits=dict(max_ctas or {}),
        device=device, probe=probe,
    )  # fmt: skip
    report = work.run(timeout=timeout)
    names = frozenset(group.group.group_name for group in groups)
    _script = _Script(store=store, groups=names, late=LateWatch(work.connected, probe=probe))
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
    script = _require(phase)
    if script.watched.get(phase, 0) >= watch_steps:
        yield
        return
    script.watched[phase] = script.watched.get(phase, 0) + 1
    with script.late.watching(phase) as found:
        yield
    script.late.report(found, who=f"rank {dist.get_rank()}", refuse=refuse)


def teardown(*, timeout: timedelta = timedelta(seconds=60)) -> None:
    """Ends the script's groups: together if all ranks are well, else without a collective. For a ``finally``.

    Collective over: the default group, through its store. A rank that is leaving on an exception tells the others, none
    of whom then waits for it; its exception goes on. Idempotent.

    Raises:
        CommunicatorError: On ranks that are well, if another is not; names it.
    """
    global _script
    if not dist.is_initialized():
        return
    failure, rank, size = sys.exc_info()[1], dist.get_rank(), dist.get_world_size()
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    store = PrefixStore("rl_safe/teardown", c10d._get_default_store())
    # A rank that has failed tells so and goes: others may be in a collective that ends only with its process.
    patience = timeout if failure is None else min(timeout, _SECOND)
    failed = exchange_verdicts(store, training_rank=rank, size=size, failure=text, timeout=patience)
    _script = None
    world = TrainingWorld(training_rank=rank, size=size, joint_ranks=tuple(range(size)))
    if not failed:
        roll_call = RollCall(store, world="script", group_rank=rank, size=size)
        roll_call.arrive(Phase.TEARDOWN, timeout=timeout)
        destroy_groups(world, timeout=timeout)
        # The store may be rank 0's, which stays until every other rank has left its groups.
        roll_call.sign_off(Phase.TEARDOWN, timeout=timeout)
        return
    abort_groups(world, timeout=timeout)
    if failure is None:
        named = "; ".join(f"rank {other} {reason}" for other, reason in failed.items())
        raise CommunicatorError(f"teardown: {named}")


def _require(phase: str) -> _Script:
    missing = "bootstrap() has not run"
    if _script is not None:
        names = {group.group.group_name for group in live_groups()}
        if names <= _script.groups:
            return _script
        missing = "groups were built since bootstrap()"
    raise LifecycleError(
        f"phase {phase} on rank {dist.get_rank()}: {missing}, so communicators would connect later, when memory is "
        "full; call bootstrap() after initialize_model_parallel()"
    )


def _device() -> torch.device:
    if "nccl" in dist.get_backend() and torch.cuda.is_available():
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
