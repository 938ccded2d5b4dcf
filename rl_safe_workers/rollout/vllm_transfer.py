"""Implements vLLM's side of the weight sync: a weight-transfer engine that receives over our joint group.

It is registered with vLLM's own factory, so that vLLM runs it inside its update life cycle
(``start_weight_update``, ``update_weights``, ``finish_weight_update``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.ranks import joint_ids
from rl_safe_workers.rollout.direct_load import DirectLoad
from rl_safe_workers.rollout.engine_places import EngineRank
from rl_safe_workers.rollout.packing import unpack
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec, plan_buckets
from rl_safe_workers.rollout.read_back import ReadBack
from rl_safe_workers.rollout.sync_proof import HeldWeights
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.gpu_pair import GpuPair
from rl_safe_workers.worlds.joint_group import JointGroup, joint_world
from rl_safe_workers.worlds.store import connect_store

logger = logging.getLogger(__name__)

_NOT_TRIED, _NOT_PROVEN = "there was no update so far", "the first update goes through them"
BACKEND = "rl_safe_joint"
"""Name of the engine in ``weight_transfer_config``."""


@dataclass
class JointInitInfo(WeightTransferInitInfo):
    """The data that this rank needs to join the joint group."""

    host: str
    port: int
    secret: str = field(repr=False)
    """The run's secret in hexadecimal digits."""
    rollout_rank: int
    rollout_ranks: list[int]
    """Rollout ranks in the group, ascending."""
    trainers: int
    generation: int
    join_timeout_s: float
    sync_timeout_s: float
    colocated: bool
    specs: list[dict[str, Any]]
    """Fields of each `WeightSpec`, in the order of sending."""
    bucket_bytes: int
    """Largest size of a bucket in bytes, the same on both sides."""


@dataclass
class JointUpdateInfo(WeightTransferUpdateInfo):
    """The data of an update. `JointInitInfo` has announced the weights of all updates."""

    prove: bool = False
    """True if the weights are read back afterwards."""


class JointWeightTransferEngine(WeightTransferEngine[JointInitInfo, JointUpdateInfo]):
    """Receives flat buckets from the trainers. Loads them layer by layer, or by a plan when the plan is proven."""

    init_info_cls = JointInitInfo
    update_info_cls = JointUpdateInfo
    _group: JointGroup | GpuPair | None = None
    _buckets: Sequence[Bucket] = ()
    _plan: DirectLoad | None = None
    """Plan to load buckets without the model's loaders; None before the first update, or if no plan works."""
    obstacle: str | None = _NOT_TRIED
    """The reason why updates use the model's loaders; None if they are copied directly into the model."""
    held: HeldWeights | None = None
    """The weights that the model holds after the last update; None unless that was to be proved."""
    _specs: Sequence[WeightSpec] = ()
    _read_back: ReadBack | None = None
    _is_broken = False
    """True if an update by vLLM's loaders has failed before its end. Some layers then still wait for weights."""

    def init_transfer_engine(self, init_info: JointInitInfo) -> None:
        """Joins the joint group. Collective over: trainers and rollout ranks.

        Raises:
            CommunicatorError: If the run's store cannot be reached.
            PhaseTimeoutError: If a rank does not come in time; names it.
            WeightSyncError: If the group cannot be connected.
        """
        self._leave(failed=init_info.generation > 0)
        timeout = timedelta(seconds=init_info.join_timeout_s)
        secret = bytes.fromhex(init_info.secret)
        store = connect_store(StoreAddress(host=init_info.host, port=init_info.port, secret=secret), timeout=timeout)
        control = ControlPlane(
            store,
            world=joint_world(init_info.generation),
            rank=init_info.trainers + init_info.rollout_ranks.index(init_info.rollout_rank),
            members=joint_ids(
                trainers=init_info.trainers,
                size=init_info.trainers + len(init_info.rollout_ranks),
                rollout_ranks=init_info.rollout_ranks,
            ),
            secret=secret,
        )
        self._group = (GpuPair if init_info.colocated else JointGroup)(
            control,
            generation=init_info.generation,
            timeout=timeout,
            device=self.device,
            sync_timeout=timedelta(seconds=init_info.sync_timeout_s),
        )
        specs = [WeightSpec(**{**fields, "shape": tuple(fields["shape"])}) for fields in init_info.specs]
        self._specs = specs
        buckets = plan_buckets(specs, bucket_bytes=init_info.bucket_bytes)
        if buckets != self._buckets:
            self._buckets, self.obstacle, self._plan = buckets, _NOT_TRIED, None

    def start_weight_update(self) -> None:
        """Does nothing; `receive_weights` makes all preparations."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Receives all weights. Collective over: the joint group. Blocks until they are loaded."""
        # The base class also synchronises an accelerator, which a CPU build does not have. Here `flush` does that.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: JointUpdateInfo) -> None:
        """Receives the buckets and loads each when it arrives. Collective over: the joint group.

        Raises:
            WeightSyncError: If this rank has not joined the joint group, a peer is gone, or weights come too late.
        """
        if self._group is None:
            raise WeightSyncError("this rollout rank has not joined the joint group")
        self.held = None
        if self._read_back is not None:
            self._read_back.stop()
        with _vllm_config(self.vllm_config):
            if self._is_broken:
                self._give_layers_back()
            self._read_back = ReadBack(self.model, self._specs, self._engine_rank()) if update_info.prove else None
            self._prepare()
            # `finish_weight_update` resets it. An update by the plan can be repeated after a failure.
            self._is_broken = self.obstacle is not None
            self._receive_buckets(self._group)
            self._group.flush()

    def _receive_buckets(self, group: JointGroup | GpuPair) -> None:
        """Starts to load all buckets. Keeps no reference to their memory, which may be the trainer's."""
        buffers = group.buffers(max((bucket.size_bytes for bucket in self._buckets), default=0))
        arriving: tuple[int, Bucket, torch.Tensor, Callable[[], None]] | None = None
        for number, bucket in enumerate(self._buckets):
            buffer = buffers[number % len(buffers)][: bucket.size_bytes]
            wait = group.broadcast(buffer, source=bucket.source)
            # After the next broadcast has started, so that one bucket is loaded while the next one arrives.
            if arriving is not None:
                self._load(*arriving)
            arriving = (number, bucket, buffer, wait)
        if arriving is not None:
            self._load(*arriving)

    def _engine_rank(self) -> EngineRank:
        return EngineRank(
            rank=get_tensor_model_parallel_rank(),
            size=self.vllm_config.parallel_config.tensor_parallel_size,
            kv_heads=self.model_config.get_total_num_kv_heads(),
        )

    def _prepare(self) -> None:
        if self.obstacle is None:
            return
        if self.obstacle == _NOT_TRIED:
            self.obstacle = _computes(self.model)
            if self.obstacle is None:
                parts = self.vllm_config.parallel_config.tensor_parallel_size
                self._plan = DirectLoad(self._buckets, self.model.load_weights, device=self.device, parts=parts)
                self.obstacle = self._plan.obstacle or _NOT_PROVEN
        if self._read_back is not None:
            self._read_back.watch()
        # Every layer now accepts weights in checkpoint layout.
        initialize_layerwise_reload(self.model)

    def _give_layers_back(self) -> None:
        """Ends a failed update: layers that still wait for weights get their old weights back."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        self._is_broken, self.obstacle, self._plan = False, _NOT_TRIED, None

    def _load(self, number: int, bucket: Bucket, buffer: torch.Tensor, wait: Callable[[], None]) -> None:
        wait()
        if self._plan is not None and self.obstacle is None:
            self._plan.load(number, buffer)
            return
        if self._plan is not None:
            self._plan.note(number, buffer)
        # vLLM keeps weights until their layer is complete, and this buffer is soon used again.
        self.model.load_weights(unpack(bucket, buffer.clone()))

    def finish_weight_update(self) -> None:
        """Converts the loaded weights to the layout of the kernels, and reads them back if they are to be proved.

        After an update by the plan nothing is converted.
        """
        if self.obstacle is not None:
            self._finish_loading()
        if self._read_back is not None:
            self.held, self._read_back = self._read_back.finish(), None

    def _finish_loading(self) -> None:
        self._is_broken = False
        with _vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._prepack_experts()
        if self._plan is not None:
            self.obstacle = self._plan.check(self.model.parameters())
            if self.obstacle is not None:
                self._plan = None
            logger.info(
                "weight updates go %s",
                "straight into the model" if self.obstacle is None else f"through the model's loaders: {self.obstacle}",
            )

    def _prepack_experts(self) -> None:
        """Repacks expert weights, which vLLM's CPU backend does on the first load only.

        Without this, a reload leaves raw weights in packed storage and the model is silently wrong: log-probabilities
        differ by 0.55 (vLLM 0.32, unquantized_fused_moe_method.py:191-205).
        """
        for name, module in self.model.named_modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and hasattr(module, "w13_weight"):
                prepack = partial(kernel.fused_experts.process_weights_after_loading, module)
                if self._read_back is None:
                    prepack()
                else:
                    self._read_back.around(name, prepack)

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Always raises; vLLM 0.25 requires the method. Our trainers send with `WeightSync.send_weights`.

        Raises:
            WeightSyncError: Always.
        """
        raise WeightSyncError("trainers send with WeightSync.send_weights")

    def shutdown(self) -> None:
        """Leaves the joint group. Not collective. Idempotent."""
        self._leave(failed=False)

    def _leave(self, *, failed: bool) -> None:
        group, self._group = self._group, None
        if group is not None:
            (group.abort if failed else group.close)()


@contextmanager
def _vllm_config(config: VllmConfig) -> Iterator[None]:
    """Makes the engine's configuration vLLM's current one while the body runs, because some layers read it.

    vLLM 0.32 does this itself; vLLM 0.25 does not (v1/worker/gpu_worker.py:1208).
    """
    with nullcontext() if get_current_vllm_config_or_none() else set_current_vllm_config(config):
        yield


def _computes(model: torch.nn.Module) -> str | None:
    """Returns the part of a model that derives values from its weights; None if there is none.

    Quantisation and latent attention derive such values.
    """
    for module in model.modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method != "NoneType" and not method.startswith("Unquantized"):
            return f"{method} computes from the weights"
        if "MLA" in type(module).__name__:
            return f"{type(module).__name__} computes from the weights"
    return None


def register() -> None:
    """Registers the engine with vLLM in this process. Idempotent."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, JointWeightTransferEngine)
