"""Lists every name in NeMo RL and Megatron-Bridge that the adapter needs, with the parameters that it needs.

It imports nothing of them. `check_host` compares the list with a checkout: for users before a worker starts, and in
``tests/nemo_rl/test_contract.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rl_safe_workers.adapters.host_contract import HostName, HostText, lacking
from rl_safe_workers.errors import ConfigError

SINCE = "f00e1006b (2026-03-12)"
"""The first supported commit of NeMo RL's main branch. Before it, no class can be derived from the worker."""
UNTIL = "7ea279abf (2026-08-22)"
"""The newest commit that we have read. A newer one works as long as it has the names."""

_WORKER = "nemo_rl/models/policy/workers/megatron_policy_worker.py"
_BASE = "nemo_rl/models/policy/workers/base_policy_worker.py"
_GENERATION = "nemo_rl/models/generation/megatron/megatron_worker.py"
_SETUP = "nemo_rl/models/megatron/setup.py"
_POLICY = "nemo_rl/models/policy/lm_policy.py"
_VLLM_FILES = "nemo_rl/models/generation/vllm"
_VLLM = f"{_VLLM_FILES}/vllm_generation.py"
_GROUPS = "nemo_rl/distributed/worker_groups.py"
_ROLLOUTS = "nemo_rl/experience/rollouts.py"


_CLASS = "MegatronPolicyWorkerImpl"
NAMES: tuple[HostName, ...] = (
    HostName(file=_WORKER, name=_CLASS, parameters=(), why="derived from"),
    HostName(
        file=_WORKER,
        name=f"{_CLASS}.__init__",
        parameters=("self", "config", "worker_sharding_annotations"),
        why="runs within our patches",
    ),
    HostName(file=_WORKER, name=f"{_CLASS}.train", parameters=("self", "data", "loss_fn"), why="phase train"),
    HostName(file=_WORKER, name=f"{_CLASS}.finish_train_step", parameters=("self",), why="phase train", optional=True),
    HostName(file=_WORKER, name=f"{_CLASS}.get_logprobs", parameters=("self", "data"), why="phase logprob"),
    HostName(file=_WORKER, name=f"{_CLASS}.get_topk_logits", parameters=("self", "data", "k"), why="phase logprob"),
    HostName(file=_WORKER, name=f"{_CLASS}.calibrate_qkv_fp8_scales", parameters=("self", "data"), why="phase logprob"),
    HostName(
        file=_WORKER,
        name=f"{_CLASS}.prepare_for_lp_inference",
        parameters=("self",),
        why="refused before the bootstrap",
    ),
    HostName(
        file=_WORKER, name=f"{_CLASS}.offload_before_refit", parameters=("self",), why="refused before the bootstrap"
    ),
    HostName(
        file=_WORKER, name=f"{_CLASS}.offload_after_refit", parameters=("self",), why="refused before the bootstrap"
    ),
    HostName(
        file=_WORKER,
        name=f"{_CLASS}.save_checkpoint",
        parameters=("self", "weights_path", "optimizer_path"),
        why="phase save",
    ),
    HostName(
        file=_WORKER,
        name=f"{_CLASS}.prepare_refit_info",
        parameters=("self",),
        why="phase sync",
    ),
    HostName(
        file=_WORKER,
        name=f"{_CLASS}.broadcast_weights_for_collective",
        parameters=("self", "kv_scales"),
        why="phase sync",
    ),
    HostName(
        file=_WORKER,
        name=f"{_CLASS}.stream_weights_via_ipc_zmq",
        parameters=("self", "buffer_size_bytes", "kv_scales"),
        why="phase sync",
    ),
    HostName(
        file=_WORKER,
        name=f"{_CLASS}._iter_params_with_optional_kv_scales",
        parameters=("self", "kv_scales"),
        why="digests are taken of what it yields",
    ),
    HostName(
        file=_WORKER,
        name=f"{_CLASS}.prepare_nccl_reshard_refit_info",
        parameters=("self", "train_parallelism", "gen_parallelism"),
        why="phase sync",
        optional=True,
    ),
    HostName(
        file=_WORKER,
        name=f"{_CLASS}.nccl_reshard_refit",
        parameters=("self", "kv_scales"),
        why="phase sync",
        optional=True,
    ),
    HostName(
        file=_WORKER,
        name=f"{_CLASS}.init_remote_sparse_delta_baseline",
        parameters=("self", "shard_rank", "shard_count"),
        why="phase sync",
        optional=True,
    ),
    HostName(
        file=_WORKER,
        name=f"{_CLASS}.stream_remote_sparse_weights",
        parameters=("self", "transport", "targets"),
        why="phase sync",
        optional=True,
    ),
    HostName(
        file=_WORKER,
        name=f"{_CLASS}.finalize_async_save",
        parameters=("self",),
        why="phase save",
        optional=True,
    ),
    HostName(
        file=_GENERATION,
        name="MegatronGenerationRefitMixin.swap_weights_via_reshard",
        parameters=("self", "is_source"),
        why="phase sync",
        optional=True,
    ),
    HostName(
        file=_BASE,
        name="AbstractPolicyWorker.is_alive",
        parameters=("self",),
        why="asked by the driver when a wait has ended",
    ),
    HostName(
        file=_BASE,
        name="AbstractPolicyWorker.get_reference_policy_logprobs",
        parameters=("self", "data"),
        why="phase logprob",
    ),
    HostName(file=_BASE, name="AbstractPolicyWorker.shutdown", parameters=("self",), why="preceded by our teardown"),
    HostName(
        file=_BASE,
        name="AbstractPolicyWorker.init_collective",
        parameters=("self", "ip", "port", "world_size", "train_world_size"),
        why="given a deadline",
    ),
    HostName(
        file=_BASE,
        name="AbstractPolicyWorker.init_nccl_reshard_comm_group",
        parameters=("self", "pp_ips", "pp_ports"),
        why="given a deadline",
        optional=True,
    ),
    HostName(
        file=_GENERATION,
        name="MegatronGenerationRefitMixin.init_collective_mcore_generation",
        parameters=("self", "ip", "port", "world_size", "rank_offset"),
        why="given a deadline; its group is left to the host",
        optional=True,
    ),
    HostName(file=_SETUP, name="setup_distributed", parameters=(), why="patched: timeout of the default group"),
    HostName(
        file=_SETUP,
        name="handle_model_import",
        parameters=("config", "hf_model_name", "pretrained_path", "pt_checkpoint_exists"),
        why="patched: the conversion is whole or absent",
    ),
    HostName(
        file=_SETUP,
        name="setup_model_and_optimizer",
        parameters=("policy_cfg", "megatron_cfg", "load_optimizer"),
        why="patched: tells what the groups will carry",
    ),
    HostName(
        file=_POLICY, name="Policy.__init__", parameters=("self", "cluster", "config"), why="made with our worker"
    ),
    HostName(file=_POLICY, name="Policy.shutdown", parameters=("self",), why="called first"),
    HostName(
        file="nemo_rl/algorithms/grpo.py",
        name="setup",
        parameters=("master_config", "tokenizer"),
        why="wrapped by our script",
    ),
    HostName(
        file="nemo_rl/algorithms/grpo.py",
        name="refit_policy_generation",
        parameters=("policy", "policy_generation"),
        why="given a deadline",
    ),
    HostName(
        file="nemo_rl/weight_sync/factory.py",
        name="create_weight_synchronizer",
        parameters=("policy", "generation"),
        why="what it makes is given a deadline",
        optional=True,
    ),
    HostName(
        file=_ROLLOUTS,
        name="run_multi_turn_rollout",
        parameters=("policy_generation",),
        why="given a deadline",
    ),
    HostName(
        file=_ROLLOUTS,
        name="run_async_multi_turn_rollout",
        parameters=("policy_generation",),
        why="given a deadline",
    ),
    HostName(
        file=_ROLLOUTS,
        name="run_nemo_gym_rollout_sync",
        parameters=("policy_generation",),
        why="given a deadline",
        optional=True,
    ),
    HostName(
        file=_ROLLOUTS,
        name="run_async_nemo_gym_rollout",
        parameters=("policy_generation",),
        why="given a deadline",
        optional=True,
    ),
    HostName(
        file=_VLLM,
        name="VllmGeneration.generate",
        parameters=("self", "data"),
        why="responses are counted",
    ),
    HostName(
        file=_VLLM,
        name="VllmGeneration.generate_async",
        parameters=("self", "data"),
        why="responses are counted",
    ),
    HostName(
        file=_VLLM,
        name="VllmGeneration.prepare_for_generation",
        parameters=("self",),
        why="given a deadline",
    ),
    HostName(
        file=_VLLM,
        name="VllmGeneration.finish_generation",
        parameters=("self",),
        why="given a deadline",
    ),
    HostName(
        file=_VLLM,
        name="VllmGeneration.shutdown",
        parameters=("self",),
        why="called after the policy's",
    ),
    HostName(
        file=_GROUPS,
        name="RayWorkerGroup.workers",
        parameters=("self",),
        why="the processes that a wait may be for",
    ),
    HostName(
        file=_GROUPS,
        name="RayWorkerGroup.dp_size",
        parameters=("self",),
        why="how many engines there are",
    ),
    HostName(
        file=_GROUPS,
        name="RayWorkerGroup.get_dp_leader_worker_idx",
        parameters=("self", "dp_shard_idx"),
        why="which worker has an engine",
    ),
    HostName(
        file=_GROUPS,
        name="RayWorkerGroup.shutdown",
        parameters=("self", "cleanup_method", "timeout", "force"),
        why="kills workers after a failure",
    ),
    HostName(
        file="nemo_rl/distributed/ray_actor_environment_registry.py",
        name="get_actor_python_env",
        parameters=("actor_class_fqn",),
        why="our worker has the Python of the host's",
    ),
    HostName(
        file="nemo_rl/utils/venvs.py",
        name="create_local_venv_on_each_node",
        parameters=("py_executable", "venv_name"),
        why="builds that Python under the host's name",
    ),
    HostName(
        file="nemo_rl/models/policy/utils.py",
        name="get_runtime_env_for_policy_worker",
        parameters=("policy_worker_name",),
        why="options of the actor",
    ),
    HostName(
        file="nemo_rl/distributed/named_sharding.py",
        name="NamedSharding.size",
        parameters=("self",),
        why="how many workers there are",
    ),
    HostName(file="nemo_rl/utils/config.py", name="load_config", parameters=("config_path",), why="loads our recipes"),
    HostName(file="examples/run_grpo.py", name="main", parameters=(), why="called by our script"),
)

TEXTS: tuple[HostText, ...] = (
    HostText(file=_WORKER, within=f"{_CLASS}.__init__", text="setup_distributed()", why="looked up in the module"),
    HostText(
        file=_WORKER,
        within=f"{_CLASS}.__init__",
        text="handle_model_import(config, hf_model_name,",
        why="looked up in the module",
    ),
    HostText(
        file=_WORKER,
        within=f"{_CLASS}.__init__",
        text="setup_model_and_optimizer(config, self.megatron_cfg",
        why="looked up in the module",
    ),
    HostText(
        file=_SETUP,
        within="setup_distributed",
        text="torch.distributed.init_process_group('nccl'",
        why="looked up in torch.distributed",
    ),
    HostText(
        file=_SETUP,
        within="handle_model_import",
        text="parallel_state.destroy_model_parallel()",
        why="the import's groups are forgotten, not ended",
    ),
    HostText(
        file="nemo_rl/models/megatron/community_import.py",
        within="import_model_from_hf_name",
        text="model_provider.initialize_model_parallel(seed=0)",
        why="makes the import's groups",
    ),
    HostText(
        file="nemo_rl/models/megatron/community_import.py",
        within="import_model_from_hf_name",
        text="bridge.save_megatron_model(megatron_model, output_path)",
        why="saves where the import is told to",
    ),
    HostText(file=_SETUP, within="validate_model_paths", text="'iter_0000000'", why="what the host takes for finished"),
    HostText(
        file=_GROUPS,
        within="RayWorkerGroup.shutdown",
        text="timeout=timeout",
        why="the host's patience",
    ),
    HostText(
        file="nemo_rl/distributed/ray_actor_environment_registry.py",
        within="",
        text="ACTOR_ENVIRONMENT_REGISTRY",
        why="our worker is entered there",
    ),
    HostText(file=_SETUP, within="setup_model_and_optimizer", text="GlobalState()", why="looked up in the module"),
    HostText(
        file="nemo_rl/algorithms/grpo.py",
        within="async_grpo_train",
        text="ray.get(replay_buffer.size.remote())",
        why="looked up in the module: the loop polls for responses",
    ),
    HostText(
        file="nemo_rl/algorithms/grpo.py",
        within="async_grpo_train",
        text="time.sleep(0.5)",
        why="looked up in the module: the loop waits for the next poll",
    ),
    HostText(
        file="nemo_rl/algorithms/grpo.py",
        within="async_grpo_train",
        text="refit_policy_generation(policy, policy_generation, colocated_inference",
        why="looked up in the module",
    ),
    HostText(
        file="nemo_rl/algorithms/grpo.py",
        within="grpo_train",
        text="run_async_multi_turn_rollout(policy_generation=policy_generation",
        why="looked up in the module",
    ),
    HostText(
        file="examples/run_grpo.py",
        within="main",
        text="setup(config, tokenizer, dataset, val_dataset",
        why="looked up in the script's module",
    ),
    HostText(
        file="nemo_rl/algorithms/grpo.py",
        within="setup",
        text="VllmGeneration(cluster=inference_cluster, config=generation_config",
        why="looked up in the module: known before setup returns",
    ),
    HostText(
        file="nemo_rl/algorithms/grpo.py",
        within="setup",
        text="ray.get(futures_train + futures_inference)",
        why="looked up in the module: given a deadline",
    ),
    HostText(
        file="nemo_rl/algorithms/grpo.py",
        within="setup",
        text="return (policy, policy_generation, ",
        why="the first two that setup returns: ended in order",
    ),
)

PROOF_NAMES: tuple[HostName, ...] = (
    HostName(
        file=f"{_VLLM_FILES}/vllm_worker.py",
        name="VllmGenerationWorkerImpl._create_engine",
        parameters=("self", "llm_kwargs"),
        why="given our part of vLLM's worker",
    ),
    HostName(
        file=f"{_VLLM_FILES}/vllm_worker_async.py",
        name="VllmAsyncGenerationWorkerImpl._create_engine",
        parameters=("self", "llm_kwargs"),
        why="likewise",
    ),
    HostName(
        file=f"{_VLLM_FILES}/vllm_backend.py",
        name="VllmInternalWorkerExtension.update_weights_via_ipc_zmq",
        parameters=("self",),
        why="weights are read back after it",
    ),
    HostName(
        file=f"{_VLLM_FILES}/vllm_backend.py",
        name="VllmInternalWorkerExtension.update_weights_from_collective",
        parameters=("self",),
        why="likewise",
    ),
    HostName(
        file="nemo_rl/distributed/worker_group_utils.py",
        name="get_nsight_config_if_pattern_matches",
        parameters=("worker_name",),
        why="options of the actor",
    ),
)
"""The additional names that proofs of refits and refits over our joint group need."""
JOINT_NAMES: tuple[HostName, ...] = (
    HostName(
        file=f"{_VLLM_FILES}/vllm_backend.py",
        name="VllmInternalWorkerExtension._load_weights",
        parameters=("self", "weights"),
        why="loads what comes over our joint group",
    ),
)
"""Further names that a refit over our joint group needs."""
JOINT_TEXTS: tuple[HostText, ...] = (
    HostText(
        file=_WORKER,
        within=f"{_CLASS}._calculate_refit_param_info",
        text="self.refit_conversion_tasks = ",
        why="tells which weights each rank holds",
    ),
    HostText(
        file=_WORKER,
        within=f"{_CLASS}._iter_params_with_optional_kv_scales",
        text="self.megatron_bridge.export_hf_weights(",
        why="likewise",
    ),
)
"""Further texts that a refit over our joint group relies on."""
PROOF_TEXTS: tuple[HostText, ...] = (
    HostText(
        file=_VLLM,
        within="VllmGeneration.__init__",
        text="RayWorkerBuilder(worker_cls, config",
        why="takes our workers",
    ),
    HostText(
        file=f"{_VLLM_FILES}/vllm_backend.py",
        within="VllmInternalWorkerExtension.prepare_refit_info",
        text="self.state_dict_info = state_dict_info",
        why="the weights of a refit",
    ),
    HostText(
        file=_WORKER,
        within=f"{_CLASS}.stream_weights_via_ipc_zmq",
        text="params_generator=self._iter_params_with_optional_kv_scales(",
        why="sends what we have taken digests of",
    ),
    HostText(
        file=_WORKER,
        within=f"{_CLASS}.broadcast_weights_for_collective",
        text="iterator=self._iter_params_with_optional_kv_scales(",
        why="likewise",
    ),
)

BRIDGE_NAMES: tuple[HostName, ...] = (
    HostName(
        file="src/megatron/bridge/models/conversion/auto_bridge.py",
        name="AutoBridge.export_hf_weights",
        parameters=("self", "model", "cpu", "show_progress", "conversion_tasks", "merge_adapter_weights"),
        why="converts the parameters of a rank for a refit over our joint group",
    ),
    HostName(
        file="src/megatron/bridge/models/conversion/param_mapping.py",
        name="MegatronParamMapping.set_process_groups_from_pg_collection",
        parameters=("self", "pg_collection"),
        why="likewise, without other pipeline stages and experts",
    ),
    HostName(
        file="src/megatron/bridge/training/checkpointing.py",
        name="save_checkpoint",
        parameters=("state", "model", "optimizer", "opt_param_scheduler"),
        why="every save goes through it",
    ),
    HostName(
        file="src/megatron/bridge/training/state.py",
        name="GlobalState.initialize_async_checkpoint_worker",
        parameters=("self",),
        why="patched: no process for saves in the background",
    ),
)

BRIDGE_TEXTS: tuple[HostText, ...] = (
    HostText(
        file="src/megatron/bridge/training/checkpointing.py",
        within="save_checkpoint",
        text="dist_checkpointing.save(state_dict, ",
        why="patched: looked up in megatron-core's package",
    ),
    HostText(
        file="src/megatron/bridge/training/checkpointing.py",
        within="save_checkpoint",
        text="cfg.to_yaml(config_filename)",
        why="writes the last file of a save",
    ),
    HostText(
        file="src/megatron/bridge/training/state.py",
        within="GlobalState.async_calls_queue",
        text="return self._async_calls_queue",
        why="set to ours",
    ),
    HostText(
        file="src/megatron/bridge/training/checkpointing.py",
        within="schedule_async_save",
        text="async_queue.schedule_async_request(async_request)",
        why="ours does nothing",
    ),
    HostText(
        file="src/megatron/bridge/training/checkpointing.py",
        within="maybe_finalize_async_save",
        text="async_queue.maybe_finalize_async_calls(blocking",
        why="ours waits for our save",
    ),
    HostText(
        file="src/megatron/bridge/training/checkpointing.py",
        within="save_checkpoint",
        text="async_save_request.add_finalize_fn(",
        why="called once our save is complete",
    ),
    HostText(
        file="src/megatron/bridge/training/initialize.py",
        within="_initialize_distributed",
        text="parallel_state.initialize_model_parallel(",
        why="patched: looked up in megatron-core's module",
    ),
    HostText(
        file="src/megatron/bridge/models/model_provider.py",
        within="",
        text="parallel_state.initialize_model_parallel(",
        why="patched: likewise",
    ),
)


_ADVICE = (
    f"use one from commit {SINCE} to {UNTIL}, such as v0.6.0 or v0.7.0 (docs/nemo_rl.md), or run its own "
    "examples/run_grpo.py"
)


def check_host(
    root: Path, names: Iterable[HostName] = NAMES, texts: Iterable[HostText] = (), *, advice: str = _ADVICE
) -> None:
    """Refuses a NeMo RL that lacks something that this adapter needs.

    Args:
        root: NeMo RL's checkout, or the folder that holds its package.
        names: The names that it must have.
        texts: The expressions that it must have.
        advice: A remedy for the user, for the error.

    Raises:
        ConfigError: If it lacks a name or an expression; says which.
    """
    if lack := lacking(root, names, texts):
        raise ConfigError(f"the NeMo RL in {root} lacks {lack}, which rl_safe_workers needs: {advice}")
