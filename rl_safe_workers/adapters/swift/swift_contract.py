"""Lists every name in ms-swift and mcore-bridge that the adapter needs, with the parameters that it needs.

It imports nothing of them. `check_swift` compares the list with the installed packages before anything is replaced.
``tests/swift/test_swift_contract.py`` compares it with the supported versions.
"""

from __future__ import annotations

from pathlib import Path

from rl_safe_workers.adapters.host_contract import HostName, HostText, lacking
from rl_safe_workers.errors import ConfigError

SINCE, UNTIL = "4.3.2", "4.6.0"
"""The oldest and the newest version of ms-swift that we have read."""
_UTILS = "swift/megatron/utils/megatron_lm_utils.py"
_BASE = "swift/megatron/trainers/base.py"
_SFT = "swift/megatron/pipelines/train/sft.py"
_EXPORT = "swift/megatron/pipelines/export/export.py"
_ARGS = "swift/megatron/arguments/megatron_args.py"
_FLOW = "swift/megatron/callbacks/default_flow.py"
_CALLBACK = "swift/megatron/callbacks/base.py"
_TRAINER = "BaseMegatronTrainer"
_ROLLOUT = "swift/megatron/trainers/rollout_mixin.py"
_GRPO = "swift/megatron/trainers/grpo_trainer.py"
_GROUP = "swift/ray/megatron/worker_group.py"
_WORKER = "swift/ray/megatron/megatron_worker.py"
_PIPELINE = "swift/ray/megatron/pipeline.py"
_REPLICA = "swift/ray/megatron/rollout/replica.py"
_ENGINE = "swift/ray/megatron/rollout/ray_vllm_engine.py"
_SERVER = "swift/ray/megatron/rollout/vllm_server.py"
_EXTENSION = "swift/pipelines/infer/rollout.py"
_ADAPTER = "swift/ray/megatron/rollout/adapter.py"
_SENDER = "swift/ray/megatron/rollout/weight_transfer.py"
_MANAGER = "swift/ray/megatron/checkpoint_engine/manager.py"
_DRIVER = "swift/ray/megatron/grpo_trainer.py"

NAMES: tuple[HostName, ...] = (
    HostName(
        file=_ARGS,
        name="MegatronArguments._init_distributed",
        parameters=("self",),
        why="creates the groups once every argument is known",
    ),
    HostName(file=_UTILS, name="_initialize_mpu", parameters=("args",), why="replaced: limits, deadlines, bootstrap"),
    HostName(
        file=_UTILS, name="save_mcore_checkpoint", parameters=("args", "models"), why="every save goes through it"
    ),
    HostName(
        file=_UTILS,
        name="maybe_finalize_async_save",
        parameters=("args", "blocking", "terminate"),
        why="asks our queue in every step",
    ),
    HostName(file=_BASE, name=f"{_TRAINER}.__init__", parameters=("self", "args", "template"), why="phase convert"),
    HostName(
        file=_BASE,
        name=f"{_TRAINER}.train",
        parameters=("self", "train_dataset", "val_dataset"),
        why="replaced: a failure is told at once",
    ),
    HostName(file=_BASE, name=f"{_TRAINER}.save_checkpoint", parameters=("self",), why="phase save"),
    HostName(
        file=_BASE,
        name=f"{_TRAINER}.run_train_step",
        parameters=("self", "train_data_iterator", "val_data_iterator"),
        why="calls our callback around a step",
    ),
    HostName(file=_BASE, name=f"{_TRAINER}.evaluate", parameters=("self", "val_data_iterator"), why="likewise"),
    HostName(file=_FLOW, name="DefaultFlowCallback", parameters=(), why="derived from: phases train and logprob"),
    HostName(file=_CALLBACK, name="MegatronCallback.on_step_begin", parameters=("self",), why="overridden"),
    HostName(file=_CALLBACK, name="MegatronCallback.on_step_end", parameters=("self",), why="overridden"),
    HostName(file=_CALLBACK, name="MegatronCallback.on_eval_begin", parameters=("self",), why="overridden"),
    HostName(file=_CALLBACK, name="MegatronCallback.on_eval_end", parameters=("self",), why="overridden"),
    HostName(file=_SFT, name="MegatronSft.run", parameters=("self",), why="replaced: the exit"),
    HostName(file=_EXPORT, name="MegatronExport.run", parameters=("self",), why="replaced: phase convert and the exit"),
)

TEXTS: tuple[HostText, ...] = (
    HostText(
        file="swift/arguments/base_args/base_args.py",
        within="BaseArguments.__post_init__",
        text="self._import_external_plugins()",
        why="the plugin comes before the groups",
    ),
    HostText(
        file="swift/utils/torch_utils.py",
        within="init_process_group",
        text="dist.init_process_group(backend=backend",
        why="replaced: looked up in torch.distributed",
    ),
    HostText(
        file=_UTILS,
        within="_initialize_mpu",
        text="mpu.initialize_model_parallel(",
        why="replaced: looked up in megatron-core's module",
    ),
    HostText(file=_UTILS, within="initialize_megatron", text="_initialize_mpu(args)", why="looked up in the module"),
    HostText(
        file=_UTILS,
        within="save_mcore_checkpoint",
        text="dist_checkpointing.save(state_dict, checkpoint_dir",
        why="replaced: looked up in megatron-core's package",
    ),
    HostText(
        file=_UTILS,
        within="save_mcore_checkpoint",
        text="from megatron.core.msc_utils import open_file",
        why="replaced: the tracker comes last",
    ),
    HostText(
        file=_UTILS,
        within="save_mcore_checkpoint",
        text="torch.distributed.barrier()",
        why="replaced: looked up in torch.distributed",
    ),
    HostText(
        file=_UTILS,
        within="maybe_finalize_async_save",
        text="_async_calls_queue.maybe_finalize_async_calls(",
        why="replaced: the queue",
    ),
    HostText(
        file=_UTILS,
        within="init_persistent_async_worker",
        text="AsyncCallsQueue(persistent=True)",
        why="replaced: the queue",
    ),
    HostText(
        file="swift/megatron/callbacks/mapping.py",
        within="",
        text="'default_flow': DefaultFlowCallback",
        why="ms-swift's registry of callbacks",
    ),
    HostText(
        file=_ARGS,
        within="MegatronArguments.__post_init__",
        text="self.callbacks += ['print', 'default_flow'",
        why="every job has that callback",
    ),
    HostText(
        file="swift/megatron/init.py",
        within="_patch__batched_p2p_ops",
        text="kwargs['group'] = None",
        why="stages send over the default group",
    ),
    HostText(file=_SFT, within="MegatronSft.run", text="dist.destroy_process_group()", why="left to our teardown"),
)

GRPO_NAMES: tuple[HostName, ...] = (
    HostName(
        file=_ROLLOUT,
        name="create_rollout_group",
        parameters=("trainer",),
        why="replaced: our groups, created in time",
    ),
    HostName(
        file=_ROLLOUT,
        name="MegatronRolloutMixin._prepare_vllm_engine",
        parameters=("self",),
        why="replaced: the engine's calls end",
    ),
    HostName(
        file=_ROLLOUT,
        name="MegatronRolloutMixin._move_model_to_vllm",
        parameters=("self",),
        why="phase sync",
    ),
    HostName(
        file=_ROLLOUT,
        name="MegatronRolloutMixin.offload_context",
        parameters=("self",),
        why="replaced: communicators give their memory",
    ),
    HostName(
        file=_GRPO,
        name="MegatronGRPOTrainer._init_rollout_engine",
        parameters=("self",),
        why="phase start",
    ),
    HostName(
        file=_GRPO,
        name="MegatronGRPOTrainer._generate_and_score_completions",
        parameters=("self",),
        why="phase rollout",
    ),
    HostName(
        file=_GRPO,
        name="MegatronGRPOTrainer._maybe_compute_logps",
        parameters=("self", "batch"),
        why="phase logprob",
    ),
    HostName(
        file="swift/megatron/pipelines/train/rlhf.py",
        name="MegatronRLHF._prepare_vllm_client",
        parameters=("self",),
        why="replaced: the client's calls end",
    ),
)

GRPO_TEXTS: tuple[HostText, ...] = (
    HostText(
        file=_ROLLOUT,
        within="create_rollout_group",
        text="if trainer._rollout_group is not None",
        why="finds the group that we have created",
    ),
    HostText(
        file=_ROLLOUT,
        within="create_rollout_group",
        text="get_ranks('tp-cp-ep-pp')",
        why="the ranks of those groups",
    ),
    HostText(
        file=_ROLLOUT,
        within="MegatronRolloutMixin._init_rollout_engine",
        text="self.engine = self._prepare_vllm_engine()",
        why="looked up in the class",
    ),
    HostText(
        file=_ROLLOUT,
        within="MegatronRolloutMixin._generate_completions",
        text="self._move_model_to_vllm()",
        why="looked up in the class",
    ),
    HostText(
        file=_ROLLOUT,
        within="MegatronRolloutMixin._colocate_rollout",
        text="self.engine.infer(",
        why="replaced: its waits end",
    ),
)

PROOF_NAMES: tuple[HostName, ...] = (
    HostName(
        file=_MANAGER,
        name="CheckpointEngineManager._sync_weights_naive",
        parameters=("self", "merge_and_sync"),
        why="in Ray mode: proved, and redone",
    ),
    HostName(
        file=_MANAGER,
        name="CheckpointEngineManager._sync_weights_nccl",
        parameters=("self", "merge_and_sync"),
        why="in Ray mode: likewise",
    ),
    HostName(
        file=_ENGINE,
        name="RayVllmEngine._create_engine_async",
        parameters=("model_id",),
        why="in Ray mode: given our part of vLLM's worker",
    ),
    HostName(
        file=_EXTENSION,
        name="WeightSyncWorkerExtension.update_weights_from_ipc",
        parameters=("self",),
        why="in Ray mode: weights are read back after it",
    ),
    HostName(
        file=_DRIVER,
        name="GRPOTrainer._build_grpo_log_metrics",
        parameters=("self",),
        why="in Ray mode: takes our metrics, too",
    ),
)

PROOF_TEXTS: tuple[HostText, ...] = (
    HostText(
        file=_ROLLOUT,
        within="MegatronRolloutMixin._export_and_load_weights",
        text="self.bridge.export_weights(",
        why="digests are taken of what it yields",
    ),
    HostText(
        file=_ROLLOUT,
        within="MegatronRolloutMixin._export_and_load_weights",
        text="self.engine.inner_model",
        why="weights are read back from it",
    ),
    HostText(
        file=_ROLLOUT,
        within="MegatronRolloutMixin",
        text="self.vllm_tp_group = vllm_ps.get_tp_group().device_group",
        why="the ranks of an engine exchange digests over it",
    ),
    HostText(
        file=_GRPO,
        within="MegatronGRPOTrainer",
        text="self._metrics = {'train'",
        why="takes our metrics, too",
    ),
    HostText(
        file=_WORKER,
        within="MegatronWorker.update_weights",
        text="megatron.bridge.export_weights(",
        why="in Ray mode: digests are taken of what it yields",
    ),
    HostText(
        file=_WORKER,
        within="MegatronWorker.send_checkpoint_weights",
        text="megatron.bridge.export_weights(",
        why="in Ray mode: likewise",
    ),
    HostText(
        file=_MANAGER,
        within="CheckpointEngineManager.__init__",
        text="self.rollout_actors = ",
        why="in Ray mode: asked what they hold",
    ),
    HostText(
        file=_DRIVER,
        within="GRPOTrainer._train_loop",
        text="extra_metrics=self._build_grpo_log_metrics(",
        why="in Ray mode: the trainers log what it returns",
    ),
    HostText(
        file=_REPLICA,
        within="RolloutReplica._spawn_actors",
        text="from .vllm_server import VllmServer",
        why="in Ray mode: replaced, looked up in the module",
    ),
    HostText(
        file=_SERVER,
        within="VllmServer.launch_server",
        text="from .ray_vllm_engine import RayVllmEngine",
        why="in Ray mode: replaced, looked up in the module",
    ),
    HostText(
        file=_ENGINE,
        within="RayVllmEngine.__init__",
        text="engine_kwargs=extra_engine_kwargs",
        why="in Ray mode: takes the name of our part of vLLM's worker",
    ),
    HostText(
        file=_EXTENSION,
        within="WeightSyncWorkerExtension.update_weights_from_ipc",
        text="self.model_runner.model.load_weights(weights=weights)",
        why="in Ray mode: the weights that have come",
    ),
    HostText(
        file=_EXTENSION,
        within="WeightSyncWorkerExtension.update_weights_from_ipc",
        text="finish_vllm_weight_reload(self.model_runner.model",
        why="in Ray mode: layers convert weights in it",
    ),
)

RAY_NAMES: tuple[HostName, ...] = (
    HostName(
        file=_PIPELINE,
        name="MegatronRayPipeline._create_pools",
        parameters=("self",),
        why="replaced: where the job writes",
    ),
    HostName(
        file=_WORKER,
        name="MegatronWorker._init_trainable",
        parameters=("self",),
        why="phase convert",
    ),
    HostName(
        file=_GROUP,
        name="WorkerGroup.__init__",
        parameters=("self", "name", "worker_handles"),
        why="notes the training ranks",
    ),
    HostName(
        file=_GROUP,
        name="WorkerGroup.execute",
        parameters=("self", "method_name"),
        why="replaced: a deadline for each call",
    ),
    HostName(
        file=_GROUP,
        name="WorkerGroup.shutdown",
        parameters=("self",),
        why="replaced: nothing after a failure",
    ),
    HostName(
        file=_GROUP,
        name="WorkerGroup._discover_master",
        parameters=("resource_pool",),
        why="replaced: a port that stays free",
    ),
    HostName(
        file=_REPLICA,
        name="RolloutReplica._spawn_actors",
        parameters=("self",),
        why="notes the engines",
    ),
    HostName(
        file=_REPLICA,
        name="RolloutReplica._parallel_launch_all",
        parameters=("cls", "replicas"),
        why="phase start",
    ),
    HostName(
        file=_MANAGER,
        name="CheckpointEngineManager.wake_up_rollout",
        parameters=("self", "tags"),
        why="communicators give their memory before",
    ),
    HostName(
        file=_WORKER,
        name="MegatronWorker.init_actor",
        parameters=("self", "cfg"),
        why="overridden",
    ),
    HostName(
        file=_WORKER,
        name="MegatronWorker.setup",
        parameters=("self", "args_override"),
        why="overridden: a failure is told",
    ),
    HostName(
        file=_WORKER,
        name="MegatronWorker.train_step",
        parameters=("self",),
        why="overridden: a failure is told",
    ),
    HostName(
        file=_WORKER,
        name="MegatronWorker.compute_logps",
        parameters=("self",),
        why="phase logprob",
    ),
    HostName(
        file=_WORKER,
        name="MegatronWorker.compute_ref_logps",
        parameters=("self",),
        why="phase logprob",
    ),
    HostName(
        file=_WORKER,
        name="MegatronWorker.update_weights",
        parameters=("self",),
        why="phase sync",
    ),
    HostName(
        file=_WORKER,
        name="MegatronWorker.send_checkpoint_weights",
        parameters=("self",),
        why="phase sync",
    ),
    HostName(
        file=_WORKER,
        name="MegatronWorker.offload_to_cpu",
        parameters=("self",),
        why="refused before the bootstrap",
    ),
    HostName(
        file=_WORKER,
        name="MegatronWorker.reload_to_gpu",
        parameters=("self",),
        why="takes the communicators' memory back before",
    ),
    HostName(
        file=_WORKER,
        name="MegatronWorker.finalize",
        parameters=("self",),
        why="overridden: the exit",
    ),
    HostName(
        file=_SENDER,
        name="BucketedWeightSender.__init__",
        parameters=("self",),
        why="replaced: its waits end",
    ),
    HostName(
        file=_ADAPTER,
        name="RolloutAdapter.__init__",
        parameters=("self",),
        why="replaced: a socket of the job's own",
    ),
    HostName(
        file=_ADAPTER,
        name="RolloutAdapter.update_weights",
        parameters=("self", "weight_iter"),
        why="replaced: names the engine",
    ),
)

RAY_TEXTS: tuple[HostText, ...] = (
    HostText(
        file=_PIPELINE,
        within="MegatronRayPipeline.init",
        text="self._build_dataset()",
        why="the driver imports the plugin before it makes actors",
    ),
    HostText(
        file=_PIPELINE,
        within="MegatronRayPipeline.init",
        text="ray.init(ignore_reinit_error=True)",
        why="replaced: marks the actors",
    ),
    HostText(
        file=_PIPELINE,
        within="MegatronRayPipeline._shutdown",
        text="ray.shutdown()",
        why="replaced: ends the job's processes",
    ),
    HostText(
        file="swift/ray/megatron/driver_utils.py",
        within="build_dataset_from_dict",
        text="'_driver_args': args",
        why="the folder that the job writes to",
    ),
    HostText(
        file=_PIPELINE,
        within="MegatronRayPipeline._spawn_train_group",
        text="from .megatron_worker import MegatronWorker",
        why="replaced: looked up in the module",
    ),
    HostText(
        file=_PIPELINE,
        within="MegatronRayPipeline._spawn_train_group",
        text="wg.broadcast('init_actor', cfg",
        why="takes our settings along",
    ),
    HostText(
        file=_WORKER,
        within="MegatronWorker.init_actor",
        text="parse_args_from_dict(MegatronRLHFArguments, cfg)",
        why="imports the plugin in an actor",
    ),
    HostText(
        file=_GROUP,
        within="WorkerGroup.execute",
        text="ray.get(futures)",
        why="replaced: looked up in the module",
    ),
    HostText(
        file="swift/ray/megatron/base_trainer.py",
        within="BaseRayTrainer._distribute_to_replicas",
        text="ray.get(refs)",
        why="replaced: looked up in the module",
    ),
    HostText(
        file=_REPLICA,
        within="RolloutReplica._parallel_launch_all",
        text="ray.get(all_refs)",
        why="replaced: looked up in the module",
    ),
    HostText(
        file=_MANAGER,
        within="CheckpointEngineManager._sync_weights_nccl",
        text="ray.get(train_init_refs + rollout_init_refs)",
        why="replaced: looked up in the module",
    ),
    HostText(
        file=_ADAPTER,
        within="RolloutAdapter.update_weights",
        text="ray.get, rpc_ref",
        why="replaced: looked up in the module",
    ),
    HostText(
        file=_ADAPTER,
        within="RolloutAdapter.__init__",
        text="self.zmq_handle = ",
        why="the socket of a transfer",
    ),
    HostText(
        file=_ADAPTER,
        within="RolloutAdapter.update_weights",
        text="zmq_handle=self.zmq_handle",
        why="the socket of a transfer",
    ),
    HostText(
        file=_SENDER,
        within="BucketedWeightSender.__init__",
        text="self.timeout_ms = ",
        why="the waits of a transfer",
    ),
)

BRIDGE_NAMES: tuple[HostName, ...] = (
    HostName(
        file="mcore_bridge/bridge/gpt_bridge.py",
        name="GPTBridge.__init__",
        parameters=("self", "config"),
        why="as below",
    ),
)

BRIDGE_TEXTS: tuple[HostText, ...] = (
    HostText(
        file="mcore_bridge/bridge/gpt_bridge.py",
        within="GPTBridge.__init__",
        text="if EP_PP_GROUP is None",
        why="finds the groups that we have created",
    ),
    HostText(
        file="mcore_bridge/bridge/gpt_bridge.py",
        within="GPTBridge.__init__",
        text="order='tp-cp-ep-dp-pp'",
        why="the ranks of those groups",
    ),
)


def check_swift(swift: Path, bridge: Path) -> None:
    """Refuses an ms-swift or mcore-bridge that lacks something that this adapter needs.

    Args:
        swift: The folder that holds the package ``swift``.
        bridge: The folder that holds ``mcore_bridge``.

    Raises:
        ConfigError: If something is missing; names it.
    """
    _check("ms-swift", swift, NAMES, TEXTS)
    _check("mcore-bridge", bridge, BRIDGE_NAMES, BRIDGE_TEXTS)


def check_grpo(swift: Path) -> None:
    """Does the same as `check_swift`, for GRPO in ms-swift's own trainer."""
    _check("ms-swift", swift, GRPO_NAMES, GRPO_TEXTS)


def check_proved(swift: Path) -> None:
    """Does the same as `check_swift`, for proved weight syncs."""
    _check("ms-swift", swift, PROOF_NAMES, PROOF_TEXTS)


def check_ray_mode(swift: Path) -> None:
    """Does the same as `check_swift`, for Ray mode."""
    _check("ms-swift", swift, RAY_NAMES, RAY_TEXTS)


def _check(host: str, root: Path, names: tuple[HostName, ...], texts: tuple[HostText, ...]) -> None:
    if lack := lacking(root, names, texts):
        raise ConfigError(
            f"the {host} in {root} lacks {lack}, which rl_safe_workers needs: use ms-swift {SINCE} to {UNTIL} "
            "(docs/swift.md), or remove our plugin"
        )
