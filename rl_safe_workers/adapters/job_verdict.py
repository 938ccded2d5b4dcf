"""Gives the verdict on a failed job of a host: the driver asks the processes on all nodes, and `diagnose` judges.

This module only collects the facts. It finds the ranks' processes in Ray's table of actors, asks each node for the
processes there, and adds Ray's reasons for the deaths of actors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import ray

from rl_safe_workers import env
from rl_safe_workers.adapters.call_errors import call_error_of, links_of
from rl_safe_workers.adapters.driver_waits import ANSWERING, Party, last_line
from rl_safe_workers.adapters.job_inquiry import Place, ask_here
from rl_safe_workers.adapters.job_processes import keeper_of
from rl_safe_workers.compat.ray_tables import DEAD, actor_id, actor_table, death_in_words, logs_folder
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.diagnostics.diagnosis import diagnose_answers
from rl_safe_workers.diagnostics.endings import Ending, ending_by_ray
from rl_safe_workers.diagnostics.inquiry import Answers
from rl_safe_workers.errors import (
    OUTSIDE,
    Died,
    JobError,
    Raised,
    RankError,
    RunError,
    UsageError,
    first_line,
)
from rl_safe_workers.foreign_errors import ForeignCause, classify
from rl_safe_workers.lifecycle import Phase, unix_now
from rl_safe_workers.ranks import RankId, Role

logger = logging.getLogger(__name__)

PATIENCE_S = 3.0
"""Longest wait, in seconds, for each of Ray's table, the processes' answers and the evidence."""


class _Actor(NamedTuple):
    """A rank's actor, from Ray's table of actors."""

    rank_id: RankId
    pid: int
    node_id: str
    node: str
    """The node's IP address."""
    is_dead: bool
    ending: Ending | None
    """Why the actor is dead; None if it lives, or if Ray gives no reason."""


class JobVerdict:
    """Finds out once why a job has failed."""

    def __init__(self, parties: Callable[[], Sequence[Party]], evidence: Path) -> None:
        """Asks no process yet.

        Args:
            parties: Lists the processes of the job that exist by now.
            evidence: The folder for this job's evidence. It is made only if there is a failure.
        """
        self._parties, self._evidence = parties, evidence
        self._given: tuple[BaseException, BaseException] | None = None
        """The failure that was judged, and the error with its verdict."""

    def on(self, error: BaseException, phase: str | None) -> BaseException:
        """Returns the job's error: with a verdict if it is about the job's ranks, else unchanged. Never raises.

        Call it before the processes are ended. It takes at most four times `PATIENCE_S`, usually a second.

        Args:
            error: The driver's error, or an error that `on` has returned for it.
            phase: The phase that the driver was in; None outside of phases.
        """
        if self._given is None or error not in self._given:
            try:
                verdict = self._judged(error, phase)
            except Exception:
                logger.warning("there is no verdict on the failure", exc_info=True)
                verdict = error
            self._given = error, verdict
        return self._given[1]

    def _judged(self, error: BaseException, phase: str | None) -> BaseException:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if not isinstance(cause, RunError | ray.exceptions.RayError) and cause is error:
            return error  # the driver itself has failed
        if isinstance(cause, JobError | UsageError):
            return error
        parties = {actor_id(party.actor): party.rank for party in self._parties()}
        actors: list[_Actor] = []

        def reports() -> Mapping[RankId, RunError]:
            actors.extend(_actors(parties))
            return _reports(actors, parties, error, phase)

        found = diagnose_answers(
            lambda patience_s: _ask(actors, patience_s),
            patience_s=PATIENCE_S,
            reports=reports,
            evidence=self._evidence,
            phase=phase,
            host_error=cause if isinstance(cause, RunError) else None,
            endings=lambda: {one.rank_id: one.ending for one in actors if one.ending is not None},
        )
        if not found.culprits and found.error is None:
            return error
        verdict = JobError(
            verdict=found.verdict,
            advice=found.advice,
            culprits=found.culprits,
            phase=phase,
            cause=found.error.cause if isinstance(found.error, RankError) else None,
            evidence=str(self._evidence),
            fault=found.fault,
        )
        logger.error("the job has failed: %s", verdict)
        return verdict


def _actors(parties: Mapping[str, RankId]) -> list[_Actor]:
    """Returns the ranks' actors from Ray's table. If a rank has several, the first one counts."""
    found: dict[RankId, _Actor] = {}
    for row in actor_table():
        rank_id = parties.get(row["ActorID"])
        if rank_id is None or rank_id in found:
            continue
        address = row["Address"]
        is_dead = row["State"] == DEAD
        ending = ending_by_ray(death_in_words(row)) if is_dead else None
        found[rank_id] = _Actor(rank_id, row["Pid"], address["NodeID"], address["IPAddress"], is_dead, ending)
    return list(found.values())


def _reports(
    actors: Sequence[_Actor], parties: Mapping[str, RankId], error: BaseException, phase: str | None
) -> dict[RankId, RunError]:
    """Returns the failures that Ray and the driver know of, by rank.

    The result has actors that have died, actors whose constructor has raised, and actors with a role in `ANSWERING`
    that have raised in a rollout. It has a trainer if the trainer's call has timed out waiting for others. This can
    happen outside of phases.
    """
    found: dict[RankId, RunError] = {
        one.rank_id: _report(one.rank_id, phase, Died(), "the process died") for one in actors if one.is_dead
    }
    called = call_error_of(error)
    if called is not None and (rank_id := parties.get(called.actor_id)) is not None:
        has_waited = rank_id.role is Role.TRAINER and called.foreign.is_about_others
        if has_waited or (phase == Phase.ROLLOUT and rank_id.role in ANSWERING):
            found.setdefault(rank_id, called.report(rank_id, phase or OUTSIDE))
    for link in links_of(error):
        if isinstance(link, ray.exceptions.RayActorError) and (rank_id := parties.get(str(link.actor_id))) is not None:
            raised = link.actor_init_failed
            found[rank_id] = _report(
                rank_id, phase, Raised() if raised else Died(), last_line(link) if raised else "the process died"
            )
        elif isinstance(link, RankError) and not isinstance(link, ray.exceptions.RayError):
            found.setdefault(link.rank_id, link)  # a helper has reported it to the driver
    return found


def _report(rank_id: RankId, phase: str | None, cause: Died | Raised, text: str) -> RankError:
    named = "unknown" if phase is None else phase
    foreign = classify(text) if isinstance(cause, Raised) else ForeignCause.UNKNOWN
    return RankError(
        rank_id=rank_id, phase=named, cause=cause, text=text, trace="", raised_at=unix_now(), foreign=foreign
    )


def _ask(actors: Sequence[_Actor], patience_s: float) -> Answers:
    """Asks the ranks on all nodes at the same time, through a process on each node; returns their answers."""
    deadline = Deadline.after(patience_s)
    here = ray.get_runtime_context().get_node_id()
    nodes: dict[str, list[Place]] = {}
    names = {one.node_id: one.node for one in actors}
    for one in actors:
        nodes.setdefault(one.node_id, []).append((one.rank_id, one.pid))
    asked, silent = {}, []
    for node_id, places in nodes.items():
        if node_id == here:
            continue
        keeper = keeper_of(env.run_id(), node_id)
        if keeper is None:
            silent.append(node_id)
        else:
            asked[keeper.ask.remote(places, 0.8 * patience_s)] = node_id
    told = [ask_here(nodes[here], 0.8 * patience_s, env.hang_dir(), logs=logs_folder())] if here in nodes else []
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=max(0, deadline.left_s)) if asked else ([], [])
    silent += [asked[call] for call in late]
    for call in ready:
        try:
            told.append(ray.get(call))
        except ray.exceptions.RayError as error:
            logger.warning("node %s cannot be asked: %s", names[asked[call]], first_line(error))
            silent.append(asked[call])
    return replace(
        Answers.of_nodes(told),
        homes={one.rank_id: one.node for one in actors},
        silent=[names[node_id] for node_id in silent],
    )
