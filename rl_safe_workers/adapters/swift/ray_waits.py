"""The waits of ms-swift's driver in Ray mode, each with a deadline and somebody to blame.

ms-swift calls ``ray.get`` without a timeout. After a failure of one rank it goes on to call the others, which still are
in a collective (ray/megatron/base_trainer.py:253). Here the first failure ends every actor of the job, and each later
call raises it once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rl_safe_workers.adapters.swift.swift_settings import OUTSIDE, SwiftTimeouts
from rl_safe_workers.compat.ray_tables import actor_id, actor_id_of_call
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import Awaited, Died, PhaseTimeoutError, RankError, RunError, first_line
from rl_safe_workers.lifecycle import Phase, unix_now
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.root_cause import report_of, root_cause

logger = logging.getLogger(__name__)

_RANKS_FIRST_S = 5.0
"""Seconds that the driver waits longer than the ranks, which know better whom they wait for."""
_GRACE_S = 3.0
"""Seconds to collect more answers after the first failure: a rank that has failed alone tells the others first."""
_ANSWER_S = 2.0
"""Seconds in which an engine that is well answers a question."""
_SLICE_S = 0.5

PHASES: Mapping[str, tuple[str, ...]] = {
    "init_actor": (Phase.START, Phase.WORLD, Phase.BOOTSTRAP, Phase.BOOTSTRAP, Phase.CONVERT),
    "init_teacher_model": (Phase.CONVERT,),
    "setup": (Phase.CONVERT,),
    "train_step": (Phase.TRAIN, Phase.LOGPROB, Phase.SAVE),
    "compute_logps": (Phase.LOGPROB,),
    "compute_ref_logps": (Phase.LOGPROB,),
    "compute_teacher_logps": (Phase.LOGPROB,),
    "compute_teacher_logits": (Phase.LOGPROB,),
    "update_weights": (Phase.SYNC,),
    "merge_lora": (Phase.SYNC,),
    "unmerge_lora": (Phase.SYNC,),
    "offload_to_cpu": (Phase.SYNC,),
    "reload_to_gpu": (Phase.SYNC,),
    "give_comms": (Phase.ROLLOUT,),
    "finalize_generation": (Phase.ROLLOUT,),
    "finalize": (Phase.SAVE, Phase.TEARDOWN),
}
"""The phases that each method of a worker may go through. The driver waits for all of them; others are outside."""


class RayWaits:
    """Bounds the driver's waits, and ends the job's actors after the first failure.

    Attributes:
        failure: The failure that the job ends with; None while all is well.
    """

    def __init__(self, timeouts: SwiftTimeouts) -> None:
        """Knows of no actor yet.

        Args:
            timeouts: The deadlines, by phase.
        """
        self.failure: RunError | None = None
        self._timeouts = timeouts
        self._actors: dict[str, tuple[RankId, Any]] = {}
        self._waiting: tuple[str, tuple[str, ...]] | None = None

    def add(self, role: Role, handles: Sequence[Any]) -> None:
        """Takes note of actors: the trainers by training rank, or one more engine of the rollout."""
        first = sum(rank_id.role is role for rank_id, _ in self._actors.values())
        for number, handle in enumerate(handles, start=first):
            self._actors[actor_id(handle)] = RankId(role, number), handle

    @contextmanager
    def waiting(self, what: str, phases: tuple[str, ...] | None = None) -> Iterator[None]:
        """Says what the waits of the body are for.

        Args:
            what: A method of a worker, or another name for errors.
            phases: The phases whose timeouts count; None: those of the method.

        Raises:
            RunError: The failure that the job ends with, if there has been one.
        """
        if self.failure is not None:
            raise self.failure
        before, self._waiting = self._waiting, (what, phases or PHASES.get(what, (OUTSIDE,)))
        try:
            yield
        finally:
            self._waiting = before

    def get(self, references: Any, what: str, phases: tuple[str, ...]) -> Any:
        """As ``ray.get``, with a deadline.

        Args:
            references: One reference, or a list.
            what: What is waited for, unless `waiting` says so.
            phases: Likewise.

        Raises:
            RunError: If an actor fails or does not answer in time; names it. Every actor is ended then.
        """
        if self.failure is not None:
            raise self.failure
        what, phases = self._waiting or (what, phases)
        every = list(references) if isinstance(references, list) else [references]
        deadline = Deadline.after(sum(getattr(self._timeouts, str(phase)) for phase in phases) + _RANKS_FIRST_S)
        pending, reports = every, dict[RankId, RunError]()
        while pending and not reports and not deadline.expired:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=min(_SLICE_S, max(0, deadline.left_s)))
            reports = self._reports(done, phases[-1])
        if not pending and not reports:
            return ray.get(references)
        grace = Deadline.after(_GRACE_S)
        while pending and reports and not grace.expired and not self._is_plain(reports, pending):
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0, grace.left_s))
            reports |= self._reports(done, phases[-1])
        failure, culprits = self._failure(what, phases[-1], reports, pending, deadline.waited_s)
        self.failure = failure
        logger.error("rl_safe: the job has failed on %s: %s", _named(culprits), first_line(failure))
        self._end()
        raise failure

    def _reports(self, done: Sequence[Any], phase: str) -> dict[RankId, RunError]:
        found: dict[RankId, RunError] = {}
        for reference in done:
            rank_id = self._rank_of(reference)
            try:
                ray.get(reference)
            except RayActorError as error:
                found[rank_id] = RankError(
                    rank_id=rank_id,
                    phase=phase,
                    cause=Died(),
                    text="the process died",
                    trace=str(error),
                    raised_at=unix_now(),
                )
            except RayError as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                known = cause if isinstance(cause, RankError) else None
                found[rank_id] = known or report_of(cause, rank_id, phase)
        return found

    def _is_plain(self, reports: Mapping[RankId, RunError], pending: Sequence[Any]) -> bool:
        """Returns True if later answers could name nobody else: a rank has died, or all that are missing are named."""
        if any(isinstance(error, RankError) and isinstance(error.cause, Died) for error in reports.values()):
            return True
        missing = {self._rank_of(reference) for reference in pending}
        root = root_cause(reports, pending=missing)
        return root.is_told and root.culprits >= missing

    def _rank_of(self, reference: Any) -> RankId:
        known = self._actors.get(actor_id_of_call(reference))
        return RankId(Role.TRAINER, -1) if known is None else known[0]

    def _failure(
        self, what: str, phase: str, reports: Mapping[RankId, RunError], pending: Sequence[Any], waited_s: float
    ) -> tuple[RunError, Collection[RankId]]:
        """Returns the failure that the others follow from, and the ranks that it began with."""
        missing = {self._rank_of(reference) for reference in pending}
        root = root_cause(reports, pending=missing) if reports else None
        if root is not None and root.is_told and root.culprits:
            return root.error, root.culprits
        # Nobody has told: an engine that does not answer comes first, for which a rank may wait.
        culprits = self._silent_engines() or (missing if root is None else root.culprits)
        if not culprits and root is not None:
            return root.error, reports
        return self._late(what, phase, culprits, waited_s, "" if root is None else str(root.error)), culprits

    def _late(
        self, what: str, phase: str, missing: Collection[RankId], waited_s: float, detail: str = ""
    ) -> PhaseTimeoutError:
        return PhaseTimeoutError(
            phase=phase,
            awaited=Awaited(what, frozenset(rank_id for rank_id, _ in self._actors.values())),
            missing=missing,
            waited_s=waited_s,
            setting=f"rl_safe.timeouts.{phase}",
            detail=detail,
        )

    def _silent_engines(self) -> set[RankId]:
        """Returns the engines that do not answer a question."""
        asked = {h.get_master_address.remote(): id for id, h in self._actors.values() if id.role is Role.ROLLOUT}
        if not asked:
            return set()
        answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
        dead = [reference for reference in answered if self._reports([reference], OUTSIDE)]
        return {asked[reference] for reference in [*silent, *dead]}

    def _end(self) -> None:
        """Ends every actor at once. ms-swift asks them to end, and gives each 30 s."""
        for rank_id, handle in self._actors.values():
            try:
                ray.kill(handle, no_restart=True)
            except Exception as error:  # the job's own failure goes on
                logger.warning("ending %s: %s: %s", rank_id, type(error).__name__, error)


def _named(ranks: Collection[RankId]) -> str:
    """Names ranks, and engines by replica: ms-swift's user knows no rank of them."""
    return ", ".join(
        f"training rank {one.rank}" if one.role is Role.TRAINER else f"the vLLM engine of replica {one.rank}"
        for one in sorted(ranks)
    )


class BoundedRay:
    """Stands in for ``ray`` in one of ms-swift's modules. Everything but ``get`` without a timeout is Ray's own."""

    def __init__(self, waits: RayWaits, what: str, *phases: str) -> None:
        """Bounds the module's waits.

        Args:
            waits: The driver's.
            what: What the module waits for.
            *phases: The phases whose timeouts count.
        """
        self._waits, self._what, self._phases = waits, what, phases

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def get(self, references: Any, *, timeout: float | None = None) -> Any:
        """As ``ray.get``."""
        if timeout is not None:
            return ray.get(references, timeout=timeout)
        return self._waits.get(references, self._what, self._phases)


def calling(waits: RayWaits, settings: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns what wraps ``WorkerGroup.execute``.

    Args:
        waits: The driver's.
        settings: Ours as JSON, for the workers.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(group: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
            if method_name == "init_actor":
                kwargs["rl_safe"] = settings
            with waits.waiting(method_name):
                return original(group, method_name, *args, **kwargs)

        return execute

    return wrap
