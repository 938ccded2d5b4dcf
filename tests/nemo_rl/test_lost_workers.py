"""A trainer or an engine that is killed or stops, under NeMo RL's own worker groups, policy, generation and refit."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import ray

from rl_safe_workers.adapters.nemo_rl.guarded_driver import GuardedDriver
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NemoRlTimeouts
from rl_safe_workers.errors import RlSafeError
from tests.distributed import reference
from tests.nemo_rl.source import host_code, needs_source
from tests.nemo_rl.test_ray_worker_group import ENGINE, cluster, config_of, group_of, tiny_moe

__all__ = ["cluster", "tiny_moe"]

pytestmark = [needs_source, pytest.mark.filterwarnings("ignore")]

TIMEOUT_S = 6.0
PHASES = ("train", "save", "sync", "rollout")
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

    def train(self) -> None:
        data = reference.random_batch(rows=4)
        ray.get(self.policy.worker_group.run_all_workers_single_data("train", data=data))

    def save(self, folder: Path) -> None:
        self.policy.save_checkpoint(weights_path=str(folder / "step_1" / "weights"))

    def refit(self) -> None:
        self.module.refit_policy_generation(self.policy, self.generation, colocated_inference=False)

    def generate(self) -> list[Any]:
        return self.module.run_multi_turn_rollout(self.generation)  # type: ignore[no-any-return]


@contextmanager
def job(clusters: tuple[Any, Any], model: Path, folder: Path, **misdeeds: Any) -> Iterator[Job]:
    engine = {"engine": str(folder / "s"), "misdeeds": misdeeds.pop("engine", {})}
    config = config_of(model, folder, engine=engine["engine"], **misdeeds)
    policy = _host("Policy", ("broadcast_weights_for_collective", "save_checkpoint", "shutdown"))
    generation = _host("VllmGeneration", ("update_weights_from_collective", "prepare_for_generation", "shutdown"))
    policy.cfg, policy.worker_group = (
        {},
        group_of(clusters[0], config, timeouts=dict.fromkeys(PHASES[:3], TIMEOUT_S) | {"teardown": 4.0}),
    )
    generation.cfg = {"vllm_cfg": {"async_engine": False}, "colocated": {"enabled": False}}
    generation.weight_synchronizer, generation.worker_group = None, group_of(clusters[1], engine, worker=ENGINE, size=1)
    with ExitStack() as ends:
        module = _refit()
        driver = GuardedDriver(NemoRlTimeouts(**dict.fromkeys(PHASES, TIMEOUT_S)), ends)
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


CASES = {
    "trainer_killed_in_a_step": ("train", {"in_train": {1: "dies"}}, "training rank 1 has died"),
    "trainer_stopped_in_a_step": (
        "train",
        {"in_train": {1: "stops"}},
        "the job has failed: the job: training rank 1 does not answer; .*Timed out",
    ),
    "trainer_killed_in_a_save": ("save", {"in_save": {1: "dies"}}, "training rank 1 has died"),
    "trainer_stopped_in_a_save": ("save", {"in_save": {1: "stops"}}, "phase save: rank 1 of training world did not"),
    "trainer_killed_in_a_refit": ("refit", {"refit": {1: "dies"}}, "training rank 1 has died"),
    "trainer_stopped_in_a_refit": ("refit", {"refit": {1: "stops"}}, "phase sync: rank 1 of training world did not"),
    "engine_killed_in_a_refit": ("refit", {"engine": {"refit": "dies"}}, "rollout engine 0 has died"),
    "engine_stopped_in_a_refit": (
        "refit",
        {"engine": {"refit": "stops"}},
        "rollout engine 0 does not answer; .*phase sync: the rollout, awaited by training rank 0,",
    ),
    "engine_killed_in_generation": ("generate", {"engine": {"generation": "dies"}}, "rollout engine 0 has died"),
    "engine_stopped_in_generation": (
        "generate",
        {"engine": {"generation": "stops"}},
        "phase rollout: rollout rank 0 of generation did not arrive .*rollout engine 0 does not answer",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_job_with_a_lost_worker_ends_in_time_and_names_it(
    case, cluster, engines_cluster, tiny_moe, tmp_path, caplog
) -> None:
    call, misdeeds, named = CASES[case]
    with job((cluster, engines_cluster), tiny_moe, tmp_path, **misdeeds) as made:
        started_s, failure = time.monotonic(), None
        try:
            getattr(made, call)(*([tmp_path] if call == "save" else []))
        except (RlSafeError, ray.exceptions.RayError) as error:
            failure, failed_s = error, time.monotonic() - started_s
            made.driver.end()
        assert failure is not None
        ended_s = time.monotonic() - started_s
        assert (made.policy.worker_group.workers, made.generation.worker_group.workers) == ([], [])
    told = f"{failure}\n{caplog.text}"
    sys.stderr.write(
        f"{case}: error after {failed_s:.1f} s, all ended after {ended_s:.1f} s: {str(failure).splitlines()[-1]}\n"
    )
    assert re.search(named, told, re.DOTALL), told
    assert ended_s < ALLOWED_S
