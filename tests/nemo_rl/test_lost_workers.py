"""A trainer or an engine that is killed or stops, under NeMo RL's own worker groups, policy, generation and refit."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest
import ray

from rl_safe_workers.adapters.nemo_rl.guarded_driver import GuardedDriver
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NemoRlTimeouts
from rl_safe_workers.errors import Died, JobError, Raised, RunError, Stopped, Victim
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role, trainer_id
from tests.distributed import reference
from tests.nemo_rl.source import host_code, needs_source
from tests.nemo_rl.test_ray_worker_group import ENGINE, cluster, config_of, group_of, tiny_moe

__all__ = ["cluster", "tiny_moe"]

pytestmark = [needs_source, pytest.mark.filterwarnings("ignore")]

TIMEOUT_S = 6.0
PHASES = ("train", "save", "sync", "rollout")
SHORT = dict.fromkeys((*PHASES, "logprob"), TIMEOUT_S) | {"teardown": 4.0}
ALLOWED_S = TIMEOUT_S + 10.0


def _host(kind: str, methods: Sequence[str]) -> Any:
    """An object of one of NeMo RL's classes, with some of its methods, and not constructed."""
    file = {"Policy": "policy/lm_policy.py", "VllmGeneration": "generation/vllm/vllm_generation.py"}[kind]
    made = host_code(f"nemo_rl/models/{file}", kind, methods=methods, names={"ray": ray})[kind]
    return made.__new__(made)


def _refit() -> ModuleType:
    """NeMo RL's own refit, in a module with what the guarded driver looks for."""
    module: Any = ModuleType("nemo_rl.algorithms.grpo")
    names = {"ray": ray, "time": time, "os": os, "nullcontext": nullcontext, "SGLangGeneration": type(None)}
    names |= {"MegatronGeneration": type(None), "run_multi_turn_rollout": _generate, "__name__": module.__name__}
    found = host_code("nemo_rl/algorithms/grpo.py", "refit_policy_generation", names=names)
    module.__dict__.update(found)
    # It looks names up where they are replaced.
    module.refit_policy_generation = FunctionType(found["refit_policy_generation"].__code__, vars(module))
    module.refit_policy_generation.__defaults__ = found["refit_policy_generation"].__defaults__
    return module


def _generate(generation: Any) -> list[Any]:
    """The wait in NeMo RL's ``VllmGeneration.generate``."""
    futures = generation.worker_group.run_all_workers_single_data("generate")
    return ray.get(futures)  # type: ignore[no-any-return]


def _train(policy: Any, data: Any) -> list[Any]:
    """The wait in NeMo RL's ``Policy.train``. One rank may be told to do something else."""
    astray = policy.cfg.get("in_other_phase")
    calls = [
        (worker.get_logprobs if rank == astray else worker.train).remote(data=data)
        for rank, worker in enumerate(policy.worker_group.workers)
    ]
    return ray.get(calls)  # type: ignore[no-any-return]


@pytest.fixture
def engines_cluster(cluster: Any) -> Iterator[Any]:
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster

    made = RayVirtualCluster([1], use_gpus=False, num_gpus_per_node=1, name="engines")
    yield made
    made.shutdown()


class Job:
    """The driver's side of a job, with NeMo RL's own classes where they import."""

    def __init__(self, policy: Any, generation: Any, module: Any, driver: GuardedDriver) -> None:
        self.policy, self.generation, self.module, self.driver = policy, generation, module, driver
        self.failed_s = 0.0

    def run(self, call: str, *arguments: Any) -> None:
        """Makes one call as a script would, and ends the job."""
        started_s = time.monotonic()
        with self.driver.ending():
            try:
                getattr(self, call)(*arguments)
            finally:
                self.failed_s = time.monotonic() - started_s

    def train(self) -> None:
        self.policy.train(reference.random_batch(rows=4))

    def logprob(self) -> None:
        ray.get(
            self.policy.worker_group.run_all_workers_single_data("get_logprobs", data=reference.random_batch(rows=4))
        )

    def save(self, folder: Path) -> None:
        self.policy.save_checkpoint(weights_path=str(folder / "step_1" / "weights"))

    def refit(self) -> None:
        self.module.refit_policy_generation(self.policy, self.generation, colocated_inference=False)

    def generate(self) -> list[Any]:
        return self.module.run_multi_turn_rollout(self.generation)  # type: ignore[no-any-return]


@contextmanager
def job(
    clusters: tuple[Any, Any],
    model: Path,
    folder: Path,
    *,
    timeouts: Mapping[str, float] = SHORT,
    **misdeeds: Any,
) -> Iterator[Job]:
    engine = {"engine": str(folder / "s"), "misdeeds": misdeeds.pop("engine", {})}
    config = config_of(model, folder, engine=engine["engine"], **misdeeds)
    policy = _host("Policy", ("broadcast_weights_for_collective", "save_checkpoint", "shutdown"))
    type(policy).train = _train
    generation = _host("VllmGeneration", ("update_weights_from_collective", "prepare_for_generation", "shutdown"))
    policy.cfg, policy.worker_group = (
        {"in_other_phase": misdeeds.get("in_other_phase")},
        group_of(clusters[0], config, timeouts={name: s for name, s in timeouts.items() if name != "rollout"}),
    )
    generation.cfg = {"vllm_cfg": {"async_engine": False}, "colocated": {"enabled": False}}
    generation.weight_synchronizer, generation.worker_group = None, group_of(clusters[1], engine, worker=ENGINE, size=1)
    with ExitStack() as ends:
        module = _refit()
        driver = GuardedDriver(
            NemoRlTimeouts(**{name: timeouts[name] for name in PHASES}), ends, evidence=folder / "failure"
        )
        driver.guard_setup(module)
        driver.policy, driver.generation = policy, generation
        driver.guard_loops(module)
        ray.get(generation.worker_group.run_all_workers_single_data("report_device_id"))  # they have started
        yield Job(policy, generation, module, driver)


def test_a_job_refits_saves_and_ends(cluster, engines_cluster, tiny_moe, tmp_path) -> None:
    with job((cluster, engines_cluster), tiny_moe, tmp_path) as made:
        assert made.generate() == ["a response"]
        made.train()
        made.refit()
        made.save(tmp_path)
        assert (tmp_path / "step_1" / "weights" / "iter_0000000" / ".metadata").is_file()
        made.driver.end()
        assert (made.policy.worker_group.workers, made.generation.worker_group.workers) == ([], [])


class Case(NamedTuple):
    call: str
    misdeeds: dict[str, Any]
    culprit: RankId
    phase: Phase
    cause: type | None
    """None where the rank only does not come."""
    told: str
    """In the first line."""


ENGINE_0 = RankId(Role.ROLLOUT, 0)
CASES = {
    "trainer_killed_in_a_step": Case(
        *("train", {"in_train": {1: "dies"}}, trainer_id(1), Phase.TRAIN, Died),
        r"training rank 1 on [0-9.]+ died in phase train",
    ),
    "trainer_stopped_in_a_step": Case(
        *("train", {"in_train": {1: "stops"}}, trainer_id(1), Phase.TRAIN, Stopped),
        r"training rank 1 on [0-9.]+ is stopped in phase train at \S+/sending.py:\d+ \(misbehave\); "
        r"training rank 0 was in \w+ of \w+$",
    ),
    "trainer_that_raises_in_a_step": Case(
        *("train", {"in_train": {1: "raises"}}, trainer_id(1), Phase.TRAIN, Raised),
        r"training rank 1 on [0-9.]+ failed in phase train at \S+/sending.py:\d+ \(misbehave\): ValueError: no such",
    ),
    "trainer_asleep_in_a_step": Case(
        *("train", {"in_train": {1: "silent"}}, trainer_id(1), Phase.TRAIN, Victim),
        r"hang: phase train, the trainers, \w+ of \w+: training rank 0 gave up waiting; "
        r"training rank 1 on [0-9.]+ is at \S+/sending.py:\d+ \(misbehave\)",
    ),
    "trainer_in_another_phase": Case(
        *("train", {"in_other_phase": 1}, trainer_id(1), Phase.TRAIN, None),
        r"hang: phase train, training world: 0 arrived, 1 did not within \S+ s; training rank 1 on [0-9.]+ .*"
        r"; training rank 1 waited in phase logprob$",
    ),
    "trainer_killed_in_a_save": Case(
        *("save", {"in_save": {1: "dies"}}, trainer_id(1), Phase.SAVE, Died),
        r"training rank 1 on [0-9.]+ died in phase save",
    ),
    "trainer_stopped_in_a_save": Case(
        *("save", {"in_save": {1: "stops"}}, trainer_id(1), Phase.SAVE, Stopped),
        r"training rank 1 on [0-9.]+ is stopped in phase save at ",
    ),
    "trainer_killed_in_a_refit": Case(
        *("refit", {"refit": {1: "dies"}}, trainer_id(1), Phase.SYNC, Died),
        r"training rank 1 on [0-9.]+ died in phase sync",
    ),
    "trainer_stopped_in_a_refit": Case(
        *("refit", {"refit": {1: "stops"}}, trainer_id(1), Phase.SYNC, Stopped),
        r"training rank 1 on [0-9.]+ is stopped in phase sync",
    ),
    "engine_killed_in_a_refit": Case(
        *("refit", {"engine": {"refit": "dies"}}, ENGINE_0, Phase.SYNC, Died),
        r"rollout rank 0 on [0-9.]+ died in phase sync",
    ),
    "engine_stopped_in_a_refit": Case(
        *("refit", {"engine": {"refit": "stops"}}, ENGINE_0, Phase.SYNC, Stopped),
        r"rollout rank 0 on [0-9.]+ is stopped in phase sync",
    ),
    "engine_silent_in_a_refit": Case(
        *("refit", {"engine": {"refit": "silent"}}, ENGINE_0, Phase.SYNC, None),
        r"phase sync: rollout rank 0 on [0-9.]+ is at \S+/sending.py:\d+ \(misbehave\); .*rollout engine 0 does not",
    ),
    "engine_killed_in_generation": Case(
        *("generate", {"engine": {"generation": "dies"}}, ENGINE_0, Phase.ROLLOUT, Died),
        r"rollout rank 0 on [0-9.]+ died in phase rollout",
    ),
    "engine_stopped_in_generation": Case(
        *("generate", {"engine": {"generation": "stops"}}, ENGINE_0, Phase.ROLLOUT, Stopped),
        r"rollout rank 0 on [0-9.]+ is stopped in phase rollout",
    ),
    "engine_that_raises_in_generation": Case(
        *("generate", {"engine": {"generation": "raises"}}, ENGINE_0, Phase.ROLLOUT, Raised),
        r"rollout rank 0 on [0-9.]+ failed in phase rollout at \S+/sending.py:\d+ \(misbehave\): ValueError: no such",
    ),
    "engine_silent_in_generation": Case(
        *("generate", {"engine": {"generation": "silent"}}, ENGINE_0, Phase.ROLLOUT, None),
        r"hang: phase rollout, generation: .* did not within \S+ s; rollout rank 0 on [0-9.]+ is at \S+/sending.py:",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_job_with_a_lost_worker_ends_in_time_and_its_first_line_says_why(
    name, cluster, engines_cluster, tiny_moe, tmp_path
) -> None:
    case = CASES[name]
    with job((cluster, engines_cluster), tiny_moe, tmp_path, **case.misdeeds) as made:
        started_s = time.monotonic()
        with pytest.raises(JobError) as caught:
            made.run(case.call, *([tmp_path] if case.call == "save" else []))
        ended_s = time.monotonic() - started_s
        assert (made.policy.worker_group.workers, made.generation.worker_group.workers) == ([], [])
    error = caught.value
    sys.stderr.write(f"{name}: failed after {made.failed_s:.1f} s, all ended after {ended_s:.1f} s: {error}\n")
    first, advice, folder = str(error).splitlines()
    assert re.match(case.told, first), first
    assert (error.culprits, error.phase) == ({case.culprit}, case.phase)
    assert type(error.cause) is (case.cause or type(None))
    assert isinstance(error.__cause__, RunError | ray.exceptions.RayError)
    assert advice
    assert folder == f"evidence in {tmp_path / 'failure'}"
    assert {"verdict.json", "stack_trainer_0.txt"} <= {path.name for path in (tmp_path / "failure").iterdir()}
    assert ended_s < ALLOWED_S
