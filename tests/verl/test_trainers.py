"""verl's trainers over our workers: which worker classes each mode gets, and that groups end whatever happens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, get_trainer_cls

from rl_safe_workers.adapters.group_ends import GroupEnd
from rl_safe_workers.adapters.verl import trainers
from rl_safe_workers.adapters.verl.trainers import TRAINERS, SafeTrainerMixin, use_trainers
from rl_safe_workers.errors import RunError
from tests.verl.test_hydra import ON, composed

WORKERS = {
    "sync": "SafeActorRolloutRefWorker",
    "colocate_async": "SafeActorRolloutRefWorker",
    "separate_async": "SafeDetachActorWorker",
}


def test_verl_finds_our_trainer_under_each_of_its_own_names() -> None:
    before = dict(TRAINER_REGISTRY)
    try:
        use_trainers()
        assert {mode: get_trainer_cls(mode) for mode in before} == TRAINERS
    finally:
        TRAINER_REGISTRY.update(before)
    assert all(issubclass(TRAINERS[mode], stock) for mode, stock in before.items())


@pytest.mark.parametrize("mode", sorted(WORKERS))
def test_every_role_of_a_mode_gets_a_worker_of_ours(mode) -> None:
    trainer = TRAINERS[mode].__new__(TRAINERS[mode])
    trainer.config = composed(*ON, f"trainer.v1.trainer_mode={mode}", "algorithm.adv_estimator=gae")
    trainer._init_resource_pool_mgr()
    found = {role: cls.__ray_actor_class__.__name__ for role, cls in trainer.role_worker_mapping.items()}
    assert found.pop(Role.Critic) == "SafeTrainingWorker"
    assert set(found.values()) == {WORKERS[mode]}


class _Stock:
    """A trainer that does nothing, or fails."""

    failure: Exception | None = None

    def fit(self, agent_loop_manager: Any) -> None:
        if self.failure is not None:
            raise self.failure

    def on_step_end(self) -> None:
        self._pending_sync_metrics = {"verl": 7.0}


class _Group:
    def __init__(self, *metrics: dict[str, float]) -> None:
        self.told: list[str | None] = []
        self.metrics = list(metrics)

    def rl_safe_metrics(self) -> list[dict[str, float]]:
        return self.metrics

    def teardown_groups(self, failure: str | None) -> list[str | None]:
        self.told.append(failure)
        return [failure]


def _trainer(monkeypatch: pytest.MonkeyPatch, *, failure: Exception | None = None, wrong: str = "") -> Any:
    monkeypatch.setattr(trainers, "end_of", lambda calls, patience_s: GroupEnd(2, frozenset(), 1.0, wrong))
    trainer: Any = type("Trainer", (SafeTrainerMixin, _Stock), {"failure": failure})()
    trainer.config = composed(*ON)
    trainer.rl_safe_verdict = SimpleNamespace(on=lambda error, phase: error)
    trainer.actor_rollout_wg = trainer.ref_policy_wg = _Group()
    trainer.critic_wg = _Group()
    return trainer


def test_after_training_each_worker_group_ends_once(monkeypatch) -> None:
    trainer = _trainer(monkeypatch)
    trainer.fit(None)
    assert (trainer.actor_rollout_wg.told, trainer.critic_wg.told) == ([None], [None])


def test_a_failure_of_training_is_told_to_the_workers_and_goes_on(monkeypatch) -> None:
    trainer = _trainer(monkeypatch, failure=ValueError("no reward"), wrong="rank 1 is stuck")
    with pytest.raises(ValueError, match="no reward"):
        trainer.fit(None)
    assert trainer.actor_rollout_wg.told == ["driver, in fit: ValueError: no reward"]


def test_an_end_that_fails_fails_a_run_that_went_well(monkeypatch) -> None:
    trainer = _trainer(monkeypatch, wrong="rank 1: its groups were aborted")
    with pytest.raises(RunError, match="teardown: rank 1: its groups were aborted"):
        trainer.fit(None)
    assert (trainer.actor_rollout_wg.told, trainer.critic_wg.told) == ([None], [None]), "they end once"


def test_metrics_are_the_worst_of_every_rank_of_every_worker_group(monkeypatch) -> None:
    trainer = _trainer(monkeypatch)
    trainer.actor_rollout_wg = trainer.ref_policy_wg = _Group({"rl_safe/active": 1.0, "timing_s/rl_safe_save": 2.0})
    trainer.critic_wg = _Group({"rl_safe/active": 1.0, "rl_safe/late_allocations": 3.0}, {"timing_s/rl_safe_save": 5.0})
    trainer.on_step_end()
    assert trainer._pending_sync_metrics == {
        "verl": 7.0,
        "rl_safe/active": 0.0,
        "rl_safe/late_allocations": 3.0,
        "timing_s/rl_safe_save": 5.0,
    }
