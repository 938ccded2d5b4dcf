"""An engine that raises in a call: its actor and its line of code are known where Ray raises the error again."""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import RayTaskError

from rl_safe_workers.adapters import call_errors, job_verdict
from rl_safe_workers.adapters.call_errors import call_error_of, keep_origins
from rl_safe_workers.adapters.driver_waits import DriverWaits
from rl_safe_workers.config import PhaseTimeouts
from rl_safe_workers.errors import Died, Raised, RankError, RunError, Victim
from rl_safe_workers.ranks import RankId, Role, trainer_id

ENGINE, REWARD, TRAINER = "e0", "b4", "7a"
PARTIES = {ENGINE: RankId(Role.ROLLOUT, 3), REWARD: RankId(Role.REWARD, 0), TRAINER: trainer_id(1)}


class NoRoomError(RuntimeError):
    """As an engine raises one: with an argument of its own."""


@pytest.fixture(autouse=True)
def _origins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(RayTaskError, "as_instanceof_cause", RayTaskError.as_instanceof_cause)  # put back at the end
    keep_origins()
    return


def generate() -> None:
    raise NoRoomError("no room for 8 GiB\nmore of it")


def _heard(actor_id: str | None = ENGINE, work: Callable[[], None] = generate) -> BaseException:
    """Returns the error that ``ray.get`` raises for a call of an actor that has raised."""
    try:
        work()
    except Exception as error:
        told = RayTaskError(
            *("generate", traceback.format_exc(), error, "ray::Engine.generate", 4711, "192.0.2.2"),
            actor_repr="<Engine>",
            actor_id=actor_id,
        )
    raised: BaseException = cloudpickle.loads(cloudpickle.dumps(told)).as_instanceof_cause()
    return raised


def _from(cause: BaseException) -> BaseException:
    try:
        raise RunError("generation: rollout engine 1 does not answer") from cause
    except RunError as error:
        return error


def test_the_actor_and_its_line_are_known() -> None:
    raised = _heard()
    assert isinstance(raised, NoRoomError)
    found = call_error_of(raised)
    assert found is not None
    line = generate.__code__.co_firstlineno + 1
    assert found.place is not None
    assert (found.actor_id, found.place.rpartition("/")[2]) == (ENGINE, f"test_call_errors.py:{line} (generate)")
    assert found.text == "NoRoomError: no room for 8 GiB\nmore of it"
    assert pickle.loads(pickle.dumps(found)) == found


def test_it_is_known_through_an_error_that_was_raised_from_it() -> None:
    found = call_error_of(_from(_heard()))
    assert found is not None
    assert found.actor_id == ENGINE


def test_origins_are_kept_once_however_often_one_asks() -> None:
    once = RayTaskError.as_instanceof_cause
    keep_origins()
    assert RayTaskError.as_instanceof_cause is once


@pytest.mark.parametrize("error", [ValueError("no"), _heard(None)], ids=["no call", "a task"])
def test_what_no_actor_has_raised_has_no_actor(error: BaseException) -> None:
    assert call_error_of(error) is None


def test_an_actor_that_passes_on_an_error_has_not_raised_it() -> None:
    def pass_on() -> None:
        raise _heard()

    assert call_error_of(_heard("loop", pass_on)) is None


@pytest.mark.parametrize("actor_id", [ENGINE, REWARD])
def test_who_raises_in_a_rollout_is_to_blame(actor_id: str) -> None:
    reports = job_verdict._reports([], PARTIES, _from(_heard(actor_id)), "rollout")
    (rank_id,), (report,) = zip(*reports.items(), strict=True)
    assert (rank_id, report.cause) == (PARTIES[actor_id], Raised())
    where = r" failed in phase rollout at \S*test_call_errors.py:\d+ \(generate\): "
    assert re.match(f"{rank_id}{where}", str(report))


@pytest.mark.parametrize(
    ("actor_id", "phase"), [(ENGINE, "sync"), (ENGINE, None), (TRAINER, "rollout"), ("?", "train")]
)
def test_nobody_else_is_blamed_for_what_a_call_raises(actor_id: str, phase: str | None) -> None:
    assert job_verdict._reports([], PARTIES, _heard(actor_id), phase) == {}


def test_an_engine_that_has_died_has_not_raised() -> None:
    dead = job_verdict._Actor(PARTIES[ENGINE], 1, "n", "192.0.2.2", is_dead=True, ending=None)
    (report,) = job_verdict._reports([dead], PARTIES, _heard(), "rollout").values()
    assert isinstance(report, RankError)
    assert report.cause == Died()


def lose_a_peer() -> None:
    raise RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")


def wait_in_vain() -> None:
    raise RuntimeError(
        "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete"
    )


@pytest.mark.parametrize(("phase", "told"), [("train", "train"), (None, "outside")])
@pytest.mark.parametrize("work", [lose_a_peer, wait_in_vain])
def test_a_trainer_that_has_waited_for_others_is_a_victim_in_any_phase(
    work: Callable[[], None], phase: str | None, told: str
) -> None:
    (report,) = job_verdict._reports([], PARTIES, _heard(TRAINER, work), phase).values()
    assert isinstance(report, RankError)
    assert (report.rank_id, report.cause, report.phase) == (PARTIES[TRAINER], Victim(), told)


def test_a_driver_whose_waits_are_bounded_knows_who_has_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    stock: Any = RayTaskError.as_instanceof_cause
    monkeypatch.setattr(RayTaskError, "as_instanceof_cause", stock.__wrapped__)
    assert call_error_of(_heard()) is None
    DriverWaits(PhaseTimeouts(), list)
    found = call_error_of(_heard())
    assert found is not None
    assert found.actor_id == ENGINE


def test_an_engine_that_has_only_lost_a_peer_is_no_root() -> None:
    found = call_error_of(_heard(work=lose_a_peer))
    assert found is not None
    assert found.report(PARTIES[ENGINE], "rollout").cause == Victim()


def test_what_a_helper_has_told_the_driver_counts() -> None:
    told = call_errors.CallError(ENGINE, "E: no", "engine.py:1 (f)", "", call_errors.ForeignCause.UNKNOWN, 1.0)
    report = told.report(PARTIES[ENGINE], "rollout")
    assert job_verdict._reports([], PARTIES, report, "rollout") == {PARTIES[ENGINE]: report}
