"""The driver's waits: they end in time, name the processes that do not answer, and leave the host's names alone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray

from rl_safe_workers.adapters import driver_waits
from rl_safe_workers.adapters.driver_waits import Standstill
from rl_safe_workers.adapters.job_verdict import JobVerdict
from rl_safe_workers.adapters.nemo_rl import guarded_driver
from rl_safe_workers.adapters.nemo_rl.guarded_driver import ENGINE_CALLS, REFIT, ROLLOUTS, GuardedDriver, parties_of
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NemoRlTimeouts
from rl_safe_workers.errors import ConfigError, JobError, PhaseTimeoutError, RunError, WeightSyncError
from rl_safe_workers.ranks import RankId, Role, trainer_id
from rl_safe_workers.worlds.address import StoreAddress
from tests.nemo_rl.silent_worker import SilentWorker

TIMEOUTS = NemoRlTimeouts(sync=1.0, rollout=1.0, joint=1.0, teardown=1.0, save=4.0)
LIMIT_S = 10.0
EVIDENCE = Path("failure")


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _workers_are_no_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_waits, "_WORKERS_FIRST_S", 0.5)


@pytest.fixture(autouse=True)
def _evidence_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _started(silent: str = "", wrong: int = 0, plan: dict[str, Any] | None = None) -> Any:
    worker = SilentWorker.remote(silent, wrong, plan)
    assert ray.get(worker.is_alive.remote())
    return worker


class _Group:
    """NeMo RL's RayWorkerGroup, as far as this goes."""

    def __init__(self, *workers: Any) -> None:
        self.workers = list(workers)
        self.dp_size = len(workers)

    def get_dp_leader_worker_idx(self, shard: int) -> int:
        return shard

    def ask(self, name: str, answer: Any = None) -> list[Any]:
        return [worker.call.remote(name, answer) for worker in self.workers]

    def shutdown(self, force: bool = False) -> bool:
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
        return True


class _Policy:
    def __init__(self, *workers: Any) -> None:
        self.worker_group = _Group(*workers)

    def init_collective(self) -> list[Any]:
        return self.worker_group.ask("init_collective")

    def prepare_refit_info(self, *info: Any) -> Any:
        return ray.get(self.worker_group.ask("prepare_refit_info"))

    def finalize_async_save(self, *, fails: bool = False, seconds: float = 0.0) -> None:
        if fails:
            raise RunError("the disk is full")
        ray.get([worker.finish_save.remote(seconds) for worker in self.worker_group.workers])

    def shutdown(self) -> bool:
        return not self.worker_group.workers or self.worker_group.shutdown()


class _Generation(_Policy):
    cfg: Any = {"colocated": {"enabled": False}}  # noqa: RUF012

    def init_collective(self) -> list[Any]:
        return self.worker_group.ask("init_collective")

    def prepare_refit_info(self, *info: Any) -> Any:
        return ray.get(self.worker_group.ask("prepare_refit_info"))

    def prepare_for_generation(self) -> list[Any]:
        return ray.get(self.worker_group.ask("wake_up"))  # type: ignore[no-any-return]

    def generate(self, turns: int = 1) -> list[Any]:
        time.sleep(0.3 * turns)
        return ray.get(self.worker_group.ask("generate"))  # type: ignore[no-any-return]

    async def generate_async(self) -> AsyncIterator[int]:
        await asyncio.sleep(0.3)
        yield 1


class _Synchronizer:
    def __init__(self, generation: _Generation) -> None:
        self._generation = generation

    def init_communicator(self) -> list[Any]:
        return ray.get(self._generation.worker_group.ask("init_collective"))  # type: ignore[no-any-return]

    def sync_weights(self) -> list[Any]:
        return ray.get(self._generation.worker_group.ask("sync_weights"))  # type: ignore[no-any-return]


def _loops() -> Any:
    """NeMo RL's module of `setup`, with loops that look names up in it as NeMo RL's do."""
    module: Any = ModuleType("nemo_rl.algorithms.grpo")
    exec(LOOPS, vars(module))
    module.VllmGeneration = _Generation
    return module


LOOPS = """
import asyncio, ray, time

def refit_policy_generation(policy, generation):
    ray.get(policy.worker_group.ask("broadcast"))
    return ray.get(generation.worker_group.ask("update_weights"))

def run_multi_turn_rollout(policy_generation, turns):
    return [policy_generation.generate() for _ in range(turns)]

def run_async_multi_turn_rollout(policy_generation, turns):
    async def run():
        return [one for _ in range(turns) async for one in policy_generation.generate_async()]
    return asyncio.run(run())

def setup(policy_factory, engines):
    policy, generation = policy_factory(), VllmGeneration(*engines)
    ray.get(policy.init_collective() + generation.init_collective())
    generation.prepare_refit_info(policy.prepare_refit_info())
    return policy, generation

def create_weight_synchronizer(policy, generation, **more):
    return more["kind"](generation)

def wait_for_batch(buffer, sizes, ready):
    while True:
        size = ray.get(buffer.call.remote("size", sizes.pop(0) if len(sizes) > 1 else sizes[0]))
        if ray.get(buffer.call.remote("ready", size >= ready)):
            return size
        time.sleep(0.25)

def step(policy, generation, buffer):
    ray.get(buffer.call.remote("prepare_for_refit"))
    return refit_policy_generation(policy, generation)
"""


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _guarded(
    ends: ExitStack, trainers: list[Any], engines: list[Any], *, prove_sync_freq: int = -1
) -> tuple[Any, GuardedDriver]:
    module = _loops()
    driver = GuardedDriver(TIMEOUTS, ends, evidence=EVIDENCE, prove_sync_freq=prove_sync_freq)
    driver.guard_setup(module)
    driver.policy, driver.generation = _Policy(*trainers), _Generation(*engines)
    driver.guard_loops(module)
    return module, driver


def _late(call: Callable[[], Any]) -> tuple[PhaseTimeoutError, float]:
    started_s = time.monotonic()
    with pytest.raises(PhaseTimeoutError) as caught:
        call()
    return caught.value, time.monotonic() - started_s


def test_an_engine_that_takes_no_weights_is_named(ends) -> None:
    module, driver = _guarded(ends, [_started()], [_started(), _started("update_weights")])
    error, waited_s = _late(lambda: module.refit_policy_generation(driver.policy, driver.generation))
    assert (error.phase, error.missing) == ("sync", {RankId(Role.ROLLOUT, 1)})
    assert "rollout engine 1 does not answer" in str(error)
    assert str(error).endswith("to wait longer raise rl_safe.timeouts.sync")
    assert waited_s < TIMEOUTS.sync + LIMIT_S


def test_a_trainer_that_sends_no_weights_is_named(ends) -> None:
    module, driver = _guarded(ends, [_started(), _started("broadcast")], [_started()])
    error, _ = _late(lambda: module.refit_policy_generation(driver.policy, driver.generation))
    assert error.missing == {trainer_id(1)}


@contextmanager
def _saving(policy: _Policy, seconds: float) -> Iterator[None]:
    """Has a thread wait for a save in the background, as NeMo RL's checkpointer does. Kills the trainers at the end."""

    def finalize() -> None:
        with suppress(ray.exceptions.RayError):  # the trainers were killed
            policy.finalize_async_save(seconds=seconds)

    thread = threading.Thread(target=finalize, daemon=True)
    thread.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        policy.worker_group.shutdown()
        thread.join(LIMIT_S)


def test_a_refit_behind_a_long_save_has_its_own_deadline(ends) -> None:
    module, driver = _guarded(ends, [_started()], [_started()])
    with _saving(driver.policy, TIMEOUTS.sync + 1.5):
        assert module.refit_policy_generation(driver.policy, driver.generation) == [None]


def test_a_save_that_keeps_a_refit_waiting_is_named(ends) -> None:
    module, driver = _guarded(ends, [_started()], [_started()])
    with _saving(driver.policy, 60):
        error, waited_s = _late(lambda: module.refit_policy_generation(driver.policy, driver.generation))
    assert (error.phase, error.missing) == ("save", {trainer_id(0)})
    assert waited_s < TIMEOUTS.save + LIMIT_S


def test_an_engine_that_has_died_in_a_refit_is_named_at_once(ends) -> None:
    engine = _started()
    os.kill(ray.get(engine.pid.remote()), signal.SIGKILL)
    module, driver = _guarded(ends, [_started()], [engine])
    with pytest.raises(RunError, match="the refit: rollout engine 0 has died; ") as caught:
        module.refit_policy_generation(driver.policy, driver.generation)
    assert caught.value.culprit == RankId(Role.ROLLOUT, 0)


def test_an_engine_that_is_wrong_once_is_refitted_with_all_others(ends, caplog) -> None:
    module, driver = _guarded(ends, [_started()], [_started(), _started(wrong=1)], prove_sync_freq=2)
    assert module.refit_policy_generation(driver.policy, driver.generation) == [None, None]
    assert caplog.messages == [f"the refit is redone: rollout rank 1: w: sent {7:016x}, held {8:016x}"]


def test_an_engine_that_is_wrong_twice_ends_the_job_unless_the_refit_is_not_due(ends) -> None:
    module, driver = _guarded(ends, [_started()], [_started(), _started(wrong=2)], prove_sync_freq=0)
    with pytest.raises(WeightSyncError, match="^the refit has put wrong weights .* twice: rollout rank 1: w"):
        module.refit_policy_generation(driver.policy, driver.generation)
    assert module.refit_policy_generation(driver.policy, driver.generation) == [None, None]


def test_an_engine_that_does_not_say_what_it_holds_is_named(ends) -> None:
    module, driver = _guarded(ends, [_started()], [_started(), _started("held")], prove_sync_freq=1)
    error, _ = _late(lambda: module.refit_policy_generation(driver.policy, driver.generation))
    assert (error.phase, error.missing) == ("sync", {RankId(Role.ROLLOUT, 1)})
    assert "the proof of the weight sync" in str(error)


PLAN = {"host": "10.0.0.1", "port": 4000, "secret": "0a" * 32, "specs": [{"name": "w"}]}


def _set_up_joined(ends: ExitStack, *engines: Any) -> tuple[GuardedDriver, list[Any]]:
    """Runs `setup` with trainers and engines that join our joint group."""
    module, trainers = _loops(), [_started(plan=PLAN), _started()]
    driver = GuardedDriver(TIMEOUTS, ends, evidence=EVIDENCE, joins=True)
    driver.guard_setup(module)
    made = module.setup(driver.making(lambda: _Policy(*trainers)), engines)
    assert (driver.policy, driver.generation) == made
    return driver, trainers


def test_all_ranks_join_once_the_engines_know_the_weights(ends) -> None:
    engines = [_started(), _started()]
    _, trainers = _set_up_joined(ends, *engines)
    address = StoreAddress(host="10.0.0.1", port=4000, secret=bytes.fromhex("0a" * 32))
    engine = {"size": 2, "kv_heads": 4, "expert_parallel": False}
    assert [ray.get(trainer.told.remote()) for trainer in trainers] == [(address, [0, 1, 2, 3], engine)] * 2
    info = {**PLAN, "rollout_ranks": [0, 1, 2, 3], "kv_heads": 4}
    assert [ray.get(engine.told.remote()) for engine in engines] == [(0, info), (2, info)]


def test_engines_leave_when_the_trainers_leave(ends, tmp_path) -> None:
    files = [tmp_path / name for name in "ab"]
    engines = [_started(plan={"leaves": str(file)}) for file in files]
    driver, _ = _set_up_joined(ends, *engines)
    driver._end_in_order()
    ray.get([engine.told.remote() for engine in engines])  # after the calls before it
    assert all(file.exists() for file in files)


def test_an_engine_that_does_not_join_our_group_is_named(ends) -> None:
    error, _ = _late(lambda: _set_up_joined(ends, _started(), _started("join")))
    assert (error.phase, error.missing) == ("joint", {RankId(Role.ROLLOUT, 1)})
    assert "rl_safe.timeouts.joint" in str(error)


def test_an_engine_that_cannot_join_is_refused_with_the_reason(ends) -> None:
    with pytest.raises(ConfigError, match="engine 1 cannot take part: its weights are quantised; set it to host"):
        _set_up_joined(ends, _started(), _started("quantised"))


def test_an_engine_that_does_not_wake_up_is_named(ends) -> None:
    _, driver = _guarded(ends, [_started()], [_started("wake_up")])
    error, _ = _late(driver.generation.prepare_for_generation)
    assert (error.phase, error.missing) == ("sync", {RankId(Role.ROLLOUT, 0)})
    assert "the rollout's prepare_for_generation" in str(error)


def test_an_engine_that_does_not_join_is_named(ends) -> None:
    module, driver = _loops(), GuardedDriver(TIMEOUTS, ends, evidence=EVIDENCE)
    driver.guard_setup(module)
    generation = _Generation(_started(), _started("init_collective"))
    made = module.create_weight_synchronizer(policy=_Policy(), generation=generation, kind=_Synchronizer)
    error, _ = _late(made.init_communicator)
    assert (error.phase, error.missing) == ("joint", {RankId(Role.ROLLOUT, 1)})


@pytest.mark.parametrize(
    ("silent", "phase", "is_trainer"),
    [("init_collective", "joint", False), ("prepare_refit_info", "sync", False), ("prepare_refit_info", "sync", True)],
)
def test_a_worker_that_hangs_in_setup_itself_is_named(silent, phase, is_trainer, ends) -> None:
    module, driver = _loops(), GuardedDriver(TIMEOUTS, ends, evidence=EVIDENCE)
    driver.guard_setup(module)
    workers = {one: [_started(), _started(silent if one == is_trainer else "")] for one in (True, False)}
    error, waited_s = _late(lambda: module.setup(driver.making(lambda: _Policy(*workers[True])), workers[False]))
    assert (error.phase, error.missing) == (phase, {RankId(Role.TRAINER if is_trainer else Role.ROLLOUT, 1)})
    assert waited_s < LIMIT_S


def test_a_signal_in_setup_ends_trainers_and_engines_at_once(ends) -> None:
    module, driver = _loops(), GuardedDriver(TIMEOUTS, ends, evidence=EVIDENCE)
    driver.guard_setup(module)

    def set_up() -> None:
        module.setup(driver.making(lambda: _Policy(_started())), [_started()])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), driver.judging():
        set_up()
    assert (driver.policy.worker_group.workers, driver.generation.worker_group.workers) == ([], [])


@pytest.mark.parametrize("name", ROLLOUTS[:2])
def test_generation_may_take_longer_than_the_timeout_if_responses_end(name, ends) -> None:
    module, driver = _guarded(ends, [], [_started()])
    started_s = time.monotonic()
    assert len(getattr(module, name)(driver.generation, 8)) == 8
    assert time.monotonic() - started_s > 1.5 * TIMEOUTS.rollout


def test_generation_without_any_response_ends_at_the_timeout_and_names_the_engine(ends) -> None:
    module, driver = _guarded(ends, [_started()], [_started("generate")])
    error, waited_s = _late(lambda: module.run_multi_turn_rollout(driver.generation, 1))
    assert (error.phase, error.missing) == ("rollout", {RankId(Role.ROLLOUT, 0)})
    assert str(error).endswith("to wait longer raise rl_safe.timeouts.rollout")
    assert waited_s < TIMEOUTS.rollout + LIMIT_S


def test_polls_end_once_no_response_has_ended_for_the_timeout(ends) -> None:
    module, _ = _guarded(ends, [_started()], [_started()])
    error, waited_s = _late(lambda: module.wait_for_batch(_started(), [0, 1], ready=4))
    assert error.phase == "rollout"
    assert "no prompt's responses have ended for that long; every process that was asked answers" in str(error)
    assert TIMEOUTS.rollout <= error.waited_s < waited_s < TIMEOUTS.rollout + LIMIT_S


def test_polls_end_when_an_engine_has_died(ends, monkeypatch) -> None:
    monkeypatch.setattr(driver_waits, "_LOOK_S", 0.2)
    engine = _started()
    module, _ = _guarded(ends, [_started()], [engine])
    ray.kill(engine)
    # The collector's answers change all the time.
    with pytest.raises(RunError, match="^generation: rollout engine 0 has died$") as caught:
        module.wait_for_batch(_started(), list(range(100)), ready=1000)
    assert caught.value.culprit == RankId(Role.ROLLOUT, 0)


def test_an_error_of_the_polls_counts_if_nemo_rl_prints_it(ends) -> None:
    """NeMo RL v0.7.0 and older print each error of the asynchronous loop, and return."""
    module, driver = _guarded(ends, [_started()], [_started()])
    with pytest.raises(JobError, match="hang: phase rollout, generation"), driver.ending(), suppress(PhaseTimeoutError):
        module.wait_for_batch(_started(), [0, 1], ready=4)


def test_polls_go_on_as_long_as_responses_end(ends) -> None:
    module, _ = _guarded(ends, [], [])
    started_s = time.monotonic()
    assert module.wait_for_batch(_started(), [0, 0, 1, 1, 2, 2, 3, 3, 4], ready=4) == 4
    assert time.monotonic() - started_s > 1.5 * TIMEOUTS.rollout


def test_the_wait_for_responses_before_a_refit_is_of_generation(ends) -> None:
    module, driver = _guarded(ends, [_started()], [_started()])
    buffer = _started("prepare_for_refit")
    error, _ = _late(lambda: module.step(driver.policy, driver.generation, buffer))
    assert error.phase == "rollout"
    assert len(module.step(driver.policy, driver.generation, _started())) == 1


def test_what_was_replaced_is_put_back() -> None:
    with ExitStack() as stack:
        module, _ = _guarded(stack, [], [])
        names = [name for name in (REFIT, *ROLLOUTS, "ray", "time") if hasattr(module, name)]
        before = {name: vars(_loops())[name] for name in ("ray", "time")}
        assert all(getattr(module, name) is not before.get(name) for name in names)
        assert all(hasattr(vars(_Generation)[name], "__wrapped__") for name in ("prepare_for_generation", "generate"))
    assert module.ray is ray
    assert module.time is time
    assert not any(hasattr(value, "__wrapped__") for value in vars(_Generation).values())
    assert not hasattr(module.refit_policy_generation, "__wrapped__")
    assert "prepare_for_generation" in ENGINE_CALLS


def test_after_a_failure_nobody_is_waited_for_that_waits_himself(ends, caplog) -> None:
    busy = _started("train")
    _, driver = _guarded(ends, [busy, _started()], [_started()])
    driver.policy.worker_group.ask("train")
    started_s = time.monotonic()
    try:
        raise RunError("the job is over")
    except RunError:
        driver.end()
    assert time.monotonic() - started_s < guarded_driver.AFTER_FAILURE_S + LIMIT_S
    assert (driver.policy.worker_group.workers, driver.generation.worker_group.workers) == ([], [])
    assert "the job has failed: the job is over" in caplog.text


def test_a_failure_that_names_nobody_is_told_with_who_has_died(ends, caplog) -> None:
    dead = _started()
    os.kill(ray.get(dead.pid.remote()), signal.SIGKILL)
    _, driver = _guarded(ends, [_started(), dead], [_started()])
    try:
        ray.get(driver.policy.worker_group.ask("train"))
    except ray.exceptions.RayActorError:
        driver.end()
    assert re.search(r"the job has failed: training rank 1 on \S+ died\n", caplog.text)


def test_a_dedicated_policy_that_generates_ends_at_once_too(ends) -> None:
    _, driver = _guarded(ends, [_started()], [])
    driver.generation._policy = _Policy(_started("generate"))
    driver.generation._policy.worker_group.ask("generate")
    started_s = time.monotonic()
    with pytest.raises(ValueError, match="wrong"), driver.judging():
        raise ValueError("wrong")
    assert time.monotonic() - started_s < LIMIT_S
    assert driver.generation._policy.worker_group.workers == []


def test_a_first_refit_whose_error_is_swallowed_fails_the_job(ends) -> None:
    module, driver = _guarded(ends, [_started()], [_started("update_weights")])

    def run() -> None:
        with suppress(PhaseTimeoutError):  # as asynchronous GRPO does
            module.refit_policy_generation(driver.policy, driver.generation)
        driver.generation.shutdown()

    with pytest.raises(JobError, match="the refit: training rank 0 arrived, rollout rank 0 did not"), driver.ending():
        run()
    assert (driver.policy.worker_group.workers, driver.generation.worker_group.workers) == ([], [])


def test_a_swallowed_error_counts_unless_a_later_wait_succeeds(ends) -> None:
    _, driver = _guarded(ends, [], [])
    with driver.ending():
        with suppress(RunError):
            driver.policy.finalize_async_save(fails=True)
        driver.policy.finalize_async_save()
    with pytest.raises(RunError, match="the disk is full"), driver.ending(), suppress(RunError):
        driver.policy.finalize_async_save(fails=True)


def test_a_later_wait_does_not_hide_another_threads_error(ends) -> None:
    _, driver = _guarded(ends, [], [])

    def save() -> None:
        with suppress(RunError):  # NeMo RL keeps it for the end, where asynchronous GRPO only prints it
            driver.policy.finalize_async_save(fails=True)

    def run() -> None:
        saving = threading.Thread(target=save)
        saving.start()
        saving.join()
        driver.policy.finalize_async_save()

    with pytest.raises(RunError, match="the disk is full"), driver.ending():
        run()


def test_a_trainer_that_hangs_when_nemo_rl_ends_it_fails_the_job(ends, monkeypatch) -> None:
    monkeypatch.setattr(guarded_driver, "ABORT_S", 0.0)
    _, driver = _guarded(ends, [_started(), _started("end")], [_started()])
    with pytest.raises(JobError, match="teardown, training world: 0 arrived, 1 did not"), driver.ending():
        driver.generation.shutdown()  # the script's last call: NeMo RL swallows its error
    assert (driver.policy.worker_group.workers, driver.generation.worker_group.workers) == ([], [])


@ray.remote(num_cpus=0)
class _TrtllmWorker:
    def is_alive(self) -> bool:
        return False

    async def report_device_id_async(self) -> str:
        return "the engine's"


@ray.remote(num_cpus=0)
class _Stranger:
    """A worker that has no question of ours."""


def test_each_backend_of_generation_is_asked_what_its_worker_knows() -> None:
    generation = _Generation(_TrtllmWorker.remote(), _started(), _Stranger.remote())
    generation.cfg = {"backend": "trtllm", "vllm_cfg": {"async_engine": False}}  # as NeMo RL's recipe inherits it
    answers = [ray.get(party.ask()) for party in parties_of(None, generation)]
    assert answers == ["the engine's", True, True]


def test_a_verdict_that_cannot_be_given_leaves_the_error(caplog) -> None:
    def parties() -> list[Any]:
        raise AttributeError("no such method")

    error = RunError("the job is over")
    assert JobVerdict(parties, EVIDENCE).on(error, None) is error
    assert "there is no verdict on the failure" in caplog.text


def test_a_worker_that_is_lost_in_setup_is_named(ends) -> None:
    dead = _started()
    pid = ray.get(dead.pid.remote())
    driver = GuardedDriver(TIMEOUTS, ends, evidence=EVIDENCE)

    def set_up() -> None:
        policy = driver.making(_Policy)(_started(), dead)
        os.kill(pid, signal.SIGKILL)
        ray.get(policy.worker_group.ask("import"))

    with pytest.raises(JobError, match=r"^training rank 1 on \S+ died"), driver.judging():
        set_up()
    assert driver.policy.worker_group.workers == []


def test_a_standstill_begins_anew_with_each_change(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(driver_waits.time, "monotonic", lambda: now[0])
    standstill, found = Standstill(), []
    for at, seen in [(1, "a"), (3, "a"), (4, "b"), (9, "b"), (10, "a")]:
        now[0] = float(at)
        found.append(standstill.seconds(seen))
    assert found == [0, 2, 0, 5, 0]
