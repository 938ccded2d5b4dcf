"""Gives the rollout engines prompts and weights, and replaces lost engines.

`rollout.engine_fleet` decides; this module calls the actors. Engines join and leave only between the trainers' steps:
the joint group is rebuilt before a weight sync. No group of the training world changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from rl_safe_workers.config import RunConfig
from rl_safe_workers.driver.cluster.actor_group import ActorRef, PendingCalls, died, is_dead, start_calls
from rl_safe_workers.driver.cluster.actors import NODE_IP
from rl_safe_workers.driver.cluster.cluster import Cluster
from rl_safe_workers.driver.cluster.joining import LOOPBACK
from rl_safe_workers.driver.outputs import metrics as names
from rl_safe_workers.driver.outputs.console import RunConsole
from rl_safe_workers.driver.session import Session
from rl_safe_workers.errors import RunError
from rl_safe_workers.lifecycle import Phase, unix_now
from rl_safe_workers.ranks import RankId
from rl_safe_workers.rollout.engine_fleet import EngineFleet, EngineLoss, lost_ranks
from rl_safe_workers.rollout.protocol import Sample
from rl_safe_workers.rollout.sync_proof import HeldWeights, ProvedSync, ProvedSyncs, SyncProof

REBUILD_S = 30.0
"""Longest wait, in seconds, for the members when the joint group is rebuilt. All of them have answered just before."""

Conversation = Sequence[Mapping[str, str]]


class Engines:
    """The rollout engines of a session.

    Attributes:
        fleet: The state of each engine.
    """

    def __init__(
        self,
        config: RunConfig,
        session: Session,
        cluster: Cluster,
        console: RunConsole,
        *,
        losses: list[EngineLoss],
    ) -> None:
        """Stores its parts, and registers itself as the session's ``rescue`` for lost engines. Calls no actor.

        Args:
            config: Configuration of the run.
            session: Calls the actors; starts the run's first engines.
            cluster: Holds the actors.
            console: Shows losses.
            losses: Engines that the run has lost so far. Later losses are appended.
        """
        self._session, self._cluster, self._console = session, cluster, console
        self._ranks = config.rollout.tensor_model_parallel_size
        engines, most_lost = config.cluster.num_rollouts // self._ranks, config.rollout.replace_lost_engines
        self.fleet = EngineFleet(engines, most_lost=most_lost, losses=losses)
        self._replaces = most_lost > 0
        self._syncs = ProvedSyncs(every=config.rollout.prove_sync_freq)
        self._starting: dict[int, PendingCalls] = {}
        """The calls that start each replacement engine."""
        self._unaddressed: set[int] = set()
        """Starting engines whose ranks do not have the address of the engine's store yet."""
        self._generation = -1
        self._told = len(losses)
        session.rescue = self._rescue

    def join(self) -> None:
        """Builds the joint group of trainers and rollout ranks, once every engine is up."""
        with self._console.phase(Phase.JOINT, self._session.timeout_s(Phase.JOINT)):
            for engine in self.fleet.starting:
                if engine not in self._starting:
                    self.fleet.started(engine)
            while self._starting:
                self._await_start(next(iter(self._starting)))
            self._until_done(lambda again: None)

    def generate(
        self, conversations: Sequence[Conversation], step: int, *, bring_weights: Callable[[], object]
    ) -> list[Sample]:
        """Samples responses to prompts. If an engine is lost, the other engines get all of its prompts.

        Args:
            conversations: The chat messages of each prompt.
            step: The training step, for the seeds.
            bring_weights: Called if no engine serves. It prepares the trainers for a weight sync, and runs it.

        Returns:
            ``rollout.n`` consecutive samples for each prompt, in the order of the prompts.
        """
        found: dict[int, list[Sample]] = {}
        left: Sequence[int] = range(len(conversations))
        while True:
            while not self.fleet.serving:
                bring_weights()
            spans: dict[Any, range] = {}
            calls = PendingCalls(phase=Phase.ROLLOUT, started_s=time.monotonic())
            for engine, span in self.fleet.deal(left):
                more = self._call(
                    [engine], Phase.ROLLOUT, "generate", conversations[span.start : span.stop], span.start, step
                )
                spans |= dict.fromkeys(more.refs, span)
                calls = calls.joined_with(more)
            calls, shares = self._session.finish_left(calls)
            for ref, samples in zip(calls.refs, shares, strict=True):
                found.setdefault(spans[ref].start, []).extend(samples)
            answered = {index for ref in calls.refs for index in spans[ref]}
            left = [index for index in left if index not in answered]
            if not left:
                return [sample for first in sorted(found) for sample in found[first]]

    def sync(self) -> ProvedSync | None:
        """Sends the trainers' weights to every engine that is up. After a proof, all of them serve.

        Returns:
            None if the sync was not proved.

        Raises:
            WeightSyncError: If an engine holds other weights than were sent, twice in a row.
        """
        proved = self._syncs.run(lambda prove: self._until_done(partial(self._send, prove)))
        if proved is not None:
            self.fleet.proved(now_s=time.monotonic())
        return proved

    def _until_done(self, work: Callable[[bool], SyncProof | None]) -> SyncProof | None:
        """Puts all engines that are up into the joint group, and runs work in it. Repeats both if engines are lost.

        Args:
            work: Called with True if an earlier attempt failed because an engine was lost.
        """
        again = False
        while True:
            self._look_who_is_up()
            try:
                if self.fleet.needs_join:
                    self._join(self.fleet.up)
                return work(again)
            except RunError as error:
                self._replace_all(error)
                again = True

    def _look_who_is_up(self) -> None:
        """Replaces dead engines and finishes starts. Waits only if no engine is up, until the first one is."""
        if not self._replaces:
            return
        for engine in self.fleet.up:
            if dead := [actor for actor in self._actors(engine) if is_dead(actor)]:
                self._replace_all(died(dead[0], Phase.SYNC))
        for engine, calls in [*self._starting.items()]:
            if calls.is_answered or self._session.is_overdue(calls):
                self._await_start(engine)
        while not self.fleet.up:
            self._await_start(self._session.first_to_finish(self._starting))

    def _await_start(self, engine: int) -> None:
        """Waits until an engine has done the next step of its start, or is replaced."""
        calls = self._starting[engine]
        values = self._session.finish(calls)
        if self._starting[engine] is not calls:
            return
        if engine in self._unaddressed:
            self._unaddressed.remove(engine)
            self._starting[engine] = self._call([engine], Phase.START, "start", unix_now(), values[0])
            return
        del self._starting[engine]
        self.fleet.started(engine)
        self._cluster.note_processes()

    def _begin_start(self, engine: int) -> None:
        """Begins to start an engine. If it has several ranks, the first one serves a store for them."""
        if self._ranks == 1:
            self._starting[engine] = self._call([engine], Phase.START, "start", unix_now())
            return
        node = self._actors(engine)[0].node
        host = LOOPBACK if self._cluster.is_local or node is None else node.address
        self._unaddressed.add(engine)
        self._starting[engine] = self._call([engine], Phase.START, "serve_store", host)

    def _join(self, engines: Sequence[int]) -> None:
        """Builds the next generation of the joint group.

        If an engine dies during the join, the trainers wait for it, and nobody can stop their wait. So each engine must
        answer just before, and the timeout of a rebuild is short.
        """
        timeout_s = self._session.timeout_s(Phase.JOINT)
        if self._replaces:
            self._session.finish(self._call(engines, Phase.JOINT, NODE_IP))
        self._generation += 1
        if self._generation > 0:
            timeout_s = min(timeout_s, REBUILD_S)
        how = self._generation, timeout_s
        ranks, session = [actor.rank for actor in self._actors(*engines)], self._session
        trainers = session.start_trainers(Phase.JOINT, "meet_rollouts", lambda _: (ranks, *how))
        joining = self._call(engines, Phase.JOINT, "join", session.address, ranks, session.specs, *how)
        session.finish(trainers.joined_with(joining), hears_all=self._replaces)
        self.fleet.joined(engines)

    def _send(self, prove: bool, again: bool) -> SyncProof | None:
        """Syncs once. A sync that follows a failed one, or that brings weights to a new engine, is always proved."""
        prove = prove or again or self.fleet.needs_proof
        trainers = self._session.start_trainers(Phase.SYNC, "sync", lambda _: (prove,))
        receivers = self._call(self.fleet.up, Phase.SYNC, "receive_weights", prove)
        results = self._session.finish(trainers.joined_with(receivers), hears_all=self._replaces)
        if not prove:
            return None
        sent, held = results[: len(trainers.refs)], results[len(trainers.refs) :]
        firsts = range(0, len(held), self._ranks)
        return SyncProof(
            sent=sent,
            held=[HeldWeights.of_engine(held[first : first + self._ranks]) for first in firsts],
            ranks=self._ranks,
            engines=self.fleet.up,
        )

    def end_starting(self) -> None:
        """Ends the engines that are not up yet, because the run needs no more engines."""
        for engine in [*self._starting]:
            del self._starting[engine]
            for actor in self._actors(engine):
                self._cluster.end(actor)

    def metrics(self) -> dict[str, float]:
        """Returns the number of engines lost since the last call, and the number that serve.

        If replacements have begun to serve since then, it adds the longest time from a loss until then, in seconds.
        Empty if the run does not replace engines.
        """
        if not self._replaces:
            return {}
        losses, told = self.fleet.losses, self._told
        self._told = len(losses)
        found: dict[str, float] = {names.ENGINES_LOST: len(losses) - told}
        found[names.ENGINES_SERVING] = len(self.fleet.serving)
        if returned := self.fleet.returned():
            found[names.ENGINE_BACK_SECONDS] = max(returned)
        return found

    def _call(self, engines: Sequence[int], phase: Phase, method: str, *arguments: Any) -> PendingCalls:
        return start_calls(self._actors(*engines), phase, method, lambda _: arguments)

    def _actors(self, *engines: int) -> list[ActorRef]:
        return [actor for actor in self._cluster.rollouts if actor.rank // self._ranks in engines]

    def _rescue(self, error: RunError, calls: PendingCalls) -> PendingCalls | None:
        """Replaces lost engines, unless the other calls need them.

        Returns:
            The calls that are left to wait for. None if no engine is lost, or the other calls need a lost one.
        """
        lost = self._lost_engines(error)
        is_called = any(actor.rank_id in self._ranks_of(lost) for actor in calls.refs.values())
        is_needed = calls.phase not in (Phase.START, Phase.ROLLOUT) and is_called
        if not self._replaces or not lost or is_needed or calls.phase is Phase.TEARDOWN:
            return None
        return calls.without(self._replace_all(error))

    def _lost_engines(self, error: RunError) -> set[int]:
        """Returns the engines that a failure shows as lost. An engine is lost if any of its ranks is."""
        return {rank_id.rank // self._ranks for rank_id in lost_ranks(error)}

    def _ranks_of(self, engines: Collection[int]) -> frozenset[RankId]:
        return frozenset(actor.rank_id for actor in self._actors(*engines))

    def _replace_all(self, error: RunError) -> frozenset[RankId]:
        """Replaces the engines that a failure shows as lost, and returns their ranks. Raises the failure if none is."""
        lost = self._lost_engines(error)
        if not lost:
            raise error
        ranks = self._ranks_of(lost)
        for engine in sorted(lost):
            self._replace(engine, error)
        return ranks

    def _replace(self, engine: int, error: RunError) -> None:
        """Ends the remaining processes of an engine, and starts another engine in its place."""
        actors = self._actors(engine)
        loss = self.fleet.lose(engine, error, now_s=time.monotonic())
        first = next(actor.rank_id for actor in actors if actor.rank_id in lost_ranks(error))
        loss.why = self._cluster.why_lost(error, first)
        self._console.warn(f"{first} is lost, and another engine starts in its place: {loss.why}")
        for actor in actors:
            self._cluster.end(actor)
        for actor in actors:
            self._cluster.recreate(actor)
        self._unaddressed.discard(engine)
        self._begin_start(engine)
