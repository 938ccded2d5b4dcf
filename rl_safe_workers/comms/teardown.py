"""Ends the groups of the training world within a deadline: all at once, and by an abort if that takes too long."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.comms.releasable import ReleasableGroup
from rl_safe_workers.compat import torch_groups
from rl_safe_workers.control.bounded import failure_of, in_background, within
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import CommunicatorError, foreign_cause, in_one_line
from rl_safe_workers.worlds.training_world import TrainingWorld

logger = logging.getLogger(__name__)

T = TypeVar("T")

Named = tuple[str, Any]
"""One of torch's backends, and a name for messages."""


def destroy_groups(world: TrainingWorld, *, timeout: timedelta) -> None:
    """Destroys the training world's groups and clears Megatron's globals. Collective over: the training world.

    In isolated mode that is every group of the process. In carved mode the host's groups stay, and the host's default
    group becomes the default one again. All groups end at once. One by one, in the order of creation, they would
    deadlock where members hold different subsets of groups, such as embedding groups with four pipeline stages. NCCL
    would also take a third of a second for each. Idempotent.

    Args:
        world: The training world.
        timeout: Longest time for the destruction. NCCL itself waits for a peer without end.

    Raises:
        CommunicatorError: If a group could not be ended together with its other members. All groups are then aborted.
    """
    parallel_state.destroy_model_parallel()
    if not dist.is_initialized():
        return
    ours = _groups(world)
    failure = end_together(_backends(ours), timeout)
    if world.host_group is None:
        # torch would use these names to shut every group down a second time, one after the other.
        torch_groups.forget_names()
        dist.destroy_process_group()
    else:
        torch_groups.make_default(world.host_group)
        for group in ours:
            dist.destroy_process_group(group)
        # Give the host's next group the same name as on the rollout ranks, which created none of our groups.
        torch_groups.reset_group_count(world.host_group_count)
    if failure is not None:
        raise CommunicatorError(f"the groups were aborted, not destroyed: {failure}") from failure


def abort_groups(world: TrainingWorld, *, timeout: timedelta) -> None:
    """Aborts the training world's NCCL communicators, so that this process can end whatever the others do.

    Not collective. The groups stay known to torch, but cannot be used. Gloo groups need no abort.

    Args:
        world: The training world.
        timeout: Longest time for the aborts. Groups that are not aborted by then are left alone.
    """
    if not dist.is_initialized():
        return
    nccl = [(name, backend) for name, backend in _backends(_groups(world)) if hasattr(backend, "_group_start")]
    failure = end_alone(nccl, timeout) if nccl else None
    if failure is not None:
        logger.warning("teardown: %s", failure)


def _groups(world: TrainingWorld) -> list[dist.ProcessGroup]:
    return [group for group in torch_groups.registered_groups() if group not in world.host_groups]


def _backends(groups: Sequence[dist.ProcessGroup]) -> list[Named]:
    found: list[Named] = []
    for group in groups:
        if isinstance(group, ReleasableGroup):
            found += [(group.label, backend) for backend in group.close()]
        else:
            name = f"{group.group_desc or group.group_name} {dist.get_process_group_ranks(group)}"
            found += [(name, backend) for backend in torch_groups.backends_of(group)]
    return found


def end_together(backends: list[Named], patience: timedelta) -> Exception | None:
    """Shuts communicators down; goes on after a failure. Collective over: each group, with NCCL; not with gloo.

    It shuts all down at once, so no group waits for another. Each takes half a second to stop its threads, and these
    times overlap. If a shutdown does not end, e.g. because a peer has died, it aborts them, which needs no peer.

    Args:
        backends: Backends to end. Those that have ended are removed from the list.
        patience: Longest time for all of them.

    Returns:
        The first failure, or None.
    """
    failure = _end(backends, "shutdown", patience / 2)
    if failure is not None:
        logger.warning("%s; aborting the communicators", failure)
        end_alone(backends, patience / 2)
    return failure


def end_alone(backends: list[Named], patience: timedelta) -> Exception | None:
    """Aborts communicators, whatever their other members do. Not collective. Otherwise as `end_together`."""
    return _end(backends, "abort", patience)


def _end(backends: list[Named], how: str, patience: timedelta) -> Exception | None:
    failures: list[Exception] = []

    def end(holder: list[Named]) -> None:
        # This thread holds the last reference. When it goes, gloo takes 10 ms to close the group's connections.
        named = holder.pop()
        failure = failure_of(getattr(named[1], how))
        if failure is not None:
            text = f"group {named[0]}: {in_one_line(failure)}"
            failures.append(CommunicatorError(text, foreign=foreign_cause(failure)))
            return
        with suppress(ValueError):  # aborted meanwhile
            backends.remove(named)

    def end_all() -> None:
        if how == "shutdown":
            _at_once([partial(end, [named]) for named in backends])
            return
        held = list(backends)  # until NCCL has aborted them all
        with _one_abort(backend for _, backend in held):
            for named in held:
                end([named])

    late = failure_of(lambda: within(end_all, patience, what=f"{how} of communicators"))
    return late or (failures[0] if failures else None)


@contextmanager
def _one_abort(backends: Iterable[Any]) -> Iterator[None]:
    """Groups all NCCL aborts of the body into one, so that no abort waits for another (pytorch#119797)."""
    nccl = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    if nccl is not None:
        nccl._group_start()
    try:
        yield
    finally:
        if nccl is not None:
            nccl._group_end()


def _at_once(works: Sequence[Callable[[], None]]) -> None:
    """Runs each function in a thread of its own, and waits for all."""
    never = Deadline.after(math.inf)
    for work in [in_background(work, name="ending a group") for work in works]:
        work.wait(never)
