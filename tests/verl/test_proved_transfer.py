"""verl's weight syncs from its driver, over fake engines: proved, redone once, or the end of the run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rl_safe_workers.adapters import sync_prover
from rl_safe_workers.adapters.driver_waits import DriverWaits
from rl_safe_workers.adapters.verl.proved_transfer import ProvedTransfer
from rl_safe_workers.adapters.verl.settings import VerlTimeouts
from rl_safe_workers.errors import ConfigError, WeightSyncError
from rl_safe_workers.rollout.sync_proof import HeldWeights, SentWeights

NAME = "model.layers.0.mlp.gate.weight"


class _Engine:
    """An engine's server. It holds what it was sent, or the digests that it is given."""

    def __init__(self, *held: int | None, obstacle: str | None = None, refuses: str | None = None) -> None:
        self.given, self.obstacle = list(held), obstacle
        self.rl_safe_prove = SimpleNamespace(remote=lambda: obstacle)
        self.rl_safe_held = SimpleNamespace(remote=self._held)
        self.rl_safe_learn_anew = SimpleNamespace(remote=self._learn_anew)
        self.learned_anew, self.refuses = 0, refuses

    def _learn_anew(self) -> str | None:
        self.learned_anew += 1
        return self.refuses

    def _held(self) -> HeldWeights | None:
        digest = self.given.pop(0) if self.given else 7
        if digest is None:
            return None
        return HeldWeights(digests=((NAME, digest),), converted=0, unread=("mtp",), faults=(), seconds=2.0)


class _Manager:
    """Stands for verl's CheckpointEngineManager, and for its training ranks."""

    backend = "naive"

    def __init__(self, *engines: _Engine) -> None:
        self.calls: list[str] = []
        self.actor_wg = self
        self.replicas = [SimpleNamespace(servers=[engine]) for engine in engines]

    def rl_safe_prove(self) -> None:
        self.calls.append("prove")

    def rl_safe_sent(self) -> list[SentWeights]:
        return [SentWeights(digests={NAME: 7}, seconds=0.5), SentWeights(digests={"mtp": 1}, seconds=0.1)]

    def update_weights(self, global_steps: int) -> dict[str, int]:
        self.calls.append(f"update {global_steps}")
        return {"step": global_steps}

    def sleep_replicas(self) -> None:
        self.calls.append("sleep")


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_prover.ray, "get", lambda calls: calls)


def _transfer(manager: _Manager, *, every: int = 1, is_packed: bool = False) -> tuple[ProvedTransfer, DriverWaits]:
    waits = DriverWaits(VerlTimeouts(), list)
    return ProvedTransfer(manager, waits, every=every, is_packed=is_packed), waits


def test_a_sync_that_is_right_is_done_once_and_returns_what_verls_returns() -> None:
    manager = _Manager(_Engine(), _Engine())
    transfer, _ = _transfer(manager)
    assert transfer.update_weights(3) == {"step": 3}
    assert manager.calls == ["prove", "update 3"]
    assert transfer.prover.metrics == {
        "rl_safe/sync_proved": 2.0,
        "rl_safe/sync_not_proved": 2.0,
        "rl_safe/sync_redone": 0.0,
        "timing_s/rl_safe_sync_proof": 2.5,
    }
    assert transfer.backend == "naive", "everything else is the manager's own"


def test_a_sync_that_is_not_due_asks_for_no_digests() -> None:
    manager = _Manager(_Engine())
    transfer, _ = _transfer(manager, every=2)
    for step in range(3):
        transfer.update_weights(step)
    assert manager.calls == ["prove", "update 0", "update 1", "prove", "update 2"]


def test_a_sync_that_is_wrong_once_is_redone_with_engines_that_sleep_before_it() -> None:
    manager = _Manager(_Engine(), _Engine(8))
    transfer, _ = _transfer(manager)
    transfer.update_weights(3)
    assert manager.calls == ["prove", "update 3", "sleep", "prove", "update 3"]
    assert transfer.prover.metrics["rl_safe/sync_redone"] == 1


@pytest.mark.parametrize(
    ("held", "told"),
    [(8, rf"{NAME}: sent 0000000000000007, held 0000000000000008$"), (None, "no weights have come in this sync; ")],
)
def test_a_sync_that_is_wrong_twice_ends_the_run_in_its_phase(held: int | None, told: str) -> None:
    transfer, waits = _transfer(_Manager(_Engine(), _Engine(held, held)))
    with pytest.raises(
        WeightSyncError,
        match=rf"^the weight sync of step 3 has put wrong weights into an engine, twice: rollout rank 1: {told}",
    ):
        transfer.update_weights(3)
    assert waits.failed_in == "sync"


def test_an_engine_that_cannot_be_read_back_is_refused_before_it_is_sent_weights() -> None:
    manager = _Manager(_Engine(), _Engine(obstacle="its weights are quantised"))
    transfer, _ = _transfer(manager)
    with pytest.raises(ConfigError, match="^rollout rank 1: weight syncs cannot be proved: its weights are quantised"):
        transfer.update_weights(0)
    assert manager.calls == ["prove"]


def test_a_packed_sync_that_was_wrong_goes_through_the_loaders_when_it_is_redone() -> None:
    engines = _Engine(), _Engine(7, 8)
    transfer, _ = _transfer(_Manager(*engines), is_packed=True)
    for step in range(2):
        transfer.update_weights(step)
    assert [engine.learned_anew for engine in engines] == [2, 2], "before the first sync, and before the one redone"


def test_an_engine_that_cannot_take_packed_weights_is_refused_before_the_first_sync() -> None:
    manager = _Manager(_Engine(), _Engine(refuses="its worker_extension_cls is not ours"))
    transfer, _ = _transfer(manager, every=-1, is_packed=True)
    with pytest.raises(ConfigError, match=r"^rollout rank 1: .*packed_sync=true: its worker_extension_cls is not ours"):
        transfer.update_weights(0)
    assert manager.calls == []
