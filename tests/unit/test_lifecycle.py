"""Phases: which may follow which, what completes them, and what is recorded of them."""

from __future__ import annotations

import logging
import time

import pytest

from rl_safe_workers.errors import LifecycleError
from rl_safe_workers.lifecycle import REQUIRES, Lifecycle, Phase, unix_now
from rl_safe_workers.ranks import Role

FIRST = {Phase.START, Phase.WORLD, Phase.TEARDOWN}
"""Phases that a trainer may enter first."""
BEFORE_BOOTSTRAP = [Phase.START, Phase.WORLD, Phase.GROUPS]


@pytest.fixture
def trainer() -> Lifecycle:
    return Lifecycle(role=Role.TRAINER, rank=3)


def pass_through(lifecycle: Lifecycle, *phases: Phase) -> None:
    for phase in phases:
        with lifecycle.enter(phase):
            pass


def fail_in(lifecycle: Lifecycle, phase: Phase) -> None:
    with pytest.raises(ZeroDivisionError), lifecycle.enter(phase):
        _ = 1 / 0


@pytest.mark.parametrize("phase", sorted(set(REQUIRES[Role.TRAINER]) - FIRST))
def test_a_trainer_cannot_begin_with(phase: Phase, trainer: Lifecycle) -> None:
    with pytest.raises(LifecycleError, match=f"training rank 3 cannot enter phase {phase} before phase .* completed"):
        trainer.check(phase)


def test_the_order_of_a_run_is_allowed(trainer: Lifecycle) -> None:
    pass_through(trainer, Phase.START, Phase.WORLD, Phase.GROUPS, Phase.BOOTSTRAP, Phase.CONVERT, Phase.JOINT)
    for _ in range(2):
        pass_through(trainer, Phase.OFFLOAD, Phase.ONLOAD, Phase.LOGPROB, Phase.TRAIN, Phase.SYNC, Phase.SAVE)
    pass_through(trainer, Phase.TEARDOWN)


@pytest.mark.parametrize("phase", [Phase.OFFLOAD, Phase.ROLLOUT, Phase.TRAIN, Phase.SAVE, Phase.JOINT])
def test_what_fills_or_moves_memory_waits_for_the_bootstrap(phase: Phase, trainer: Lifecycle) -> None:
    pass_through(trainer, *BEFORE_BOOTSTRAP)
    with pytest.raises(LifecycleError, match="before phase bootstrap"):
        trainer.check(phase)
    pass_through(trainer, Phase.BOOTSTRAP)
    trainer.check(phase)


def test_every_missing_phase_is_named(trainer: Lifecycle, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {Role.TRAINER: {**REQUIRES[Role.TRAINER], Phase.SAVE: frozenset({Phase.CONVERT, Phase.WORLD})}}
    monkeypatch.setattr("rl_safe_workers.lifecycle.REQUIRES", table)
    with pytest.raises(LifecycleError, match="before phase world, convert has completed"):
        trainer.check(Phase.SAVE)


@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.SAVE, Phase.BOOTSTRAP, Phase.OFFLOAD])
def test_a_rollout_rank_has_no_training_phases(phase: Phase) -> None:
    rollout = Lifecycle(role=Role.ROLLOUT, rank=0)
    pass_through(rollout, Phase.START, Phase.JOINT, Phase.ROLLOUT, Phase.SYNC)
    with pytest.raises(LifecycleError, match=f"rank 0 cannot enter phase {phase}: it is not a phase of a rollout"):
        rollout.check(phase)


def test_no_phase_is_entered_inside_another(trainer: Lifecycle) -> None:
    with trainer.enter(Phase.START):
        assert trainer.current is Phase.START
        with pytest.raises(LifecycleError, match="cannot enter phase world while phase start is running"):
            trainer.check(Phase.WORLD)
    assert trainer.current is None
    trainer.check(Phase.WORLD)


def test_after_teardown_only_teardown(trainer: Lifecycle) -> None:
    pass_through(trainer, Phase.WORLD, Phase.TEARDOWN, Phase.TEARDOWN)
    with pytest.raises(LifecycleError, match="cannot enter phase groups after teardown; start a new process"):
        trainer.check(Phase.GROUPS)


def test_a_refused_phase_leaves_no_trace(trainer: Lifecycle) -> None:
    with pytest.raises(LifecycleError), trainer.enter(Phase.SAVE):
        pytest.fail("the body must not run")
    assert trainer.current is None
    assert trainer.drain_events() == []


def test_a_phase_that_raised_has_not_completed(trainer: Lifecycle) -> None:
    fail_in(trainer, Phase.WORLD)
    assert not trainer.has_completed(Phase.WORLD)
    assert trainer.current is None
    with pytest.raises(LifecycleError, match="before phase world"):
        trainer.check(Phase.GROUPS)


def test_a_failure_does_not_undo_an_earlier_completion(trainer: Lifecycle) -> None:
    pass_through(trainer, Phase.WORLD)
    fail_in(trainer, Phase.WORLD)
    assert trainer.has_completed(Phase.WORLD)


def test_an_invalidated_phase_must_be_passed_through_again(trainer: Lifecycle) -> None:
    pass_through(trainer, *BEFORE_BOOTSTRAP, Phase.BOOTSTRAP)
    trainer.invalidate(Phase.BOOTSTRAP)
    with pytest.raises(LifecycleError, match="before phase bootstrap"):
        trainer.check(Phase.OFFLOAD)
    trainer.invalidate(Phase.BOOTSTRAP)
    pass_through(trainer, Phase.BOOTSTRAP, Phase.OFFLOAD)


def test_events_tell_phase_rank_times_and_outcome(trainer: Lifecycle) -> None:
    before = unix_now()
    pass_through(trainer, Phase.WORLD)
    fail_in(trainer, Phase.GROUPS)
    world, groups = trainer.drain_events()
    assert (world.phase, world.role, world.rank, world.ok) == (Phase.WORLD, Role.TRAINER, 3, True)
    assert (groups.phase, groups.ok) == (Phase.GROUPS, False)
    assert before <= world.start_s <= world.end_s <= groups.start_s <= groups.end_s <= unix_now()


def test_a_phase_takes_as_long_though_the_clock_is_set(trainer: Lifecycle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(unix_now() - time.time()) < 60
    with trainer.enter(Phase.WORLD):
        set_back_s = time.time() - 3600
        monkeypatch.setattr(time, "time", lambda: set_back_s)
    (event,) = trainer.drain_events()
    assert 0 <= event.end_s - event.start_s < 60


def test_events_are_handed_over_once(trainer: Lifecycle) -> None:
    pass_through(trainer, Phase.WORLD)
    assert len(trainer.drain_events()) == 1
    assert trainer.drain_events() == []


def test_a_phase_can_have_begun_before_it_was_entered(trainer: Lifecycle) -> None:
    with trainer.enter(Phase.START, since_s=1000.0):
        pass
    (event,) = trainer.drain_events()
    assert event.start_s == 1000.0
    assert event.end_s > 1000.0


class Notes:
    """An observer that notes what it is told, and raises what it is given."""

    def __init__(self, *, begin_error: Exception | None = None, end_error: Exception | None = None) -> None:
        self.seen: list[str] = []
        self._begin_error, self._end_error = begin_error, end_error

    def begin(self, phase: Phase) -> None:
        self.seen.append(f"begin {phase}")
        if self._begin_error:
            raise self._begin_error

    def end(self, phase: Phase) -> dict[str, int]:
        self.seen.append(f"end {phase}")
        if self._end_error:
            raise self._end_error
        return {"weights": len(self.seen)}


def test_the_observer_sees_both_ends_of_a_phase_and_fills_its_event(trainer: Lifecycle) -> None:
    trainer.observer = notes = Notes()
    with trainer.enter(Phase.WORLD):
        notes.seen.append("body")
    fail_in(trainer, Phase.GROUPS)
    assert notes.seen == ["begin world", "body", "end world", "begin groups", "end groups"]
    world, groups = trainer.drain_events()
    assert (world.device_bytes, groups.device_bytes) == ({"weights": 3}, {"weights": 5})


def test_without_an_observer_an_event_holds_no_device_memory(trainer: Lifecycle) -> None:
    pass_through(trainer, Phase.WORLD)
    (event,) = trainer.drain_events()
    assert event.device_bytes == {}


def test_the_observer_is_not_told_of_a_refused_phase(trainer: Lifecycle) -> None:
    trainer.observer = notes = Notes()
    with pytest.raises(LifecycleError), trainer.enter(Phase.SAVE):
        pytest.fail("the body must not run")
    assert notes.seen == []


def test_an_observer_that_raises_fails_no_phase(trainer: Lifecycle, caplog: pytest.LogCaptureFixture) -> None:
    trainer.observer = notes = Notes(begin_error=OSError("no device"), end_error=OSError("still none"))
    pass_through(trainer, Phase.WORLD)
    assert trainer.has_completed(Phase.WORLD)
    assert notes.seen == ["begin world", "end world"]
    (event,) = trainer.drain_events()
    assert (event.ok, event.device_bytes) == (True, {})
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "training rank 3: the beginning of phase world could not be observed",
        "training rank 3: the end of phase world could not be observed",
    ]


def test_an_observer_that_raises_does_not_hide_why_a_phase_failed(trainer: Lifecycle) -> None:
    trainer.observer = Notes(end_error=OSError("no device"))
    fail_in(trainer, Phase.WORLD)
    (event,) = trainer.drain_events()
    assert not event.ok
    assert trainer.current is None


def test_no_phase_requires_itself_or_one_that_its_role_lacks() -> None:
    for phases in REQUIRES.values():
        for phase, required in phases.items():
            assert phase not in required
            assert required <= phases.keys()
