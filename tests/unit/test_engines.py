"""Engines that are lost, over fake actors: who is called with what then, and who is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rl_safe_workers.config import RunConfig
from rl_safe_workers.driver import engines as engines_module
from rl_safe_workers.driver.cluster import actor_group
from rl_safe_workers.driver.cluster.actor_group import ActorRef, PendingCalls, died, start_calls
from rl_safe_workers.driver.cluster.actors import NODE_IP
from rl_safe_workers.driver.engines import REBUILD_S, Engines
from rl_safe_workers.driver.outputs import metrics as names
from rl_safe_workers.errors import Raised, RankError, RunError, WeightSyncError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.rollout.sync_proof import HeldWeights, SentWeights

NAME, SENT = "model.norm.weight", 7
TIMEOUT_S = 100.0


@dataclass(eq=False)
class FakeActor:
    """An engine process, or a trainer."""

    life: int = 0
    """Number of processes in its place before it."""
    dies_in: str = ""
    """The method in which it dies."""
    raises_in: str = ""
    never_starts: bool = False
    is_first: bool = True
    """True if it serves the store of its engine."""
    is_dead: bool = False
    holds: int = SENT
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    @property
    def call(self) -> FakeActor:
        return self

    def remote(self, _phase: str, method: str, arguments: tuple[Any, ...]) -> FakeCall:
        self.calls.append((method, arguments))
        return FakeCall(self, method, arguments)

    def methods(self) -> list[str]:
        return [method for method, _ in self.calls if method != NODE_IP]


@dataclass(eq=False)
class FakeCall:
    """A call of an actor, which is its answer, too."""

    actor: FakeActor
    method: str
    arguments: tuple[Any, ...]

    def answer(self) -> Any:
        match self.method:
            case "generate":
                conversations, first, step = self.arguments
                return [(first + i, step, self.actor.life) for i in range(len(conversations))]
            case "serve_store":
                return "the engine's store" if self.actor.is_first else None
            case "sync":
                return SentWeights(digests={NAME: SENT}, seconds=0.0)
            case "receive_weights" if self.arguments == (True,):
                held = ((NAME, self.actor.holds),)
                return HeldWeights(digests=held, converted=0, unread=(), faults=(), seconds=0.0)
        return None


class FakeRun:
    """The session and the cluster of a run with one trainer."""

    address, specs, is_local = "the store", ("a", "b"), True
    rescue: Callable[[RunError, PendingCalls], PendingCalls | None]

    def __init__(self, engines: int) -> None:
        self.trainer = FakeActor()
        self.trainers = [ActorRef(role=Role.TRAINER, rank=0, handle=self.trainer)]
        self.rollouts = [self._engine(rank, FakeActor()) for rank in range(engines)]
        self.ended: list[FakeActor] = []
        self.plans: dict[int, dict[str, Any]] = {}
        """Fields of the next engine in a place."""
        self.heard_all: list[str] = []
        """Methods of the trainer in whose failure all are heard."""
        self.warnings: list[str] = []

    @staticmethod
    def _engine(rank: int, actor: FakeActor) -> ActorRef:
        return ActorRef(role=Role.ROLLOUT, rank=rank, handle=actor)

    def engine(self, rank: int) -> FakeActor:
        actor: FakeActor = self.rollouts[rank].handle
        return actor

    def timeout_s(self, phase: Phase) -> float:
        return TIMEOUT_S

    def start_trainers(self, phase: Phase, method: str, arguments: Any) -> PendingCalls:
        return start_calls(self.trainers, phase, method, arguments)

    def finish(self, calls: PendingCalls, *, hears_all: bool = False) -> list[Any]:
        return self.finish_left(calls, hears_all=hears_all)[1]

    def finish_left(self, calls: PendingCalls, *, hears_all: bool = False) -> tuple[PendingCalls, list[Any]]:
        self.heard_all += [call.method for call in calls.refs if hears_all and call.actor is self.trainer]
        for call, actor in calls.refs.items():
            actor.handle.is_dead |= actor.handle.dies_in == call.method
            error: RunError | None = None
            if actor.handle.is_dead:
                error = died(actor, calls.phase)
            elif actor.handle.raises_in == call.method:
                error = RankError(
                    rank_id=actor.rank_id, phase=calls.phase, cause=Raised(), text="x", trace="", raised_at=1.0
                )
            if error is not None:
                left = self.rescue(error, calls)
                if left is None:
                    raise error
                return self.finish_left(left)
        return calls, [call.answer() for call in calls.refs]

    def is_overdue(self, calls: PendingCalls) -> bool:
        return False

    def first_to_finish(self, waits: dict[int, PendingCalls]) -> int:
        return next(
            engine for engine, calls in waits.items() if not any(call.actor.never_starts for call in calls.refs)
        )

    def end(self, actor: ActorRef) -> None:
        self.ended.append(actor.handle)
        self.rollouts.remove(actor)

    def recreate(self, actor: ActorRef) -> None:
        another = FakeActor(life=actor.handle.life + 1, **self.plans.pop(actor.rank, {}))
        self.rollouts = sorted([*self.rollouts, self._engine(actor.rank, another)], key=lambda one: one.rank)

    def why_lost(self, error: RunError, rank_id: RankId) -> str:
        return f"{rank_id} is no more"

    def note_processes(self) -> None: ...


@pytest.fixture(autouse=True)
def nobody_asks_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "is_dead", lambda actor: actor.handle.is_dead)
    monkeypatch.setattr(PendingCalls, "is_answered", property(lambda calls: UP.is_up))
    monkeypatch.setattr(actor_group.ray, "is_initialized", lambda: True)


class Up:
    """Tells whether engines that start are up when somebody looks."""

    is_up = True


UP = Up()


def engines_of(run: FakeRun, *, most: int = 9, joins: bool = True, ranks: int = 1) -> Engines:
    config = RunConfig()
    config.rollout.tensor_model_parallel_size = ranks
    config.cluster.num_rollouts, config.rollout.replace_lost_engines = len(run.rollouts), most
    console: Any = SimpleNamespace(phase=lambda *_: nullcontext(), warn=run.warnings.append)
    engines = Engines(config, run, run, console, losses=[])  # type: ignore[arg-type]
    if joins:
        engines.join()
    return engines


def never() -> None:
    raise AssertionError("nobody needs weights")


def generate(engines: Engines, prompts: int = 4, *, bring_weights: Callable[[], object] = never) -> list[Any]:
    return engines.generate([[{"content": str(index)}] for index in range(prompts)], 3, bring_weights=bring_weights)


def test_a_run_without_losses_joins_once_and_shares_prompts_out() -> None:
    run = FakeRun(2)
    engines = engines_of(run)
    assert engines.sync() is None
    assert [first for first, _, _ in generate(engines)] == [0, 1, 2, 3]
    assert run.trainer.calls == [("meet_rollouts", ([0, 1], 0, TIMEOUT_S)), ("sync", (False,))]
    for rank in range(2):
        (_, joined, received, generated) = run.engine(rank).calls
        assert joined == ("join", ("the store", [0, 1], ("a", "b"), 0, TIMEOUT_S))
        assert received == ("receive_weights", (False,))
        assert generated[1][1:] == (2 * rank, 3)
    assert engines.metrics() == {names.ENGINES_LOST: 0, names.ENGINES_SERVING: 2}


def test_prompts_of_a_lost_engine_go_to_the_other_one_as_a_whole() -> None:
    run = FakeRun(2)
    engines = engines_of(run)
    lost = run.engine(1)
    lost.dies_in = "generate"
    assert generate(engines) == [(index, 3, 0) for index in range(4)]
    assert [arguments[1] for method, arguments in run.engine(0).calls if method == "generate"] == [0, 2]
    assert run.ended == [lost]
    assert run.engine(1).methods() == ["start"]
    assert engines.metrics() == {names.ENGINES_LOST: 1, names.ENGINES_SERVING: 1}
    assert "rollout rank 1 is lost" in run.warnings[0]


def test_an_engine_that_is_up_serves_while_another_one_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(2)
    run.plans[0] = {"never_starts": True}
    engines = engines_of(run)
    run.engine(0).dies_in = run.engine(1).dies_in = "generate"
    monkeypatch.setattr(UP, "is_up", False)
    assert len(generate(engines, bring_weights=engines.sync)) == 4
    assert run.engine(0).methods() == ["start"]
    assert run.engine(1).methods() == ["start", "join", "receive_weights", "generate"]


def test_another_engine_gets_prompts_only_after_a_sync_in_which_it_was_proved() -> None:
    run = FakeRun(2)
    engines = engines_of(run)
    run.engine(1).dies_in = "generate"
    generate(engines)
    generate(engines)
    assert run.engine(1).methods() == ["start"]
    proved = engines.sync()
    assert proved is not None
    assert proved.proof.proved == 2
    assert run.trainer.calls[1:] == [("meet_rollouts", ([0, 1], 1, REBUILD_S)), ("sync", (True,))]
    generate(engines)
    assert run.engine(1).methods() == ["start", "join", "receive_weights", "generate"]
    assert engines.sync() is None
    assert names.ENGINE_BACK_SECONDS in engines.metrics()
    assert names.ENGINE_BACK_SECONDS not in engines.metrics()


def test_nobody_waits_for_an_engine_that_is_not_up_while_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UP, "is_up", False)
    run = FakeRun(2)
    engines = engines_of(run)
    run.engine(1).dies_in = "generate"
    generate(engines)
    engines.sync()
    assert run.trainer.calls[1:] == [("meet_rollouts", ([0], 1, REBUILD_S)), ("sync", (False,))]
    assert run.engine(1).methods() == ["start"]


@pytest.mark.parametrize("rank", [2, 3])
def test_an_engine_of_several_ranks_is_replaced_as_a_whole(rank: int) -> None:
    run = FakeRun(4)
    engines = engines_of(run, ranks=2)
    lost, other = [run.engine(2), run.engine(3)], [run.engine(0), run.engine(1)]
    run.engine(rank).dies_in = "generate"
    run.plans[3] = {"is_first": False}
    generate(engines)
    assert run.ended == lost
    assert engines.metrics() == {names.ENGINES_LOST: 1, names.ENGINES_SERVING: 1}
    assert [arguments[1] for method, arguments in other[0].calls if method == "generate"] == [0, 2]
    # Its first rank serves a store, whose address both get, before the engine is built.
    assert run.engine(2).methods() == run.engine(3).methods() == ["serve_store"]
    engines.sync()
    engines.sync()
    for new in (run.engine(2), run.engine(3)):
        assert new.methods() == ["serve_store", "start", "join", "receive_weights"]
        assert new.calls[1][1][1] == "the engine's store"
    assert engines.fleet.serving == [0, 1]


def test_an_engine_of_several_ranks_that_is_lost_in_its_start_is_started_again() -> None:
    run = FakeRun(4)
    engines = engines_of(run, ranks=2)
    run.engine(1).dies_in = "generate"
    run.plans[1] = {"dies_in": "start", "is_first": False}
    generate(engines)
    for _ in range(4):  # two looks at a start that fails, two at the next one
        engines.sync()
    assert len(run.ended) == 4
    assert run.engine(0).methods() == ["serve_store", "start", "join", "receive_weights"]
    assert engines.fleet.serving == [0, 1]


def test_with_no_engine_left_the_run_waits_for_another_and_brings_it_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UP, "is_up", False)
    run = FakeRun(1)
    engines = engines_of(run)
    run.engine(0).dies_in = "generate"
    assert generate(engines, bring_weights=engines.sync) == [(index, 3, 1) for index in range(4)]
    assert run.engine(0).methods() == ["start", "join", "receive_weights", "generate"]


def test_another_engine_with_wrong_weights_ends_the_run_before_it_gets_prompts() -> None:
    run = FakeRun(1)
    engines = engines_of(run)
    run.engine(0).dies_in, run.plans[0] = "generate", {"holds": SENT + 1}
    with pytest.raises(WeightSyncError, match=rf"rollout rank 0: {NAME}: sent "):
        generate(engines, bring_weights=engines.sync)
    assert "generate" not in run.engine(0).methods()


def test_a_sync_that_loses_an_engine_is_done_again_with_who_is_left_and_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UP, "is_up", False)
    run = FakeRun(2)
    engines = engines_of(run)
    run.engine(0).dies_in = "receive_weights"
    proved = engines.sync()
    assert proved is not None
    assert proved.proof.engines == [1]
    assert run.trainer.methods() == ["meet_rollouts", "sync", "meet_rollouts", "sync"]
    assert run.trainer.calls[2] == ("meet_rollouts", ([1], 1, REBUILD_S))
    assert run.engine(1).methods() == ["join", "receive_weights", "join", "receive_weights"]
    # The others of the failed sync must have answered before they are called again.
    assert run.heard_all == ["meet_rollouts", "sync", "meet_rollouts", "sync"]


def test_no_trainer_waits_in_a_join_for_an_engine_that_does_not_answer_any_more() -> None:
    run = FakeRun(2)
    engines = engines_of(run)
    run.engine(0).dies_in = "generate"
    generate(engines)
    run.engine(1).dies_in = NODE_IP
    engines.sync()
    assert len(engines.fleet.losses) == 2
    assert [arguments[1] for method, arguments in run.trainer.calls if method == "meet_rollouts"] == [0, 1]


def test_a_loss_in_the_join_makes_another_generation() -> None:
    run = FakeRun(2)
    engines = engines_of(run)
    run.engine(0).dies_in, run.plans[0] = "generate", {"dies_in": "join"}
    generate(engines)
    engines.sync()
    assert [arguments[1] for method, arguments in run.trainer.calls if method == "meet_rollouts"] == [0, 1, 2]
    assert len(engines.fleet.losses) == 2


def test_an_engine_that_dies_while_nobody_waits_for_it_is_replaced_and_the_calls_go_on() -> None:
    run = FakeRun(2)
    engines = engines_of(run)
    calls = start_calls(run.trainers, Phase.TRAIN, "train", lambda _: ())
    assert run.rescue(died(run.rollouts[1], Phase.TRAIN), calls) == calls
    assert (engines.fleet.starting, len(run.ended)) == ([1], 1)


@pytest.mark.parametrize("phase", [Phase.JOINT, Phase.SYNC, Phase.TEARDOWN])
def test_death_in_a_joint_call_is_left_to_the_caller(
    phase: Phase,
) -> None:
    run = FakeRun(2)
    engines_of(run)
    called = start_calls(run.rollouts, phase, "work", lambda _: ())
    assert run.rescue(died(run.rollouts[1], phase), called) is None
    assert run.ended == []


def test_an_engine_that_dies_at_its_start_is_replaced_again() -> None:
    run = FakeRun(1)
    engines = engines_of(run)
    run.engine(0).dies_in, run.plans[0] = "generate", {"dies_in": "start"}
    assert generate(engines, bring_weights=engines.sync) == [(index, 3, 2) for index in range(4)]


def test_one_of_the_first_engines_that_dies_at_the_runs_start_is_waited_for() -> None:
    run = FakeRun(2)
    engines = engines_of(run, joins=False)
    run.engine(1).dies_in = "start"
    run.finish(start_calls(run.rollouts, Phase.START, "start", lambda _: ()))
    engines.join()
    assert (engines.fleet.serving, engines.fleet.up) == ([0], [0, 1])
    assert run.trainer.calls == [("meet_rollouts", ([0, 1], 0, TIMEOUT_S))]


@pytest.mark.parametrize("most", [0, 1])
def test_a_loss_too_many_ends_the_run_with_its_failure(most: int) -> None:
    run = FakeRun(3)
    engines = engines_of(run, most=most)
    for rank in range(most + 1):
        run.engine(rank).dies_in = "generate"
    with pytest.raises(RankError) as raised:
        generate(engines)
    assert raised.value.rank_id == RankId(Role.ROLLOUT, most)
    assert len(run.ended) == most


def test_an_engine_that_raises_ends_the_run() -> None:
    run = FakeRun(2)
    engines = engines_of(run)
    run.engine(1).raises_in = "generate"
    with pytest.raises(RankError):
        generate(engines)
    assert run.ended == []


def test_an_engine_that_is_not_up_at_the_end_is_ended() -> None:
    run = FakeRun(2)
    engines = engines_of(run)
    run.engine(1).dies_in = "generate"
    generate(engines)
    starting = run.engine(1)
    engines.end_starting()
    assert run.ended[-1] is starting
    assert [actor.rank for actor in run.rollouts] == [0]
