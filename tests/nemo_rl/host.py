"""A small host with the names of NeMo RL's Megatron policy worker module, on gloo, over this repository's own model.

Its functions do what theirs do in the same order; what they leave to Megatron-Bridge, such as its save, is done here
with megatron-core: two barriers, the fully parallel wrapper, validation.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed import PrefixStore
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.adapters.nemo_rl.mixin import SafePolicyMixin
from rl_safe_workers.checkpoint.state.model_state import model_state
from rl_safe_workers.checkpoint.state.state import CONTENT_METADATA, sharded_state, state_digest
from rl_safe_workers.platforms import cpu
from rl_safe_workers.trainer.policy import MegatronPolicy
from tests.distributed.recording import recorded_collectives
from tests.distributed.worker import run_config
from tests.nemo_rl.sending import misbehave, send_weights

TRACKER = "latest_checkpointed_iteration.txt"


class Policy(MegatronPolicy):
    """The model that stands for Bridge's."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.device = (
            run_config(
                Path(config["model_name"]), ep=2, pp=config["megatron_cfg"].get("pipeline_model_parallel_size", 1)
            ),
            torch.device("cpu"),
        )
        self.config.model.bridge = config.get("bridge", "auto")


def setup_distributed() -> None:
    cpu.apply()
    dist.init_process_group("gloo")


def initialize(config: dict[str, Any]) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=config["megatron_cfg"].get("pipeline_model_parallel_size", 1),
        expert_model_parallel_size=config["megatron_cfg"]["expert_model_parallel_size"],
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)


class GlobalState:
    """The part of Bridge's that its saves in the background read."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self._async_calls_queue: Any = None

    def initialize_async_checkpoint_worker(self) -> None:
        raise AssertionError("a process for saves in the background was started")

    @property
    def async_calls_queue(self) -> Any:
        return self._async_calls_queue


def bridge_save(
    state: dict[str, Any],
    root: Path,
    iteration: str,
    *,
    background: GlobalState | None = None,
    finish: Callable[[], None] = lambda: None,
) -> None:
    """As Bridge saves: both of megatron-core's flags on, barriers, and its own files last."""
    directory = root / iteration
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), group)
    request = dist_checkpointing.save(
        state,
        str(directory),
        strategy,
        validate_access_integrity=True,
        async_sharded_save=background is not None,
        content_metadata=dict(CONTENT_METADATA),
    )

    def write_own_files() -> None:
        finish()
        if dist.get_rank() == 0:
            (root / TRACKER).write_text("0")
            (directory / "run_config.yaml").write_text(f"save: {root}\n")

    if background is not None:
        request.add_finalize_fn(write_own_files)
        request.add_finalize_fn(lambda: dist.barrier())
        background.async_calls_queue.schedule_async_request(request)
        return
    dist.barrier()
    write_own_files()
    dist.barrier()


def handle_model_import(
    config: dict[str, Any],
    hf_model_name: str,
    pretrained_path: str,
    pt_checkpoint_exists: bool,
    model_post_wrap_hook: Any = None,
    transformer_layer_spec: Any = None,
    mamba_stack_spec: Any = None,
) -> None:
    if pt_checkpoint_exists and not config["megatron_cfg"].get("force_reconvert_from_hf"):
        return
    initialize(config)
    policy = Policy(config)
    policy.build()
    if late_s := config.get("late_s", {}).get(dist.get_rank()):
        time.sleep(late_s)
    if config.get("fails_on") == dist.get_rank():
        raise OSError("no space left on device")
    bridge_save(model_state(policy.chunks), Path(pretrained_path), "iter_0000000")
    if config.get("killed_importing"):
        os._exit(1)  # everybody, as the host's launcher ends what is left
    parallel_state.destroy_model_parallel()


def setup_model_and_optimizer(
    policy_cfg: dict[str, Any], megatron_cfg: Any, load_optimizer: bool = True, **kwargs: Any
) -> Any:
    if not policy_cfg.get("no_groups"):
        initialize(policy_cfg)
    state = GlobalState(megatron_cfg)
    if getattr(megatron_cfg.checkpoint, "async_save", False):
        state.initialize_async_checkpoint_worker()
    policy = Policy(policy_cfg)
    policy.build()
    return SimpleNamespace(policy=policy, state=state)


class HostImpl:
    """The order of calls of MegatronPolicyWorkerImpl."""

    def __init__(self, config: dict[str, Any], *, worker_sharding_annotations: Any = None, **kwargs: Any) -> None:
        self.cfg = config
        self.events: list[str] = []
        setup_distributed()
        self.rank = dist.get_rank()
        path = Path(config["converted"])
        exists = (path / "iter_0000000").exists()
        handle_model_import(config, config["model_name"], str(path), exists, model_post_wrap_hook=None)
        megatron_cfg = SimpleNamespace(
            checkpoint=SimpleNamespace(fully_parallel_save=True, **config.get("checkpoint", {})),
            model=SimpleNamespace(num_moe_experts=8, share_embeddings_and_output_weights=False),
            ddp=SimpleNamespace(use_distributed_optimizer=True),
        )
        made = setup_model_and_optimizer(config, megatron_cfg, True, load_weights=True)
        self.mcore_state, self.policy = made.state, made.policy
        self.model = self.policy.chunks[0]

    @staticmethod
    def configure_worker(num_gpus: Any, bundle_indices: Any = None, num_gpus_per_node: Any = None) -> Any:
        return {"num_gpus": 0}, {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}, {}, {}

    def _misbehave_in(self, call: str) -> None:
        if misdeed := self.cfg.get(f"in_{call}", {}).get(self.rank):
            misbehave(misdeed)

    def train(self, data: Any) -> dict[str, Any]:
        self._misbehave_in("train")
        shards = parallel_state.get_data_parallel_world_size()
        rank = parallel_state.get_data_parallel_rank()
        per_rank = len(data) // shards
        shard = data.select(slice(rank * per_rank, (rank + 1) * per_rank))
        shard = shard.with_logprobs(old=shard.rollout_logprobs)
        (metrics,) = self.policy.update_policy(shard, mini_batch_size=len(shard))
        dist.all_reduce(torch.ones(1), group=parallel_state.get_data_parallel_group())
        # Was the update successful, and how large was the gradient: megatron_policy_worker.py:965.
        dist.all_reduce(torch.ones(1), group=parallel_state.get_model_parallel_group())
        stages = parallel_state.get_pipeline_model_parallel_group()
        dist.all_gather_object([None] * stages.size(), True, group=stages)
        self.events.append("train")
        return metrics

    def finish_train_step(self) -> dict[str, Any]:
        return {}

    def get_logprobs(self, *, data: Any, micro_batch_size: int | None = None) -> Any:
        return self.policy.compute_logprobs(data)

    def get_reference_policy_logprobs(self, *, data: Any, micro_batch_size: int | None = None) -> Any:
        with self._around_forward("reference"):
            return self.get_logprobs(data=data)

    def get_topk_logits(self, *, data: Any, k: int, micro_batch_size: int | None = None) -> None:
        with self._around_forward("topk"):
            pass

    def calibrate_qkv_fp8_scales(self, *, data: Any, micro_batch_size: int | None = None) -> None:
        with self._around_forward("calibrate"):
            pass

    @contextmanager
    def _around_forward(self, call: str) -> Iterator[None]:
        """Stands for the collectives that a call issues before and after its forward batch."""
        trainer = self.safe.trainer  # type: ignore[attr-defined]
        self.events.append(f"{call} in {trainer.lifecycle.current}")
        yield
        self.events.append(f"{call} in {trainer.lifecycle.current}")

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        self.events.append("prepare_for_lp_inference")

    def offload_before_refit(self) -> None:
        self.finalize_async_save()
        self.events.append("offload_before_refit")

    def offload_after_refit(self) -> None:
        self.finalize_async_save()
        self.offload_before_refit()

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> None:
        self.events.append("init_collective")

    def init_nccl_reshard_comm_group(self, pp_ips: list[str]) -> None:
        self.events.append("init_nccl_reshard_comm_group")

    def init_collective_mcore_generation(
        self, ip: str, port: int, world_size: int, rank_offset: int, refit_backend: str = "gloo"
    ) -> None:
        rank = dist.get_rank() + rank_offset
        store = PrefixStore("refit/", dist.TCPStore(ip, port, world_size, is_master=rank == 0))
        self.refit_pg = dist.ProcessGroup(store, rank, world_size)
        backend = dist.ProcessGroupGloo(PrefixStore("cpu/", store), rank, world_size)
        self.refit_pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        self.refit_pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.refit_pg._set_group_name("refit")
        c10d._world.pg_group_ranks[self.refit_pg] = {i: i for i in range(world_size)}
        c10d._world.pg_map[self.refit_pg] = ("gloo", store)
        c10d._world.pg_names[self.refit_pg] = "refit"

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None, **kwargs: Any) -> None:
        self._misbehave_in("save")
        if self.cfg.get("fails_saving_on") == self.rank:
            raise OSError("no space left on device")
        state = sharded_state(
            self.policy.chunks,
            self.policy.optimizer,
            training_rank=self.rank,
            size=dist.get_world_size(),
            is_loading=False,
        )
        is_async = getattr(self.mcore_state.cfg.checkpoint, "async_save", False)
        if is_async:
            self.mcore_state.async_calls_queue.maybe_finalize_async_calls(True)
        bridge_save(
            state,
            Path(weights_path),
            "iter_0000000",
            background=self.mcore_state if is_async else None,
            finish=self.finish_save,
        )

    def finish_save(self) -> None:
        if self.cfg.get("fails_finishing_on") == self.rank:
            raise OSError("no space left on device")

    def finalize_async_save(self) -> None:
        if self.mcore_state.async_calls_queue is not None:
            self.mcore_state.async_calls_queue.maybe_finalize_async_calls(True)

    def prepare_refit_info(self) -> dict[str, Any]:
        """As NeMo RL's, over Bridge's export: the weights of all ranks are gathered."""
        return {name: (weight.shape, weight.dtype) for name, weight in self._iter_params_with_optional_kv_scales()}

    def _iter_params_with_optional_kv_scales(self, kv_scales: Any = None) -> Iterator[Any]:
        yield from self.policy.export_hf_weights()

    def broadcast_weights_for_collective(self, kv_scales: Any = None, **buffers: Any) -> int:
        refit = self.cfg.get("refit", {}).get(self.rank)
        engine = self.cfg.get("engine") if self.rank == 0 else None
        return send_weights(self._iter_params_with_optional_kv_scales(kv_scales), refit, engine=engine)

    def stream_weights_via_ipc_zmq(self, buffer_size_bytes: int = 0, kv_scales: Any = None) -> int:
        return self.broadcast_weights_for_collective()

    def shutdown(self) -> bool:
        self.events.append("shutdown")
        return True

    def digest(self) -> str:
        return state_digest(self.policy.chunks, self.policy.optimizer)


class SafeWorker(SafePolicyMixin, HostImpl):
    """Ours over it."""

    host_module = __name__

    def count_collectives(self, method: str, *args: Any) -> dict[str, int]:
        """How often a call issued each collective on the default group."""
        with recorded_collectives() as found:
            getattr(self, method)(*args)
        counts: dict[str, int] = {}
        for collective in found:
            key = f"{collective.group or 'default'} {collective.op}"
            counts[key] = counts.get(key, 0) + 1
        return counts


def set_environment(rank: int, size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


@functools.cache
def annotations(size: int) -> Any:
    """The parts of NeMo RL's NamedSharding that tell how many workers there are."""
    return SimpleNamespace(size=size)
