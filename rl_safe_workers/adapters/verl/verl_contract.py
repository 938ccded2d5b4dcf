"""Lists every name in verl that the adapter needs, with the parameters that it needs.

Pure data: it imports nothing of verl. `compatibility` compares the list with the installed verl before a job starts.
``tests/verl/test_contract.py`` compares it with the sources of other versions.
"""

from __future__ import annotations

from collections.abc import Iterator

from rl_safe_workers.adapters.host_contract import HostName, HostText

RELEASES = ("0.9.0", "0.9.1")
"""The releases whose source we have read, and which work. Another version works if it has the names."""

_INIT = "verl/__init__.py"
_ENGINE_BASE = "verl/workers/engine/base.py"
_ENGINE = "verl/workers/engine/megatron/transformer_impl.py"
_WORKERS = "verl/workers/engine_workers.py"
_DETACHED = "verl/experimental/separation/engine_workers.py"
_MANAGER = "verl/utils/checkpoint/megatron_checkpoint_manager.py"
_MANAGER_BASE = "verl/utils/checkpoint/checkpoint_manager.py"
_MEGATRON_UTILS = "verl/utils/megatron_utils.py"
_TRANSFER = "verl/checkpoint_engine/base.py"
_REPLICA = "verl/workers/rollout/replica.py"
_TRAINER = "verl/trainer/ppo/v1/trainer_base.py"
_SEPARATE = "verl/trainer/ppo/v1/trainer_separate_async.py"
_SAMPLES = "verl/trainer/ppo/v1/replay_buffer.py"
_AGENTS = "verl/trainer/ppo/v1/agent_loop_tq.py"
_AGENT_BASE = "verl/experimental/agent_loop/agent_loop.py"
_MAIN = "verl/trainer/main_ppo.py"
_VLLM_WORKER = "verl/workers/rollout/vllm_rollout/utils.py"
_VLLM_ADAPTER = "verl/workers/rollout/vllm_rollout/vllm_rollout.py"
_BUCKETS = "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
_VLLM_SERVER = "verl/workers/rollout/vllm_rollout/vllm_async_server.py"


def _named(file: str, why: str, *signatures: str) -> Iterator[HostName]:
    """Yields a `HostName` for each signature, e.g. ``"Worker.save(self, path)"``. A class has no parentheses."""
    for signature in signatures:
        name, _, parameters = signature.rstrip(")").partition("(")
        yield HostName(file=file, name=name, parameters=tuple(filter(None, parameters.split(", "))), why=why)


REGISTRY: tuple[HostName, ...] = (
    *_named(_ENGINE_BASE, "takes our engines", "EngineRegistry.register(cls, model_type, backend, device, vendor)"),
    *_named(_ENGINE_BASE, "chooses our engines", "EngineRegistry.get_engine_cls(cls, model_type, backend)"),
)
"""The names that the plugin needs in every process of a job. They are in one small file, so the check is quick."""

NAMES: tuple[HostName, ...] = (
    *REGISTRY,
    *_named(_ENGINE, "derived from", "MegatronEngineWithLMHead", "MegatronEngineWithValueHead"),
    *_named(
        _ENGINE,
        "overridden",
        "MegatronEngine._init_device_mesh(self)",
        "MegatronEngine.initialize(self)",
        "MegatronEngine.train_mode(self)",
        "MegatronEngine.eval_mode(self)",
        "MegatronEngine.to(self, device, model, optimizer, grad)",
        "MegatronEngine.get_per_tensor_param(self)",
        "MegatronEngine.save_checkpoint(self, local_path, hdfs_path, global_step, max_ckpt_to_keep)",
    ),
    *_named(
        _ENGINE_BASE,
        "overridden",
        "BaseEngine.train_batch(self, data, loss_function)",
        "BaseEngine.infer_batch(self, data, loss_function)",
    ),
    *_named(
        _MANAGER,
        "overridden",
        "MegatronCheckpointManager.save_checkpoint(self, local_path, hdfs_path, global_step, max_ckpt_to_keep)",
        "MegatronCheckpointManager.load_checkpoint(self, local_path, hdfs_path, del_local_after_load)",
        "MegatronCheckpointManager._save_dist_checkpoint(self, dist_checkpoint_path, state_dict)",
        "MegatronCheckpointManager._build_optimizer_state_dict(self, model_sharded_state_dict, metadata, is_loading)",
        "MegatronCheckpointManager._build_extra_state_dict(self)",
        "MegatronCheckpointManager._dispatch_finalize(self, async_requests, finalize_save_fn)",
        "MegatronCheckpointManager._finalize_save(self)",
    ),
    *_named(_MANAGER_BASE, "overridden", "BaseCheckpointManager.register_checkpoint(self, new_path, max_ckpt_to_keep)"),
    *_named(
        _MANAGER,
        "called",
        "MegatronCheckpointManager._build_sharded_state_dict_metadata(self)",
        "MegatronCheckpointManager._build_model_sharded_state_dict(self, metadata)",
        "MegatronCheckpointManager._load_model_as_hf_via_bridge(self, hf_model_path)",
        "MegatronCheckpointManager._raise_for_old_layout(local_path)",
        "MegatronCheckpointManager.get_rng_state(self)",
        "MegatronCheckpointManager.load_rng_states(self, rng_states)",
    ),
    *_named(
        _MEGATRON_UTILS,
        "called",
        "get_megatron_module_device(models)",
        "load_megatron_model_to_gpu(models, load_grad)",
        "offload_megatron_model_to_cpu(models)",
    ),
    *_named(_WORKERS, "derived from", "TrainingWorker.__init__(self, config)", "ActorRolloutRefWorker"),
    *_named(_DETACHED, "derived from", "DetachActorWorker"),
    *_named(_WORKERS, "phase sync", "ActorRolloutRefWorker.update_weights(self, global_steps, mode)"),
    *_named("verl/utils/distributed.py", "called", "initialize_global_process_group_ray(timeout_second, backend)"),
    *_named("verl/single_controller/base/decorator.py", "binds our calls", "register(dispatch_mode, blocking)"),
    *_named(
        _TRANSFER,
        "guarded",
        "CheckpointEngineManager.update_weights(self, global_steps)",
        "CheckpointEngineManager.sleep_replicas(self)",
        "CheckpointEngineManager.wake_up_replicas(self)",
        "CheckpointEngineManager.abort_replicas(self)",
        "CheckpointEngineManager.resume_generation_replicas(self)",
    ),
    *_named(_VLLM_ADAPTER, "its answer tells a failure", "ServerAdapter._execute_method(self, method, non_block)"),
    *_named(
        _BUCKETS,
        "its socket is moved",
        "BucketedWeightSender.__init__(self, zmq_handle)",
        "BucketedWeightReceiver.__init__(self, zmq_handle)",
    ),
    *_named(_REPLICA, "asked when nothing answers", "RolloutReplica.clear_kv_cache(self)"),
    *_named(_AGENTS, "derived from", "AgentLoopWorkerTQ"),
    *_named(_AGENT_BASE, "overridden", "AgentLoopWorker._run_agent_loop(self, sampling_params, trajectory)"),
    *_named(_SAMPLES, "guarded", "ReplayBuffer._wait_for_next_poll(self, partition_id, last_debug_time)"),
    *_named(
        _TRAINER,
        "overridden",
        "PPOTrainer.init(self)",
        "PPOTrainer.fit(self, agent_loop_manager)",
        "PPOTrainer._init_resource_pool_mgr(self)",
        "PPOTrainer.on_step_end(self)",
        "PPOTrainer._setup(self)",
        "PPOTrainer._compute_old_log_prob(self, batch, metrics)",
        "PPOTrainer._compute_ref_log_prob(self, batch, metrics)",
        "PPOTrainer._compute_values(self, batch, metrics)",
        "PPOTrainer._update_critic(self, batch, metrics)",
        "PPOTrainer._update_actor(self, batch, metrics)",
        "PPOTrainer._save_checkpoint(self)",
        "PPOTrainer._load_checkpoint(self)",
    ),
    *_named("verl/trainer/ppo/v1/trainer_sync.py", "derived from", "PPOTrainerSync"),
    *_named("verl/trainer/ppo/v1/trainer_colocate_async.py", "derived from", "PPOTrainerColocateAsync"),
    *_named(_SEPARATE, "derived from", "PPOTrainerSeparateAsync"),
    *_named(
        "verl/trainer/sft_trainer.py", "run by our entry", "SFTTrainer.__init__(self, config)", "SFTTrainer.fit(self)"
    ),
    *_named("verl/utils/distributed.py", "called", "initialize_global_process_group(timeout_second)"),
    *_named(_MAIN, "called", "run_ppo(config, task_runner_class)"),
    *_named(_MAIN, "overridden", "TaskRunnerV1.run(self, config)"),
)


def _text(file: str, within: str, text: str, why: str) -> HostText:
    return HostText(file=file, within=within, text=text, why=why)


TEXTS: tuple[HostText, ...] = (
    _text(_INIT, "", "VERL_USE_EXTERNAL_MODULES", "loads our plugin"),
    _text(_ENGINE_BASE, "EngineRegistry.get_engine_cls", "VERL_ENGINE_VENDOR", "our vendor key"),
    _text(_ENGINE, "MegatronEngine._init_device_mesh", "if mpu.is_initialized()", "takes the groups that we made"),
    _text(_ENGINE, "MegatronEngine.initialize", "self.checkpoint_mananager = ", "replaced by ours"),
    _text(_ENGINE, "MegatronEngine.get_per_tensor_param", "return (per_tensor_param, peft_config)", "wrapped"),
    _text(_WORKERS, "TrainingWorker.__init__", "initialize_global_process_group_ray(", "returns early after ours"),
    _text(_WORKERS, "ActorRolloutRefWorker", "actor_worker_cls = TrainingWorker", "replaced by ours"),
    _text(_WORKERS, "ActorRolloutRefWorker", "ref_worker_cls = TrainingWorker", "replaced by ours"),
    _text(
        _WORKERS,
        "ActorRolloutRefWorker.update_weights",
        "await self.rollout.resume(tags=['kv_cache'])",
        "communicators are given away before",
    ),
    _text(_TRANSFER, "CheckpointEngineManager.update_weights", "self.actor_wg.update_weights(", "waits for each rank"),
    _text(_REPLICA, "RolloutReplica.__init__", "self.servers", "asked when nothing answers"),
    _text(_AGENTS, "AgentLoopManagerTQ", "= AgentLoopWorkerTQ", "ours is entered there"),
    _text(_SAMPLES, "ReplayBuffer.sample", "self._wait_for_next_poll(", "the poll of a wait for prompts"),
    _text(_TRAINER, "PPOTrainer._init_resource_pool_mgr", "self.role_worker_mapping", "our workers are entered there"),
    _text(_TRAINER, "PPOTrainer", "self.checkpoint_manager: CheckpointEngineManager", "guarded"),
    _text(_TRAINER, "PPOTrainer.fit", "self.agent_loop_manager = agent_loop_manager", "guarded"),
    _text(_TRAINER, "PPOTrainer", "self.replay_buffer = ", "guarded"),
    _text(_TRAINER, "PPOTrainer", "self.train_dataloader = ", "guarded"),
    _text(_TRAINER, "PPOTrainer", "self.val_dataloader = ", "guarded"),
    _text(_TRAINER, "PPOTrainer._consume_sync_metrics", "_pending_sync_metrics", "carries our metrics"),
    _text(_TRAINER, "", "TRAINER_REGISTRY", "our trainers are entered there"),
    _text(_SEPARATE, "PPOTrainerSeparateAsync", "self.standalone_checkpoint_manager = ", "guarded"),
    _text(_MAIN, "", "validate_config", "called"),
    _text(_MAIN, "", "auto_set_device", "called"),
)

ENGINE_NAMES: tuple[HostName, ...] = (
    *_named(
        _VLLM_WORKER,
        "overridden",
        "vLLMColocateWorkerExtension.update_weights_from_ipc(self, peft_config, base_sync_done, use_shm)",
        "vLLMColocateWorkerExtension._update_weights(self, weights, peft_config, base_sync_done)",
        "vLLMColocateWorkerExtension._iter_all_models_with_config(self)",
    ),
    *_named(_VLLM_WORKER, "called", "vLLMColocateWorkerExtension._iter_all_models(self)"),
    *_named(_VLLM_SERVER, "overridden", "vLLMHttpServer._get_worker_extension_cls(self)"),
    *_named(_VLLM_SERVER, "derived from", "vLLMReplica"),
    *_named(_REPLICA, "takes our replicas", "RolloutReplicaRegistry.register(cls, name, loader)"),
    *_named(_ENGINE, "its tasks are packed", "MegatronEngine._mbridge_export_tasks(self)"),
)
"""The names that our vLLM engines need: for packed weight syncs, and for proofs."""
ENGINE_TEXTS: tuple[HostText, ...] = (
    _text(_ENGINE, "MegatronEngine", "self.vanilla_bridge = ", "chooses the library of the export"),
    _text(_ENGINE, "MegatronEngine", "self.bridge = ", "its tasks are packed"),
    _text(
        _VLLM_WORKER,
        "vLLMColocateWorkerExtension.update_weights_from_ipc",
        "self._iter_all_models_with_config()",
        "called before layers convert their weights",
    ),
    _text(
        _VLLM_SERVER, "vLLMHttpServer.launch_server", "self._get_worker_extension_cls()", "takes our part of a worker"
    ),
    _text(_VLLM_SERVER, "vLLMReplica.__init__", "self.server_class = ", "replaced by ours"),
    _text(_TRANSFER, "CheckpointEngineManager.__init__", "self.actor_wg = ", "asked for its digests"),
    _text(_TRANSFER, "CheckpointEngineManager.__init__", "self.replicas = ", "asked for their digests"),
)
