"""Gives the communicators' memory to the rollout, and takes it back: release and rebuild of every releasable group.

    release   drain -> agreement -> drop every generation, all at once -> agreement
    rebuild   agreement -> next generation of every group, first created first -> agreement -> bootstrap -> agreement

The ranks agree over the store, since no group can carry that. A rank leaves either call only when all are
done, so nobody starts a collective on a group that another still makes; and a rank that fails, fails them all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl_safe_workers.comms.releasable import STORE_PREFIX, GroupState, ReleasableGroup
from rl_safe_workers.comms.teardown import end_alone, end_together
from rl_safe_workers.compat import torch_groups
from rl_safe_workers.control.board import forget_where
from rl_safe_workers.control.bounded import failure_of, within
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.failure import Failure
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import CommunicatorError, PhaseTimeoutError, RlSafeError, first_line
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id

logger = logging.getLogger(__name__)

_WORK_SHARE = 0.8
"""Share of the time that is left, for work that may hang. In the rest the ranks tell each other about it."""
_UNDO = timedelta(seconds=10)
"""Longest time to take back what a rebuild that failed has made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReport:
    """The result of a release on this rank.

    Example: ``ReleaseReport(groups=9, seconds=0.08, freed_bytes=4446000000)``
    """

    groups: int
    seconds: float
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildReport:
    """The result of a rebuild on this rank.

    Example: ``RebuildReport(groups=9, generation=3, connect_s=0.05, seconds=0.11, taken_bytes=4446000000)``
    """

    groups: int
    generation: int
    connect_s: float
    """Until every rank had the groups; ``seconds`` counts the bootstrap, too."""
    seconds: float
    taken_bytes: int = 0


def releasable_groups() -> list[ReleasableGroup]:
    """Lists this process's releasable groups in the order of their creation, the default group among them."""
    return sorted(
        (g for g in torch_groups.registered_groups() if isinstance(g, ReleasableGroup)), key=lambda group: group.serial
    )


def release(
    groups: Iterable[dist.ProcessGroup] | None = None,
    *,
    control: ControlPlane,
    timeout: timedelta,
    phase: Phase = Phase.OFFLOAD,
    missing_call: str = "rebuild()",
    used_bytes: Callable[[], int] | None = None,
) -> ReleaseReport:
    """Drops the communicators of groups, which stay the same objects. Collective over: the training world. Idempotent.

    What was released before or has been destroyed is passed over. Works that are still pending are waited for first.
    If a rank fails before any group is dropped, all of them stay usable.

    Args:
        groups: What to release; None for all that this process has. Every member of a group releases it.
        control: This rank's place in the training world.
        timeout: Longest time that this takes.
        phase: The phase whose deadline that is, for errors.
        missing_call: What makes the groups usable again, for the error of a caller that uses one before.
        used_bytes: Tells the device memory in use; called before and after.

    Raises:
        PhaseTimeoutError: If a rank does not come in time; names it.
        CommunicatorError: On every rank, if one failed, naming it; if a group is not releasable, or is released on
            some of its members only.
    """
    start_s = time.monotonic()
    ranks = _Ranks(control, "release", phase=phase, timeout=timeout)
    live: list[ReleasableGroup] = []

    def drain() -> None:
        live.extend(_in_state(groups, GroupState.CONNECTED))
        _drain(live, ranks.deadline.share(_WORK_SHARE))

    failure = failure_of(drain)
    ranks.agree(failure, groups=live)
    gone = ranks.generations
    before = used_bytes() if used_bytes is not None else 0
    # Nobody is inside a collective any more, on any rank.
    failure = _drop(live, missing_call, ranks.deadline.share(_WORK_SHARE).remaining())
    ranks.agree(failure)
    if control.rank == 0:
        _forget_keys(live, gone)
    report = ReleaseReport(
        groups=len(live),
        seconds=time.monotonic() - start_s,
        freed_bytes=before - used_bytes() if used_bytes is not None else 0,
    )
    logger.info("released %s", report)
    return report


def rebuild(
    groups: Iterable[dist.ProcessGroup] | None = None,
    *,
    control: ControlPlane,
    timeout: timedelta,
    bootstrap: Callable[[timedelta], object] | None = None,
    phase: Phase = Phase.ONLOAD,
    used_bytes: Callable[[], int] | None = None,
) -> RebuildReport:
    """Makes the next generation of released groups. Collective over: the training world. Idempotent.

    Options, description and timeout of a group are those that it had. If a rank fails, the groups are released again on
    every rank, and a later rebuild may succeed.

    Args:
        groups: What to rebuild; None for all released ones of this process. Every member of a group rebuilds it.
        control: This rank's place in the training world.
        timeout: Longest time that this takes.
        bootstrap: Called once every rank has its groups, to connect each op class of each within the time that it is
            given; collectives on the groups are bound by that, too.
        phase: The phase whose deadline that is, for errors.
        used_bytes: Tells the device memory in use; called before and after.

    Raises:
        PhaseTimeoutError: If a rank does not come in time; names it.
        CommunicatorError: On every rank, if one failed, naming it; or if a group is released on some of its members
            only.
    """
    start_s = time.monotonic()
    ranks = _Ranks(control, "rebuild", phase=phase, timeout=timeout)
    before = used_bytes() if used_bytes is not None else 0
    released: list[ReleasableGroup] = []
    failure = failure_of(lambda: released.extend(_in_state(groups, GroupState.RELEASED)))
    generation = ranks.agree(failure, groups=released)["generation"]
    _do_together(ranks, released, lambda: _reconnect(released, generation, ranks))
    connected_s = time.monotonic()
    if bootstrap is not None:
        _do_together(ranks, released, lambda: _bounded_bootstrap(released, bootstrap, ranks))
    report = RebuildReport(
        groups=len(released),
        generation=generation,
        connect_s=connected_s - start_s,
        seconds=time.monotonic() - start_s,
        taken_bytes=used_bytes() - before if used_bytes is not None else 0,
    )
    logger.info("rebuilt %s", report)
    return report


class _Ranks:
    """The agreements of one release or rebuild, one after the other, within one deadline."""

    def __init__(self, control: ControlPlane, what: str, *, phase: Phase, timeout: timedelta) -> None:
        self._control, self._what, self._phase = control, what, phase
        self.generations: dict[str, int] = {}
        """Generations of every rank's groups at the last agreement, by the group's name; on rank 0."""
        self._together_s = time.monotonic()
        self.deadline = Deadline.after(timeout)

    def elapsed_s(self) -> float:
        """Seconds since the last agreement, at which all ranks were together."""
        return time.monotonic() - self._together_s

    def agree(
        self,
        failure: Exception | None,
        *,
        groups: Sequence[ReleasableGroup] = (),
        after_s: float | None = None,
    ) -> Any:
        """Waits for every rank and learns of every failure. Collective over: the training world.

        Args:
            failure: What this rank has failed with, if it has.
            groups: What it brings along.
            after_s: When it failed, as `elapsed_s`; None: now. The first to fail is named first: others may have waited
                for it in vain.

        Returns:
            ``generation``, the next one.

        Raises:
            PhaseTimeoutError: If a rank does not come.
            CommunicatorError: If a rank has failed, or not all members of a group brought it along.
        """
        report = {
            "failure": None if failure is None else Failure.of(failure).as_json(),
            "after_s": self.elapsed_s() if after_s is None else after_s,
            "groups": {group.key: [group.generation, group.size(), group.label] for group in groups},
        }

        def decide(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            outcome = _judge(reports)
            self.generations = outcome.pop("groups")
            return outcome

        try:
            # A step of a release and one of a rebuild are never the same.
            gathering = self._control.gathering("release", phase=self._phase)
            outcome = gathering.settle(self.deadline, report=report, decide=decide)
        except RlSafeError as error:
            # Who has named the missing ranks knows better than who finds others gone, for that very reason.
            if isinstance(failure, PhaseTimeoutError):
                raise failure from error
            raise error from failure
        self._together_s = time.monotonic()
        if outcome["failures"]:
            culprit = None if outcome["culprit"] is None else trainer_id(outcome["culprit"])
            text = f"{self._what}: {'; '.join(outcome['failures'])}"
            raise CommunicatorError(text, culprit=culprit, foreign=ForeignCause(outcome["foreign"])) from failure
        return outcome


def _judge(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Decides, on rank 0, from what every rank reported."""
    told = {rank: Failure.from_json(r["failure"]) for rank, r in enumerate(reports) if r["failure"] is not None}
    failed = sorted(told, key=lambda rank: (reports[rank]["after_s"], rank))
    failures = [f"training rank {rank}: {told[rank].text}" for rank in failed]
    # The first to fail; before it one that did not only wait for others.
    culprit = min(failed, key=lambda rank: told[rank].foreign.is_about_others, default=None)
    brought: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        for name in report["groups"]:
            brought.setdefault(name, []).append(rank)
    groups = {name: entry for report in reports for name, entry in report["groups"].items()}
    if not failures:
        failures = [
            f"group {label} has {members} members, but only training ranks {brought[name]} brought it along"
            for name, (_, members, label) in groups.items()
            if len(brought[name]) != members
        ]
    generations = [entry[0] for report in reports for entry in report["groups"].values()]
    return {
        "failures": failures,
        "culprit": culprit,
        "foreign": ForeignCause.UNKNOWN if culprit is None else told[culprit].foreign,
        "generation": 1 + max(generations, default=0),
        "groups": {name: entry[0] for name, entry in groups.items()},
    }


def _in_state(groups: Iterable[dist.ProcessGroup] | None, state: GroupState) -> list[ReleasableGroup]:
    """The groups in a state, in the order of creation: the one order that all members of all groups share."""
    if groups is None:
        return [group for group in releasable_groups() if group.state is state]
    chosen = []
    for group in dict.fromkeys(groups):
        if not isinstance(group, ReleasableGroup):
            raise CommunicatorError(
                f"group {group.group_desc or group.group_name} cannot be released: create the training world with the "
                "backend that register_backend returned"
            )
        if group.state is state:
            chosen.append(group)
    return sorted(chosen, key=lambda group: group.serial)


def _drain(groups: Sequence[ReleasableGroup], deadline: Deadline) -> None:
    """Waits until nothing of these groups is under way on this rank. Not collective.

    Raises:
        CommunicatorError: If something still is at the deadline, as a receive that nobody sends to.
    """
    for group in groups:
        for work in group.pending_works():
            try:
                work.wait(deadline.remaining())
            except RuntimeError as error:
                raise CommunicatorError(
                    f"group {group.label} has an operation that does not end: {first_line(error)}"
                ) from error
    if any("cuda" in group.channels for group in groups):
        within(torch.cuda.synchronize, deadline.remaining(), what="what is queued on the GPU")


def _drop(groups: Sequence[ReleasableGroup], missing_call: str, patience: timedelta) -> Exception | None:
    """Ends the groups' communicators, also past failures. Collective over: each group, on NCCL."""
    return end_together([(group.label, group.detach(missing_call=missing_call)) for group in groups], patience)


def _do_together(ranks: _Ranks, groups: Sequence[ReleasableGroup], work: Callable[[], object]) -> None:
    """Does a part of a rebuild and learns how the others fared; releases the groups again if it failed anywhere."""
    failure, after_s = failure_of(work), ranks.elapsed_s()
    if failure is not None:
        # Before the agreement: a rank that waits for this one in a collective of gloo then fails at once.
        _release_again(groups)
    try:
        ranks.agree(failure, after_s=after_s)
    except RlSafeError:
        _release_again(groups)
        raise


def _release_again(groups: Sequence[ReleasableGroup]) -> None:
    """Undoes a rebuild that has failed, without the others, who may be anywhere."""
    connected = [group for group in groups if group.state is GroupState.CONNECTED]
    failure = end_alone([(group.label, group.detach()) for group in connected], _UNDO)
    if failure is not None:
        logger.warning("rebuild: the groups could not be released again: %s", failure)


def _reconnect(groups: Sequence[ReleasableGroup], generation: int, ranks: _Ranks) -> None:
    deadline = ranks.deadline.share(_WORK_SHARE)
    for group in groups:
        try:
            group.reconnect(generation, bound=deadline.remaining())
        except RuntimeError as error:
            raise CommunicatorError(f"group {group.label} could not be connected again: {first_line(error)}") from error


def _bounded_bootstrap(
    groups: Sequence[ReleasableGroup], bootstrap: Callable[[timedelta], object], ranks: _Ranks
) -> None:
    for group in groups:
        group.limit(ranks.deadline.share(_WORK_SHARE).remaining())
    bootstrap(ranks.deadline.share(_WORK_SHARE).remaining())
    for group in groups:
        group.limit(None)


def _forget_keys(groups: Sequence[ReleasableGroup], gone: Mapping[str, int]) -> None:
    """Deletes what generations that are gone everywhere have left in the store. One rank does it for all."""
    if not groups:
        return

    def is_gone(key: str) -> bool:
        _, found, rest = key.partition(f"/{STORE_PREFIX}/")
        name, generation = rest.split("/")[:2] if found else ("", "")
        return generation.isdigit() and int(generation) <= gone.get(name, -1)

    forget_where(groups[0].get_group_store(), is_gone)
