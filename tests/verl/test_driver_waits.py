"""The driver's waits: they end in time, and name the processes that do not answer."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from ray.actor import ActorHandle
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.replica import RolloutReplica

from rl_safe_workers.adapters import driver_waits
from rl_safe_workers.adapters.driver_waits import DriverWaits, Party
from rl_safe_workers.adapters.verl import trainers
from rl_safe_workers.adapters.verl.agent_loops import remembering
from rl_safe_workers.adapters.verl.guarded_objects import guarded_samples
from rl_safe_workers.adapters.verl.settings import VerlTimeouts
from rl_safe_workers.adapters.verl.trainers import SafeTrainerMixin
from rl_safe_workers.errors import PhaseTimeoutError, Raised, RankError, RunError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role, trainer_id
from tests.verl.test_hydra import ON, composed
from tests.verl.waiting_actors import Engine, PlainLoop, Rank, Server

TIMEOUTS = VerlTimeouts(sync=2.0, rollout=1.0)
# For waits that must end before their deadline. A busy machine does not reach it.
PATIENT_S = 120.0
PATIENT = VerlTimeouts(sync=PATIENT_S, rollout=PATIENT_S)
LIMIT_S = 10.0


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class _Replica(RolloutReplica):
    def __init__(self, replica_rank: int, server: Any) -> None:
        self.replica_rank, self.servers = replica_rank, [server]

    async def launch_servers(self) -> None:
        raise NotImplementedError

    def get_ray_class_with_init_args(self) -> Any:
        raise NotImplementedError


class _Group:
    def __init__(self, *workers: Any) -> None:
        self.workers = list(workers)

    def update_weights(self, **_: Any) -> list[Any]:
        return [worker.update_weights.remote() for worker in self.workers]


def _trainer(*servers: Any, ranks: tuple[Any, ...] = (), timeouts: VerlTimeouts = TIMEOUTS) -> Any:
    # Deadlines of two seconds are for calls, not for the start of their actors. A dead actor counts as ready here.
    for actor in (*servers, *ranks):
        if isinstance(actor, ActorHandle):
            assert ray.wait([actor.__ray_ready__.remote()], timeout=60)[0]
    trainer: Any = SafeTrainerMixin()
    settings = (f"timeouts.sync={timeouts.sync}", f"timeouts.rollout={timeouts.rollout}")
    trainer.config = composed(*ON, *(f"+actor_rollout_ref.rl_safe.{setting}" for setting in settings))
    trainer.actor_rollout_wg = _Group(*ranks)
    trainer.checkpoint_manager = CheckpointEngineManager(
        config=CheckpointEngineConfig(backend="naive"),
        actor_wg=trainer.actor_rollout_wg,
        replicas=[_Replica(rank, server) for rank, server in enumerate(servers)],
    )
    return trainer


def _late(call: Any) -> tuple[PhaseTimeoutError, float]:
    started_s = time.monotonic()
    with pytest.raises(PhaseTimeoutError) as caught:
        call()
    return caught.value, time.monotonic() - started_s


@pytest.mark.usefixtures("_cluster")
def test_a_replica_that_does_not_fall_asleep_is_named() -> None:
    trainer = _trainer(Server.remote(), Server.remote(silent="sleep"))
    error, waited_s = _late(trainer.checkpoint_manager.sleep_replicas)
    assert (error.phase, error.missing) == ("sync", {RankId(Role.ROLLOUT, 1)})
    assert "rollout replica 1 does not answer" in str(error)
    assert str(error).endswith("to wait longer raise rl_safe.timeouts.sync")
    # No training rank takes part, who would know better: none is waited for.
    assert TIMEOUTS.sync <= error.waited_s < TIMEOUTS.sync + driver_waits._WORKERS_FIRST_S
    assert waited_s < TIMEOUTS.sync + LIMIT_S


@pytest.mark.usefixtures("_cluster")
def test_a_replica_that_fails_to_fall_asleep_is_named() -> None:
    trainer = _trainer(Server.remote(), Server.remote(fails="sleep"))
    with pytest.raises(RankError) as caught:
        trainer.checkpoint_manager.sleep_replicas()
    assert (caught.value.rank_id, caught.value.cause) == (RankId(Role.ROLLOUT, 1), Raised())
    where = r" failed in phase sync at \S*waiting_actors.py:\d+ \(_answer\): "
    assert re.match(f"rollout rank 1{where}AssertionError: Memory usage", str(caught.value))


@pytest.mark.usefixtures("_cluster")
def test_a_training_rank_that_is_stopped_is_named() -> None:
    rank = Rank.remote(None)
    trainer = _trainer(Server.remote(), ranks=(rank,))
    error, waited_s = _late(trainer.checkpoint_manager.update_weights)
    assert error.missing == {trainer_id(0)}
    assert "training rank 0 does not answer" in str(error)
    assert waited_s < TIMEOUTS.sync + LIMIT_S


@pytest.mark.usefixtures("_cluster")
def test_a_failed_sync_names_a_rollout_process_that_has_died() -> None:
    server = Server.remote()
    os.kill(ray.get(server.pid.remote()), signal.SIGKILL)
    trainer = _trainer(server, ranks=(Rank.remote(ValueError("connection lost")),), timeouts=PATIENT)
    with pytest.raises(RunError, match=r"rollout replica 0 has died; .*ValueError: connection lost") as caught:
        trainer.checkpoint_manager.update_weights()
    assert caught.value.culprit == RankId(Role.ROLLOUT, 0)


@pytest.mark.usefixtures("_cluster")
def test_dead_rollout_process_is_named_before_the_deadline() -> None:
    server = Server.remote()
    os.kill(ray.get(server.pid.remote()), signal.SIGKILL)
    trainer = _trainer(server, ranks=(Rank.remote(None),), timeouts=PATIENT)
    with pytest.raises(RunError, match=r"rollout replica 0 has died$") as caught:
        trainer.checkpoint_manager.update_weights()
    assert caught.value.culprit == RankId(Role.ROLLOUT, 0)
    assert not isinstance(caught.value, PhaseTimeoutError)


@pytest.mark.usefixtures("_cluster")
@pytest.mark.parametrize(
    ("phase", "rank_id"),
    [(Phase.SAVE, RankId(Role.ROLLOUT, 0)), (Phase.SYNC, trainer_id(0))],
    ids=["a dead engine in a save", "a dead training rank in a sync"],
)
def test_a_look_ends_no_wait_for_another_death(phase: Phase, rank_id: RankId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_waits, "_LOOK_S", 0.2)
    actor = Server.remote()
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.pid.remote())
    party = Party("the dead", rank_id, actor, actor.pid.remote)
    waits = DriverWaits(PATIENT, lambda: [party])
    with pytest.raises(RunError, match="the dead has died"):
        waits.check_alive(phase, "the work")
    assert waits.bounded(phase, "the work", lambda: time.sleep(1.5) or "done") == "done"


@pytest.mark.usefixtures("_cluster")
def test_a_deadline_passes_in_time_if_ray_does_not_answer_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_waits, "_LOOK_S", 0.2)
    monkeypatch.setattr(driver_waits, "actor_table", lambda: time.sleep(60))
    actor = Server.remote()
    party = Party("the engine", RankId(Role.ROLLOUT, 0), actor, actor.pid.remote)
    waits = DriverWaits(TIMEOUTS, lambda: [party])
    error, waited_s = _late(lambda: waits.bounded(Phase.SYNC, "the sync", lambda: time.sleep(60), workers_first=False))
    assert error.phase == "sync"
    assert waited_s < TIMEOUTS.sync + LIMIT_S


@pytest.mark.usefixtures("_cluster")
def test_a_look_that_fails_ends_no_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ValueError("no table")

    monkeypatch.setattr(driver_waits, "_LOOK_S", 0.2)
    monkeypatch.setattr(driver_waits, "actor_table", broken)
    party = Party("the engine", RankId(Role.ROLLOUT, 0), Server.remote(), lambda: None)
    waits = DriverWaits(PATIENT, lambda: [party])
    assert waits.bounded(Phase.SYNC, "the sync", lambda: time.sleep(1.5) or "done") == "done"
    assert "could not look for dead engines: no table" in caplog.text


@pytest.mark.usefixtures("_cluster")
def test_a_timeout_that_a_rank_has_told_of_goes_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DriverWaits, "_silent", lambda *_: pytest.fail("nobody else is asked"))
    told = PhaseTimeoutError(
        phase="sync",
        awaited=driver_waits.Awaited("the rollout", frozenset({trainer_id(0), RankId(Role.ROLLOUT, 3)})),
        missing=[RankId(Role.ROLLOUT, 3)],
        waited_s=2.0,
        setting="rl_safe.timeouts.sync",
    )
    rank = Rank.remote(told)
    trainer = _trainer(Server.remote(silent="clear_kv_cache"), ranks=(rank,), timeouts=PATIENT)
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        trainer.checkpoint_manager.update_weights()
    assert str(caught.value.cause) == str(told)


def test_other_attributes_of_a_guarded_object_are_its_own() -> None:
    trainer = _trainer()
    assert trainer.checkpoint_manager.backend == "naive"
    assert not hasattr(trainer, "standalone_checkpoint_manager")
    with pytest.raises(AttributeError):
        trainer.checkpoint_manager.no_such_call()


class _Buffer(ReplayBuffer):
    """verl's buffer, whose prompts end as the test says, by the number of the poll."""

    def __init__(self, ends: dict[int, str], prompts: int = 3) -> None:
        nothing = OmegaConf.create({})
        super().__init__("sync", nothing, None, "drop", nothing, poll_interval=0.25)
        self._ends, self._polls, self._running = ends, 0, {f"prompt{i}" for i in range(prompts)}
        self._done: set[str] = set()

    def _sync_metadata_from_transfer_queue(self) -> None:
        self._polls += 1
        if ended := self._ends.get(self._polls):
            self._running.discard(ended)
            self._done.add(ended)
        self.running_keys["train"], self.finished_keys["train"] = set(self._running), set(self._done)
        self.partitions["train"] = {f"{key}_0_0": {} for key in self._done}

    def _materialize_batch(self, partition_id: str, selected: list[str], snapshot: Any) -> Any:
        return selected


def _waits(rollout_s: float = TIMEOUTS.rollout) -> DriverWaits:
    return DriverWaits(VerlTimeouts(rollout=rollout_s), list)


def test_generation_without_any_response_ends_at_the_timeout() -> None:
    buffer = guarded_samples(_Buffer({2: "prompt1"}), _waits())
    error, waited_s = _late(lambda: buffer.sample(1, "train", 3))
    assert error.phase == "rollout"
    assert "no response has ended for that long; prompts: 0 pending, 2 running, 1 finished, 0 failed" in str(error)
    assert str(error).endswith("to wait longer raise rl_safe.timeouts.rollout")
    assert TIMEOUTS.rollout <= error.waited_s < waited_s < TIMEOUTS.rollout + LIMIT_S


def test_the_last_poll_is_at_the_deadline() -> None:
    buffer = _Buffer({})
    buffer.poll_interval = 30.0
    error, waited_s = _late(lambda: guarded_samples(buffer, _waits()).sample(1, "train", 3))
    assert (error.phase, buffer.poll_interval) == ("rollout", 30.0)
    assert waited_s < TIMEOUTS.rollout + LIMIT_S


@pytest.mark.usefixtures("_cluster")
@pytest.mark.parametrize(
    ("manager", "workers", "victim"),
    [
        ("agent_loop_manager", "agent_loop_workers", RankId(Role.AGENT_LOOP, 1)),
        ("reward_loop_manager", "reward_loop_workers", RankId(Role.REWARD, 1)),
    ],
)
def test_generation_ends_at_once_if_a_worker_of_verls_has_died(manager, workers, victim) -> None:
    well, dead = Server.remote(), Server.remote()
    trainer = _trainer(timeouts=PATIENT)
    setattr(trainer, manager, SimpleNamespace(**{workers: [well, dead]}))
    trainer.replay_buffer = _Buffer({})
    os.kill(ray.get(dead.pid.remote()), signal.SIGKILL)
    with pytest.raises(RunError, match=f"generation: {victim} has died") as caught:
        trainer.replay_buffer.sample(1, "train", 3)
    assert (caught.value.culprit, trainer.rl_safe_waits.failed_in) == (victim, "rollout")


@pytest.mark.usefixtures("_cluster")
def test_a_worker_that_dies_in_the_last_poll_ends_generation() -> None:
    dead = Server.remote()
    trainer = _trainer(timeouts=PATIENT)
    trainer.agent_loop_manager = SimpleNamespace(agent_loop_workers=[dead])
    buffer = _Buffer({2: "prompt0"}, prompts=1)

    def last_poll(partition_id: str, last_debug_time: float) -> float:
        os.kill(ray.get(dead.pid.remote()), signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(dead.__ray_ready__.remote(), timeout=LIMIT_S)
        return last_debug_time

    buffer._wait_for_next_poll = last_poll
    trainer.replay_buffer = buffer
    with pytest.raises(RunError, match="generation: agent loop worker 0 has died"):
        trainer.replay_buffer.sample(1, "train", 1)


def _heard(buffer: ReplayBuffer, role: Role) -> Any:
    """A trainer whose second engine, or reward worker, has raised in a rollout, before it samples."""
    called = [Engine.remote(), Engine.remote()]
    loop = ray.remote(num_cpus=0)(remembering(PlainLoop)).remote()
    for _ in range(2):
        assert ray.get(loop.run.remote(called[1])) == "RayTaskError(MemoryError)"
    trainer = _trainer(*(called if role is Role.ROLLOUT else ()))
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_workers=called if role is Role.REWARD else [])
    trainer.agent_loop_manager = SimpleNamespace(agent_loop_workers=[loop])
    trainer.replay_buffer = buffer
    return trainer


FAILED = r" failed in phase rollout at \S*waiting_actors.py:\d+ \(generate\): MemoryError: no room for"
ANSWERING = pytest.mark.parametrize("role", [Role.ROLLOUT, Role.REWARD])


@pytest.mark.usefixtures("_cluster")
@ANSWERING
def test_who_raises_in_a_rollout_is_named_once_while_verl_goes_on(role, caplog) -> None:
    trainer = _heard(_Buffer({2: "prompt0"}, prompts=1), role)
    trainer.replay_buffer.sample(1, "train", 1)
    trainer.replay_buffer.sample(2, "train", 1)
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert re.fullmatch(f"rl_safe: {role.noun} 1{FAILED} the prompt; verl goes on without the answer", told)


@pytest.mark.usefixtures("_cluster")
@ANSWERING
def test_who_raises_in_a_rollout_is_to_blame_if_no_prompt_has_an_answer(role, monkeypatch) -> None:
    buffer = _Buffer({1: "prompt0"}, prompts=1)
    monkeypatch.setattr(buffer, "_select_prompt_uids", lambda *_: (["prompt0"], {}, {}))  # it has failed
    trainer = _heard(buffer, role)
    with pytest.raises(RankError, match=FAILED) as caught:
        trainer.replay_buffer.sample(1, "train", 1)
    assert (caught.value.rank_id, caught.value.cause) == (RankId(role, 1), Raised())
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert trainer.rl_safe_waits.failed_in == "rollout"


@pytest.mark.usefixtures("_cluster")
def test_an_engine_that_raised_before_an_earlier_step_is_not_to_blame(monkeypatch) -> None:
    buffer = _Buffer({1: "prompt0"}, prompts=1)
    trainer = _heard(buffer, Role.ROLLOUT)
    trainer.replay_buffer.sample(1, "train", 1)
    monkeypatch.setattr(buffer, "_select_prompt_uids", lambda *_: (_ for _ in ()).throw(ValueError("a user's sampler")))
    with pytest.raises(ValueError, match="a user's sampler"):
        trainer.replay_buffer.sample(2, "train", 1)


def test_generation_may_take_longer_than_the_timeout_if_responses_end() -> None:
    ends = {3 * (i + 1): f"prompt{i}" for i in range(6)}
    buffer = guarded_samples(_Buffer(ends, prompts=6), _waits(rollout_s=3.0))
    started_s = time.monotonic()
    batch, _ = buffer.sample(1, "train", 6)
    assert sorted(batch) == sorted(ends.values())
    assert time.monotonic() - started_s > 3.0


def test_training_between_two_samples_does_not_count() -> None:
    buffer = guarded_samples(_Buffer({2: "prompt0", 4: "prompt1"}, prompts=2), _waits(rollout_s=3.0))
    buffer.sample(1, "train", 1)
    time.sleep(3.5)
    buffer._done.clear()
    assert buffer.sample(2, "train", 1)[0] == ["prompt1"]


def test_a_sampler_with_polls_of_its_own_is_bound_as_a_whole(monkeypatch) -> None:
    monkeypatch.setattr(driver_waits, "_WORKERS_FIRST_S", 0.0)
    sampler = guarded_samples(SimpleNamespace(sample=lambda: time.sleep(30), poll_interval=2.0), _waits())
    error, _ = _late(sampler.sample)
    assert (error.phase, sampler.poll_interval) == ("rollout", 2.0)


def test_every_attribute_that_verl_waits_in_is_guarded() -> None:
    guarded = {name for name, value in vars(SafeTrainerMixin).items() if isinstance(value, trainers._Guarded)}
    assert guarded == {
        *("checkpoint_manager", "standalone_checkpoint_manager", "agent_loop_manager", "replay_buffer"),
        *("train_dataloader", "val_dataloader"),
    }


class _Rows:
    """A dataset, one of whose rows waits for a lock on a file."""

    def __init__(self, lock: Path) -> None:
        self._lock = lock

    def __len__(self) -> int:
        return 3

    def __getitem__(self, item: int) -> int:
        if item == 2:
            with self._lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        return item


@pytest.mark.parametrize(
    ("workers", "place"),
    [
        (0, r"it is at \S*test_driver_waits\.py:\d+ \(__getitem__\), and waits for a lock on {lock}"),
        (1, r"it is at .*, and waits for its process \d+, which .*waits for a lock on {lock}"),
    ],
    ids=["in the driver", "in a worker"],
)
def test_a_dataset_that_keeps_the_driver_waiting_is_told_with_its_line(
    workers: int, place: str, tmp_path: Path
) -> None:
    lock = tmp_path / "rows.lock"
    lock.touch()
    trainer = _trainer()
    trainer.train_dataloader = StatefulDataLoader(_Rows(lock), batch_size=1, num_workers=workers)
    assert len(trainer.train_dataloader) == 3
    assert [int(batch) for batch in trainer.train_dataloader] == [0, 1, 2]
    trainer.train_dataloader.state_dict()
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        rows = iter(trainer.train_dataloader)
        assert [int(next(rows)), int(next(rows))] == [0, 1]
        error, waited_s = _late(lambda: next(rows))
    assert error.phase == trainer.rl_safe_waits.failed_in == "rollout"
    assert re.match(place.format(lock=re.escape(str(lock))), error.detail), error.detail
    assert "loading prompts did not finish within" in str(error)
    assert not error.missing
    assert waited_s < TIMEOUTS.rollout + LIMIT_S
