"""Releases every releasable group before a rollout, to free the communicators' memory, and rebuilds them after it.

    release   drain -> agreement -> drop every generation, all at once -> agreement
    rebuild   agreement -> next generation of every group, first created first -> agreement -> bootstrap -> agreement

The ranks agree over the store, since no group is available for that. A rank returns only when all ranks are done, so
no rank starts a collective on a group that another rank is still making. If one rank fails, all ranks fail.
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
"""Share of the remaining time for work that may hang. The ranks need the rest to tell each other that it hangs."""
_UNDO = timedelta(seconds=10)
"""Longest time to undo a failed rebuild."""


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
    """Seconds until every rank had the groups; ``seconds`` includes the bootstrap."""
    seconds: float
    taken_bytes: int = 0


def releasable_groups() -> list[ReleasableGroup]:
    """Lists this process's releasable groups, the default group included, in the order of their creation."""
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

    It skips groups that are released or destroyed already, and first waits for pending works. If a rank fails before
    any group is dropped, all groups stay usable.

    Args:
        groups: Groups to release; None for all of this process. Every member of a group must release it.
        control: This rank's place in the training world.
        timeout: Longest time for the release.
        phase: The phase to which the timeout belongs, for errors.
        missing_call: The call that makes the groups usable again. If somebody uses a group before it, the error names
            this call.
        used_bytes: Returns the device memory in use; called before and after.

    Raises:
        PhaseTimeoutError: If a rank does not come in time; names it.
        CommunicatorError: On every rank, if one failed; the message names it. Also if a group is not releasable, or
            only some of its members released it.
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
    # From here on, no rank is inside a collective.
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

    A group keeps its options, description and timeout. If a rank fails, every rank releases the groups again, and a
    later rebuild may succeed.

    Args:
        groups: Groups to rebuild; None for all released ones of this process. Every member of a group must rebuild it.
        control: This rank's place in the training world.
        timeout: Longest time for the rebuild.
        bootstrap: Called once every rank has its groups, to connect each op class of each group. Its argument is the
            time that it may take, which is also the timeout of collectives on the groups meanwhile.
        phase: The phase to which the timeout belongs, for errors.
        used_bytes: Returns the device memory in use; called before and after.

    Raises:
        PhaseTimeoutError: If a rank does not come in time; names it.
        CommunicatorError: On every rank, if one failed; the message names it. Also if only some members of a group
            have it released.
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
    """The consecutive agreements of one release or rebuild, within one deadline."""

    def __init__(self, control: ControlPlane, what: str, *, phase: Phase, timeout: timedelta) -> None:
        self._control, self._what, self._phase = control, what, phase
        self.generations: dict[str, int] = {}
        """On rank 0: the generation of each group of every rank at the last agreement, by the group's name."""
        self._together_s = time.monotonic()
        self.deadline = Deadline.after(timeout)

    def elapsed_s(self) -> float:
        """Returns the seconds since the last agreement, which all ranks left at about the same time."""
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
            failure: This rank's failure; None if it has none.
            groups: The groups that this rank takes part with.
            after_s: The time of the failure, as `elapsed_s` returns it; None: the time of this call. The error lists
                the rank that failed first before the others, because they may have waited for it in vain.

        Returns:
            A mapping whose ``generation`` is the number of the next generation.

        Raises:
            PhaseTimeoutError: If a rank does not come.
            CommunicatorError: If a rank has failed, or not all members of a group take part with it.
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
            # Release and rebuild share this name. Each step is a numbered operation of its own, so none are mixed up.
            gathering = self._control.gathering("release", phase=self._phase)
            outcome = gathering.settle(self.deadline, report=report, decide=decide)
        except RlSafeError as error:
            # This rank's timeout names the missing ranks, and may be the reason why other ranks are gone now.
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
    # The culprit is the first to fail, but a rank with a failure of its own comes before ranks that waited for others.
    culprit = min(failed, key=lambda rank: told[rank].foreign.is_about_others, default=None)
    released: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        for name in report["groups"]:
            released.setdefault(name, []).append(rank)
    groups = {name: entry for report in reports for name, entry in report["groups"].items()}
    if not failures:
        failures = [
            f"group {label} has {members} members, but only training ranks {released[name]} release it"
            for name, (_, members, label) in groups.items()
            if len(released[name]) != members
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
    """Returns the groups in a state, in the order of creation, which is the same on all members of all groups."""
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
    """Waits until this rank has no unfinished operation on these groups. Not collective.

    Raises:
        CommunicatorError: If an operation does not end before the deadline, e.g. a receive without a send.
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
    """Ends the groups' communicators; goes on after a failure. Collective over: each group, on NCCL."""
    return end_together([(group.label, group.detach(missing_call=missing_call)) for group in groups], patience)


def _do_together(ranks: _Ranks, groups: Sequence[ReleasableGroup], work: Callable[[], object]) -> None:
    """Does a part of a rebuild and agrees with the others on the result. Releases the groups again if a rank failed."""
    failure, after_s = failure_of(work), ranks.elapsed_s()
    if failure is not None:
        # Release before the agreement: a rank that waits for this one in a gloo collective then fails at once.
        _release_again(groups)
    try:
        ranks.agree(failure, after_s=after_s)
    except RlSafeError:
        _release_again(groups)
        raise


def _release_again(groups: Sequence[ReleasableGroup]) -> None:
    """Undoes a failed rebuild on this rank alone, because the other ranks may be anywhere."""
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
    """Deletes the store keys of generations that no rank has any more. One rank does it for all."""
    if not groups:
        return

    def is_gone(key: str) -> bool:
        _, found, rest = key.partition(f"/{STORE_PREFIX}/")
        name, generation = rest.split("/")[:2] if found else ("", "")
        return generation.isdigit() and int(generation) <= gone.get(name, -1)

    forget_where(groups[0].get_group_store(), is_gone)
