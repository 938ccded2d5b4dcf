"""NeMo RL's refits over our joint group out of Megatron-Bridge's own conversion tasks, to a rank that only receives."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.ports import port_to_listen_on
from rl_safe_workers.rollout.protocol import WeightSpec, plan_buckets
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.joint_group import JointGroup, joint_control
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.nemo_rl.host import HostImpl, SafePolicyMixin, annotations, set_environment
from tests.nemo_rl.test_life import config_of
from tests.unpacking import unpack

TRAINERS, WAIT, STEPS = 4, timedelta(seconds=60), 2
ENGINE = {"size": 1, "kv_heads": 1, "expert_parallel": False}
Weights = dict[str, torch.Tensor]


class _Worker(SafePolicyMixin, HostImpl):
    """The small host, with the refit of NeMo RL's worker over a Megatron-Bridge (megatron_policy_worker.py:2136)."""

    host_module = HostImpl.__module__
    refit_conversion_tasks: Any = None

    @property
    def megatron_bridge(self) -> Any:
        return self.policy.bridge._auto_bridge

    def prepare_refit_info(self) -> Any:
        tasks = self.megatron_bridge.get_conversion_tasks([unwrap_model(self.model)])
        self.refit_conversion_tasks = [task for task in tasks if task is not None]
        return super().prepare_refit_info()

    def _iter_params_with_optional_kv_scales(self, kv_scales: Any = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.megatron_bridge.export_hf_weights(
            [self.model], show_progress=False, conversion_tasks=self.refit_conversion_tasks
        )


def _take_part(rank: int, port: int, config: dict[str, Any], told: Path) -> list[Weights]:
    """Returns the weights after each step: of a trainer what its model exports, of the last rank what it received."""
    if rank == TRAINERS:
        return _receive(told)
    set_environment(rank, TRAINERS, port)
    worker = _Worker(config, worker_sharding_annotations=annotations(TRAINERS))
    worker.prepare_refit_info()
    plan = worker.rl_safe_plan_refits()
    if plan is not None:
        part = told.with_suffix(".part")
        part.write_text(json.dumps(plan))
        part.rename(told)
    worker.rl_safe_join(_address(_plan(told)), [0], ENGINE)
    found = []
    for _ in range(STEPS):
        worker.train(reference.random_batch(rows=4))
        worker.broadcast_weights_for_collective()
        found.append({name: weight.clone() for name, weight in worker._iter_params_with_optional_kv_scales()})
    assert worker.shutdown()
    return found


def _plan(told: Path) -> dict[str, Any]:
    while not told.exists():
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(told.read_text())
    return found


def _address(plan: Mapping[str, Any]) -> StoreAddress:
    return StoreAddress(host=plan["host"], port=plan["port"], secret=bytes.fromhex(plan["secret"]))


def _receive(told: Path) -> list[Weights]:
    plan = _plan(told)
    specs = [WeightSpec(**{**fields, "shape": tuple(fields["shape"])}) for fields in plan["specs"]]
    control = joint_control(
        _address(plan), generation=0, joint_rank=TRAINERS, trainers=TRAINERS, rollout_ranks=[0], timeout=WAIT
    )
    group = JointGroup(control, generation=0, timeout=WAIT, device=torch.device("cpu"))
    found: list[Weights] = []
    for _ in range(STEPS):
        weights: Weights = {}
        for bucket in plan_buckets(specs, bucket_bytes=plan["bucket_bytes"]):
            buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8)
            group.broadcast(buffer, source=bucket.source)()
            weights |= {name: weight.clone() for name, weight in unpack(bucket, buffer)}
        found.append(weights)
    group.close()
    return found


@pytest.mark.parametrize(("stages", "sources"), [(1, {0, 1}), (2, {0, 1, 2, 3})])
def test_the_rollout_gets_what_an_export_yields(stages: int, sources: set[int], tmp_path: Path) -> None:
    create_seeded_model(tmp_path / "model", SeededModelConfig())
    config = config_of(tmp_path / "model", tmp_path, bridge="megatron_bridge")
    config["megatron_cfg"]["pipeline_model_parallel_size"] = stages
    port, told = port_to_listen_on("127.0.0.1"), tmp_path / "plan.json"
    *exported, received = values(run_ranks(_take_part, TRAINERS + 1, port, config, told))
    assert {spec["source"] for spec in json.loads(told.read_text())["specs"]} == sources
    for of_trainer in exported:
        for sent, came in zip(of_trainer, received, strict=True):
            assert sent.keys() == came.keys()
            assert [name for name in sent if not torch.equal(sent[name], came[name])] == []
    first, second = received
    assert any(not torch.equal(first[name], second[name]) for name in first)
