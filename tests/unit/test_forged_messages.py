"""Another process that knows the store's port writes its keys: no rank takes what no rank has signed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rl_safe_workers.control.seal import LARGEST_BYTES, Seal, new_secret
from rl_safe_workers.errors import CommunicatorError, PhaseTimeoutError
from rl_safe_workers.ranks import trainer_id
from tests.small_world import SmallWorld
from tests.unit.forging import ABSENT, MISDEEDS, OPERATIONS, SHORT_S, is_listed, names_a_key, stranger


@pytest.fixture
def world() -> SmallWorld:
    return SmallWorld()


@pytest.fixture(params=MISDEEDS)
def attacked(request: pytest.FixtureRequest, world: SmallWorld) -> Iterator[SmallWorld]:
    """A world with an operation of each kind behind it, all of whose keys a stranger has seen and now writes."""
    store, stop, seen = world.connect(), threading.Event(), dict[str, bytes]()
    for call in OPERATIONS.values():
        world.each(call)
        seen |= is_listed(store)
    misdeed = MISDEEDS[request.param]

    def attack(store: Any, keys: dict[str, bytes]) -> None:
        misdeed(store, keys if request.param != "replay" else seen)

    thread = threading.Thread(target=stranger, args=(store, attack, stop), daemon=True)
    thread.start()
    yield world
    stop.set()
    thread.join()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_that_has_not_come_is_never_taken_for_one_that_has(operation: str, attacked: SmallWorld) -> None:
    started_s = time.monotonic()
    for outcome in attacked.each(OPERATIONS[operation], ranks=[0, 2]):
        if isinstance(outcome, PhaseTimeoutError):
            assert trainer_id(ABSENT) in outcome.missing
        elif isinstance(outcome, Exception):
            assert names_a_key(outcome), outcome
        else:
            # Verdicts alone end without an error.
            assert operation == "verdicts"
            assert outcome[ABSENT] == "did not report in time"
    assert time.monotonic() - started_s < 20 * SHORT_S


@pytest.mark.parametrize("operation", OPERATIONS)
def test_with_all_there_the_outcome_is_theirs_or_an_error_that_names_a_key(
    operation: str, attacked: SmallWorld
) -> None:
    expected = {"barrier": "went on", "decide": [0, 1, 2], "verdicts": {}}[operation]
    for outcome in attacked.each(OPERATIONS[operation]):
        if isinstance(outcome, PhaseTimeoutError) or outcome == expected:
            continue  # waited for a rank that has met a forged key
        if operation == "verdicts" and isinstance(outcome, dict):
            assert set(outcome.values()) <= {"did not report in time"}
        else:
            assert names_a_key(outcome), outcome


def test_what_is_removed_delays_a_run_and_decides_nothing(world: SmallWorld) -> None:
    stop, store = threading.Event(), world.connect()

    def remove() -> None:
        while not stop.is_set():
            for key in store.list_keys():
                if "/number/" not in key:
                    store.delete_key(key)

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    outcomes = [outcome for call in OPERATIONS.values() for outcome in world.each(call, ranks=[0, 2])]
    stop.set()
    thread.join()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            assert names_a_key(outcome), outcome
        else:
            assert outcome[ABSENT] == "did not report in time"


def test_a_counter_that_was_bumped_or_forged_is_named_and_not_taken(world: SmallWorld) -> None:
    store = world.connect()
    key = "training world/vote/number/1"
    store.set(key, b"5")
    store.add(key, 1)
    with pytest.raises(CommunicatorError, match=f"key '{key}' of the run's store holds what no rank"):
        world.planes[1].begin("vote", phase="save")


def test_a_forged_race_is_named(world: SmallWorld) -> None:
    operation = world.planes[0].begin("bootstrap", phase="bootstrap")
    world.connect().set("training world/bootstrap/1/failed", b'{"part": "A", "missing": [2]}')
    for race in (lambda: operation.first("failed", b"{}"), lambda: operation.peek("failed")):
        with pytest.raises(CommunicatorError, match=r"key 'training world/bootstrap/1/failed'"):
            race()


def test_a_signature_is_of_one_key_and_one_secret() -> None:
    seal = Seal(new_secret())
    message = seal.close("a", b"text")
    assert seal.open("a", message) == b"text"
    for reader, key, forged in (
        (seal, "b", message),
        (Seal(new_secret()), "a", message),
        (seal, "a", message + b"."),
        (seal, "a", b""),
        (seal, "a", message[:64]),
    ):
        with pytest.raises(CommunicatorError, match=f"key {key!r}"):
            reader.open(key, forged)


def test_what_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = Seal(new_secret())
    message = seal.close("a", bytes(10_000))
    assert len(message) < 1000
    monkeypatch.setattr("rl_safe_workers.control.seal.LARGEST_BYTES", 9_999)
    with pytest.raises(CommunicatorError, match="more than 9999 bytes"):
        seal.open("a", message)
    assert LARGEST_BYTES == 256 * 2**20


def test_a_secret_has_32_bytes_and_is_in_no_error() -> None:
    with pytest.raises(ValueError, match="has 32 bytes, not 5"):
        Seal(b"short")
    secret = new_secret()
    with pytest.raises(CommunicatorError) as caught:
        Seal(secret).open("a", b"x" * 100)
    assert secret.hex() not in str(caught.value)
    assert repr(secret) not in str(caught.value)
