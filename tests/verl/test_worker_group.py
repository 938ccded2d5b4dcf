"""verl's real RayWorkerGroup over our workers: every call, with all roles in the same processes."""

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
    "RL_SAFE_VERL": '{"timeouts": {"teardown": 30}, "nccl_timeout": 77, "release_comms": true}',
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(ROOT),
}


SYNC = ["resume weights", "update_weights", "resume kv_cache"]
"""Calls that a rollout gets in verl's weight sync."""


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", num_cpus=2 * SIZE, include_dashboard=False, runtime_env={"env_vars": JOB}, log_to_driver=False)
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
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.ref.megatron.param_offload=false",
        "actor_rollout_ref.actor.optim.total_training_steps=10",
        "actor_rollout_ref.rollout.name=vllm",
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
    return tu.get_tensordict(
        tensor_dict=tensors,
        non_tensor_dict={
            "temperature": 1.0,
            "mini_batch_size": SIZE * SEQUENCES,
            "epochs": 1,
            "seed": 1,
        },
    )


def _critic_config(model: Path) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig

    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=HFModelConfig(path=str(model), use_remove_padding=False),
        engine_config=McoreEngineConfig(
            vanilla_mbridge=True,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            infer_micro_batch_size_per_gpu=2,
            expert_model_parallel_size=2,
            # As verl's configuration of an actor: Megatron lets a process have one.
            override_transformer_config={"attention_backend": "flash"},
        ),
        optimizer_config=McoreOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )


def _equal(one: Any, other: Any) -> bool:
    return bool((one.values() == other.values()).all())


def _one(answers: list[Any]) -> Any:
    """Returns the answer that every rank has given alike."""
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def _towards_nothing(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, float]]:
    values = model_output["values"].values()
    value = values.float().square().mean()
    return value, {"values": value.detach().item()}


def _spawn(classes: dict[str, Any]) -> dict[str, Any]:
    from verl.single_controller.ray.base import RayResourcePool, RayWorkerGroup, create_colocated_worker_cls

    workers = RayWorkerGroup(
        resource_pool=RayResourcePool(process_on_nodes=[SIZE], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=create_colocated_worker_cls(classes),
        device_name="cpu",
    )
    groups: dict[str, Any] = workers.spawn(prefix_set=list(classes))
    return groups


def _role(cls: type, model: Path, role: str) -> Any:
    from verl.single_controller.ray.base import RayClassWithInitArgs

    return RayClassWithInitArgs(cls=ray.remote(cls), config=_config(model), role=role, distillation_config=None)


@pytest.mark.timeout(420)
@pytest.mark.usefixtures("_cluster")
def test_an_actors_references_and_a_critics_group_answer_every_call(tiny_moe, tmp_path) -> None:
    from verl.single_controller.ray.base import RayClassWithInitArgs
    from verl.utils import tensordict_utils as tu

    from rl_safe_workers.adapters.verl.workers import SafeTrainingWorker
    from tests.verl.fake_rollout import Hybrid

    groups = _spawn(
        {
            "actor": _role(Hybrid, tiny_moe, "actor_rollout_ref"),
            "critic": RayClassWithInitArgs(cls=ray.remote(SafeTrainingWorker), config=_critic_config(tiny_moe)),
        }
    )
    group, values = groups["actor"], groups["critic"]
    # The critic first, as verl's trainers do.
    values.reset()
    values.set_loss_fn(_towards_nothing)
    group.init_model()
    group.set_loss_fn(loss)

    metrics = group.rl_safe_metrics()
    assert [found["rl_safe/active"] for found in metrics] == [1.0] * SIZE
    assert all(found["rl_safe/bootstrap_groups"] > 0 for found in metrics)
    assert [found.keys() for found in values.rl_safe_metrics()] == [found.keys() for found in metrics]

    before = group.compute_log_prob(_rows())
    assert set(before.keys()) >= {"log_probs"}
    reference = group.compute_ref_log_prob(_rows())
    assert _equal(reference["log_probs"], before["log_probs"])
    ray.get(group.update_weights(global_steps=0))
    sent = _one(group.received())
    trained = tu.get(group.update_actor(_rows()), "metrics")
    assert trained["grad_norm"]
    ray.get(group.update_weights(global_steps=1))
    again = _one(group.received())
    assert (sent[1], again[1]) == (SYNC, SYNC * 2)
    assert all(found["timing_s/rl_safe_release"] > 0 for found in group.rl_safe_metrics())
    assert sent[0].keys() == again[0].keys()
    assert len(sent[0]) > 50
    assert sent[0] != again[0], "what was trained is sent"
    assert _equal(group.compute_ref_log_prob(_rows())["log_probs"], reference["log_probs"]), "the reference stays"

    path = tmp_path / "global_step_1" / "actor"
    group.save_checkpoint(str(path), None, 1)
    assert (path / "ckpt_contents.json").is_file()
    group.load_checkpoint(str(path))
    assert all(found["timing_s/rl_safe_save"] > 0 for found in group.rl_safe_metrics())
    group.to("cpu")

    guessed = values.infer_batch(_rows()).get()["values"]
    losses = [tu.get(values.train_mini_batch(_rows()).get(), "metrics")["values"] for _ in range(4)]
    assert sum(losses[-1]) < sum(losses[0]), losses
    learnt = values.infer_batch(_rows()).get()["values"]
    assert learnt.values().float().square().mean() < guessed.values().float().square().mean()
    of_critic = tmp_path / "global_step_1" / "critic"
    values.save_checkpoint(str(of_critic), None, 1)
    values.load_checkpoint(str(of_critic))
    assert (of_critic / "ckpt_contents.json").is_file()

    assert ray.get(group.teardown_groups(), timeout=60) == [{}] * SIZE
    assert ray.get(values.teardown_groups(), timeout=60) == [{}] * SIZE, "the actor's groups are the critic's"
    assert ray.get(group.teardown_groups(), timeout=60) == [{}] * SIZE, "a second end does nothing"


@pytest.mark.timeout(420)
@pytest.mark.usefixtures("_cluster")
def test_a_detached_actor_and_its_reference_answer_every_call(tiny_moe) -> None:
    from tests.verl.fake_rollout import Detached

    groups = _spawn({"actor": _role(Detached, tiny_moe, "actor"), "ref": _role(Detached, tiny_moe, "ref")})
    actor, reference = groups["actor"], groups["ref"]
    actor.init_model()
    actor.set_loss_fn(loss)
    reference.init_model()
    assert [found["rl_safe/active"] for found in actor.rl_safe_metrics() + reference.rl_safe_metrics()] == [1.0] * 4

    first = actor.weights()
    actor.save_model_to_cpu(0)
    actor.update_actor(_rows())
    trained = actor.weights()
    assert trained != first
    actor.save_model_to_cpu(1)
    actor.restore_model_from_cpu(0)
    assert actor.weights() == first
    as_before = actor.compute_log_prob(_rows())["log_probs"]
    assert _equal(reference.compute_ref_log_prob(_rows())["log_probs"], as_before)
    actor.restore_model_from_cpu(1)
    actor.clear_cpu_model(1)
    assert actor.weights() == trained
    assert not _equal(actor.compute_log_prob(_rows())["log_probs"], as_before)

    assert ray.get(actor.teardown_groups(), timeout=60) == [{}] * SIZE
    assert ray.get(reference.teardown_groups(), timeout=60) == [{}] * SIZE
