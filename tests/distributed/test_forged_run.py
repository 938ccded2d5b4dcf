"""A process that knows the port of a live run, and not its secret, writes every key that it can list."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from rl_safe_workers.checkpoint.folders.manifest import read_manifest
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import CheckpointError, CommunicatorError, PhaseTimeoutError
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.ranks import run_ranks, values
from tests.distributed.shards import Saving, state_of

SIZE, ROUNDS, PATIENCE_S = 3, 4, 1.0
STRANGER = SIZE


def _outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "value", call()
    except (CheckpointError, CommunicatorError, PhaseTimeoutError) as error:
        return type(error).__name__, str(error)


def _work(rank: int, address: StoreAddress, root: Path) -> dict[str, Any]:
    saving = Saving(rank, address, timeout_s=PATIENCE_S, size=SIZE)
    control = saving.control
    control.barrier("world", Deadline.after(30))
    (root / f"ready_{rank}").touch()
    _await(root / "attacking")
    seen: dict[str, list[Any]] = {"barrier": [], "decision": [], "verdicts": [], "save": []}
    for turn in range(ROUNDS):
        seen["barrier"].append(_outcome(lambda: control.barrier("train", Deadline.after(PATIENCE_S))))
        seen["decision"].append(
            _outcome(
                lambda turn=turn: control.gathering("vote", phase="train").settle(
                    Deadline.after(PATIENCE_S), report=[rank, turn], decide=list
                )
            )
        )
        seen["verdicts"].append(
            _outcome(lambda: control.exchange_outcomes(None, phase="train", deadline=Deadline.after(PATIENCE_S)))
        )
        state = state_of(rank, step=turn, ep=1, size=SIZE)
        if saving.saver.in_flight:
            saving.saver.abandon("the save before has failed")
        seen["save"].append(_outcome(lambda state=state, turn=turn: saving.save(state, root / "saves", step=turn + 1)))
    (root / f"done_{rank}").touch()
    return seen


def _await(file: Path) -> None:
    deadline = Deadline.after(60)
    while not file.exists():
        assert not deadline.expired, f"{file} did not come"
        time.sleep(0.01)


def _attack(port: int, root: Path) -> dict[str, int]:
    """Writes, adds to, moves and deletes keys until all ranks are through; returns how often it did what."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    chance, done, seen = random.Random(0), dict.fromkeys(("set", "append", "move", "delete", "add"), 0), []
    for rank in range(SIZE):
        _await(root / f"ready_{rank}")
    (root / "attacking").touch()
    while not all((root / f"done_{rank}").exists() for rank in range(SIZE)):
        for key in chance.sample(keys := _keys_of_the_run(store), min(100, len(keys))):
            value = bytes(store.compare_set(key, "nothing", "nothing"))
            seen.append((key, value))
            misdeed = chance.choice(list(done))
            done[misdeed] += 1
            if misdeed == "set":
                store.set(key, chance.choice([b"", b"1", value[::-1], b"0" * 64 + b"=[null, null]"]))
            elif misdeed == "append":
                store.append(key, "\nforged")
            elif misdeed == "move":
                store.set(key, chance.choice(seen)[1])
            elif misdeed == "delete":
                store.delete_key(key)
            else:
                # Adding to what is no number would cost the stranger the connection, so it makes new counters.
                store.add(f"{key.partition('/bumped/')[0]}/bumped/{done['add']}", 1)
    return done


def _keys_of_the_run(store: TCPStore) -> list[str]:
    """All keys but those of gloo, which is connected already: they are torch's."""
    return [key for key in store.list_keys() if key.startswith("training world/")]


def _rank(rank: int, address: StoreAddress, root: Path) -> Any:
    return _attack(address.port, root) if rank == STRANGER else _work(rank, address, root)


def test_no_forged_decision_is_taken_and_no_rank_hangs(address: StoreAddress, tmp_path: Path) -> None:
    (tmp_path / "saves").mkdir()
    *ranks, misdeeds = values(run_ranks(_rank, SIZE + 1, address, tmp_path, timeout_s=100))
    assert min(misdeeds.values()) > 10, misdeeds
    for turn in range(ROUNDS):
        everyone = [[rank, turn] for rank in range(SIZE)]
        for seen in ranks:
            for name, expected in (("barrier", None), ("decision", everyone)):
                kind, found = seen[name][turn]
                assert kind != "value" or found == expected, (name, found)
            kind, verdicts = seen["verdicts"][turn]
            assert kind != "value" or set(verdicts.values()) <= {"did not report in time"}, verdicts
            kind, path = seen["save"][turn]
            if kind == "value":
                assert read_manifest(Path(path)).step == turn + 1
    errors = {text for seen in ranks for outcomes in seen.values() for kind, text in outcomes if kind != "value"}
    assert any("of the run's store" in text for text in errors), errors
