"""verl's real RayWorkerGroup over our workers: every call, an actor and a critic in the same processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf, open_dict

from tests.verl.host import LENGTH, SEQUENCES, loss
from tests.verl.test_hydra import composed

SIZE = 2
ROOT = Path(__file__).parents[2]
JOB = {
    "VERL_PLATFORM": "rl_safe_cpu",
    "VERL_ENGINE_VENDOR": "rl_safe",
    "VERL_USE_EXTERNAL_MODULES": "rl_safe_workers.adapters.verl.plugin",
    "RL_SAFE_VERL": '{"timeouts": {"teardown": 30}, "nccl_timeout": 77}',
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(ROOT),
}


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2 * SIZE, include_dashboard=False, runtime_env={"env_vars": JOB}, log_to_driver=False)
    yield
    ray.shutdown()


def _config(model: Path) -> Any:
    config = composed(
        "model_engine=megatron",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.actor.megatron.vanilla_mbridge=true",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.param_offload=false",
        "actor_rollout_ref.actor.megatron.optimizer_offload=false",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.optim.total_training_steps=10",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
    )
    node = config.actor_rollout_ref
    with open_dict(node):
        OmegaConf.resolve(node)
    return node


def _rows() -> Any:
    import torch
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(100, (LENGTH - i % 3,), generator=generator) for i in range(SIZE * SEQUENCES)]
    nested = partial(torch.nested.nested_tensor, layout=torch.jagged)
    tensors = {
        "input_ids": nested(rows),
        "position_ids": nested([torch.arange(len(row)) for row in rows]),
        "loss_mask": nested([torch.ones_like(row) for row in rows]),
    }
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict={
        "temperature": 1.0, "mini_batch_size": SIZE * SEQUENCES, "epochs": 1, "seed": 1,
    })  # fmt: skip


def _critic_config(model: Path) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig

    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=HFModelConfig(path=str(model), use_remove_padding=False),
        engine_config=McoreEngineConfig(
            vanilla_mbridge=True, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, infer_micro_batch_size_per_gpu=2,
            expert_model_parallel_size=2,
            # As verl's configuration of an actor: Megatron lets a process have one.
            override_transformer_config={"attention_backend": "flash"},
        ),
        optimizer_config=McoreOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip


def _towards_nothing(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, float]]:
    values = model_output["values"].values()
    value = values.float().square().mean()
    return value, {"values": value.detach().item()}


@pytest.mark.timeout(420)
@pytest.mark.usefixtures("_cluster")
def test_an_actors_and_a_critics_group_answer_every_call(tiny_moe, tmp_path) -> None:
    from verl.single_controller.ray.base import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )  # fmt: skip
    from verl.utils import tensordict_utils as tu

    from rl_safe_workers.adapters.verl.workers import SafeActorRolloutRefWorker, SafeTrainingWorker

    actor = RayClassWithInitArgs(
        cls=ray.remote(SafeActorRolloutRefWorker), config=_config(tiny_moe), role="actor", distillation_config=None
    )
    critic = RayClassWithInitArgs(cls=ray.remote(SafeTrainingWorker), config=_critic_config(tiny_moe))
    workers = RayWorkerGroup(
        resource_pool=RayResourcePool(process_on_nodes=[SIZE], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=create_colocated_worker_cls({"actor": actor, "critic": critic}),
        device_name="cpu",
    )
    groups = workers.spawn(prefix_set=["actor", "critic"])
    group, values = groups["actor"], groups["critic"]
    # The critic first, as verl's trainers do.
    values.reset()
    values.set_loss_fn(_towards_nothing)
    group.init_model()
    group.set_loss_fn(loss)

    metrics = group.rl_safe_metrics()
    assert [found["rl_safe/active"] for found in metrics] == [1.0] * SIZE
    assert all(found["rl_safe/bootstrap_groups"] > 0 for found in metrics)

    before = group.compute_log_prob(_rows())
    assert set(before.keys()) >= {"log_probs"}
    trained = tu.get(group.update_actor(_rows()), "metrics")
    assert trained["grad_norm"]

    path = tmp_path / "global_step_1" / "actor"
    group.save_checkpoint(str(path), None, 1)
    assert (path / "ckpt_contents.json").is_file()
    group.load_checkpoint(str(path))
    assert all(found["timing_s/rl_safe_save"] > 0 for found in group.rl_safe_metrics())
    group.to("cpu")

    losses = [tu.get(values.train_mini_batch(_rows()).get(), "metrics")["values"] for _ in range(4)]
    assert sum(losses[-1]) < sum(losses[0]), losses
    of_critic = tmp_path / "global_step_1" / "critic"
    values.save_checkpoint(str(of_critic), None, 1)
    values.load_checkpoint(str(of_critic))
    assert (of_critic / "ckpt_contents.json").is_file()

    assert ray.get(group.teardown_groups(), timeout=60) == [{}] * SIZE
    assert ray.get(values.teardown_groups(), timeout=60) == [{}] * SIZE, "the actor's groups are the critic's"
    assert ray.get(group.teardown_groups(), timeout=60) == [{}] * SIZE, "a second end does nothing"
