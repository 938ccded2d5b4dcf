"""Implements vLLM's side of the weight sync: a weight-transfer engine that receives over our joint group.

The engine is registered with vLLM's own factory, so vLLM runs it inside its update life cycle
(``start_weight_update``, ``update_weights``, ``finish_weight_update``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
from vllm.config import VllmConfig, WeightTransferConfig, get_current_vllm_config_or_none, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.rollout.cuts import ONLY_RANK, BucketPart, EngineRank, engine_ranks, plan_parts
from rl_safe_workers.rollout.direct_load import DirectLoad, LearnedLoad
from rl_safe_workers.rollout.packing import whole_weights
from rl_safe_workers.rollout.part_reads import PartReads
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec
from rl_safe_workers.rollout.read_back import ReadBack, engine_rank
from rl_safe_workers.rollout.sync_proof import HeldWeights
from rl_safe_workers.setting_names import timeout_setting
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.gpu_pair import GpuPair
from rl_safe_workers.worlds.joint_group import JointGroup, joint_control, wait_for_stream

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
    kv_heads: int
    """Number of key-value heads by which the trainers cut weights for the ranks of an engine."""


@dataclass
class JointUpdateInfo(WeightTransferUpdateInfo):
    """The data of an update. `JointInitInfo` has announced the weights of all updates."""

    prove: bool = False
    """True if the weights are read back afterwards."""


class JointWeightTransferEngine(WeightTransferEngine[JointInitInfo, JointUpdateInfo]):
    """Receives flat buckets from the trainers. Loads them layer by layer, or by a proven plan."""

    init_info_cls = JointInitInfo
    update_info_cls = JointUpdateInfo
    _group: JointGroup | GpuPair | None = None
    _buckets: Sequence[tuple[Bucket, Sequence[BucketPart]]] = ()
    """All buckets of an update, each with the parts of the engine's ranks."""
    _rank: EngineRank = ONLY_RANK
    _sync_timeout = timedelta()
    """Longest wait for a bucket."""
    held: HeldWeights | None = None
    """The weights that the model holds after the last update; None if that update was not to be proved."""
    _specs: Sequence[WeightSpec] = ()
    _read_back: ReadBack | None = None
    _reads: PartReads
    """Checks what the model's loaders read in this update."""
    _is_broken = False
    """True if an update by vLLM's loaders has failed before its end. Some layers then still wait for weights."""
    weight_loader: Callable[[Iterator[tuple[str, torch.Tensor]]], object] | None = None
    """Loads whole weights in place of the model's ``load_weights``; None to use ``load_weights``."""

    @cached_property
    def _loading(self) -> LearnedLoad:
        """Decides how the buckets get into the model. Made at its first use: vLLM's base class has the constructor."""
        return LearnedLoad()

    @property
    def obstacle(self) -> str | None:
        """The reason why updates use the model's loaders; None if they are copied directly into the model."""
        return self._loading.obstacle

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
        self._rank = self._engine_rank(init_info.kv_heads)
        control = joint_control(
            StoreAddress(host=init_info.host, port=init_info.port, secret=secret),
            generation=init_info.generation,
            joint_rank=init_info.trainers + init_info.rollout_ranks.index(init_info.rollout_rank),
            trainers=init_info.trainers,
            rollout_ranks=init_info.rollout_ranks,
            timeout=timeout,
        )
        self._group = (GpuPair if init_info.colocated else JointGroup)(
            control,
            generation=init_info.generation,
            timeout=timeout,
            device=self.device,
            sync_timeout=timedelta(seconds=init_info.sync_timeout_s),
            parts=self._rank.size,
        )
        self._sync_timeout = timedelta(seconds=init_info.sync_timeout_s)
        specs = [WeightSpec(**{**fields, "shape": tuple(fields["shape"])}) for fields in init_info.specs]
        self._specs = specs
        rank = self._rank
        ranks = engine_ranks(rank.size, rank.kv_heads, expert_parallel=rank.expert_parallel)
        buckets = plan_parts(specs, ranks, bucket_bytes=init_info.bucket_bytes)
        if buckets != self._buckets:
            self._buckets = buckets
            self._loading.forget()

    def start_weight_update(self) -> None:
        """Does nothing; `receive_weights` makes all preparations."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Receives all weights. Collective over: the joint group. Blocks until they are loaded."""
        # The base class also synchronises an accelerator, which a CPU build does not have. Here `flush` does that.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: JointUpdateInfo) -> None:
        """Receives the buckets and loads each when it arrives. Collective over: the joint group.

        Raises:
            WeightSyncError: If this rank has not joined the joint group, a peer is gone, or weights come too late. This
                rank leaves the group after this and any other error.
        """
        if self._group is None:
            raise WeightSyncError("this rollout rank has not joined the joint group")
        try:
            self.held = None
            if self._read_back is not None:
                self._read_back.stop()
            with _vllm_config(self.vllm_config):
                if self._is_broken:
                    self._give_layers_back()
                self._read_back = ReadBack(self.model, self._specs, self._rank) if update_info.prove else None
                self._prepare()
                # `finish_weight_update` resets it. An update by the plan can be repeated after a failure.
                self._is_broken = self.obstacle is not None
                self._receive_buckets(self._group)
                self._group.flush()
        except Exception:
            # With gloo, the other ranks then fail at once. With NCCL, they fail in `flush`.
            self._leave(failed=True)
            raise

    def _receive_buckets(self, group: JointGroup | GpuPair) -> None:
        """Receives all buckets and starts to load them. Keeps no reference to their memory: it may be the trainer's."""
        mine = self._rank.rank
        sizes = [parts[-1].end if group.has_all_parts else parts[mine].bucket.size_bytes for _, parts in self._buckets]
        buffers = group.buffers(max(sizes, default=0))
        arriving: tuple[int, torch.Tensor, Callable[[], None]] | None = None
        for number, (bucket, parts) in enumerate(self._buckets):
            start = parts[mine].start if group.has_all_parts else 0
            buffer = buffers[number % len(buffers)][start : start + parts[mine].bucket.size_bytes]
            # The group uses this rank's part only.
            wait = group.broadcast(*[buffer] * len(parts), source=bucket.source)
            # Load a bucket once the next broadcast has started. It is then loaded while the next one arrives.
            if arriving is not None:
                self._load(*arriving)
            if self._read_back is not None and self.obstacle is None and number == len(self._buckets) // 2:
                # Prepare half-way. Earlier, the first bucket would wait for this. Later, the proof would.
                self._read_back.prepare()
            arriving = (number, buffer, wait)
        if arriving is not None:
            self._load(*arriving)

    def _engine_rank(self, kv_heads: int) -> EngineRank:
        rank = engine_rank(self.vllm_config, get_tensor_model_parallel_rank())
        if rank.size > 1 and rank.kv_heads != kv_heads:
            raise WeightSyncError(
                f"vLLM cuts weights by {rank.kv_heads} key-value heads, and the trainers by {kv_heads}"
            )
        return rank

    def _prepare(self) -> None:
        if self.obstacle is None:
            return
        mine = [(bucket, parts[self._rank.rank]) for bucket, parts in self._buckets]
        learn = partial(DirectLoad, mine, self._load_weights, device=self.device, parts=self._rank.size)
        self._loading.begin([self.model], learn)
        self._reads = PartReads()
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
        self._is_broken = False
        self._loading.forget()

    def _load(self, number: int, buffer: torch.Tensor, wait: Callable[[], None]) -> None:
        wait()
        if self._loading.load(number, buffer):
            return
        self._await_arrival()
        self._loading.note(number, buffer)
        # Copy the weights: vLLM keeps them until their layer is complete, but this buffer is soon used again.
        bucket, parts = self._buckets[number]
        weights = whole_weights(bucket, parts[self._rank.rank], buffer, device=self.device)
        self._reads.watch(weights, parts[self._rank.rank])
        with self._checked_reads():
            self._load_weights(iter(weights))

    def _load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> object:
        return (self.weight_loader or self.model.load_weights)(weights)

    def _await_arrival(self) -> None:
        """Waits until the current bucket has arrived.

        The loaders launch thousands of copies. A CUDA stream that waits for a peer queues some 1,000 of them. The next
        launch would then block without a deadline.
        """
        if self.device.type == "cuda" and not wait_for_stream(self.device, self._sync_timeout):
            setting = timeout_setting(Phase.SYNC)
            raise WeightSyncError(f"weights did not arrive in time: a peer is gone, or raise {setting}")

    @contextmanager
    def _checked_reads(self) -> Iterator[None]:
        """Checks what the model's loaders read, if the engine has several ranks.

        Raises:
            WeightSyncError: If they read more of a weight than was sent to this rank.
        """
        if self._rank.size == 1:
            yield
            return
        with self._reads:
            yield
        if self._reads.outside is not None:
            raise WeightSyncError(f"rank {self._rank.rank} of the engine: {self._reads.outside}")

    def finish_weight_update(self) -> None:
        """Converts the loaded weights to the layout of the kernels, and reads them back if they are to be proved.

        It converts nothing after an update by the plan.
        """
        if self.obstacle is not None:
            self._finish_loading()
        if self._read_back is not None:
            self.held, self._read_back = self._read_back.finish(), None

    def _finish_loading(self) -> None:
        self._is_broken = False
        with _vllm_config(self.vllm_config), self._checked_reads():
            finalize_layerwise_reload(self.model, self.model_config)
        self._reads = PartReads()
        if self.device.type == "cpu":
            self._prepack_experts()
        self._loading.end(self.model.parameters())

    def _prepack_experts(self) -> None:
        """Repacks expert weights. vLLM's CPU backend itself does so on the first load only.

        Without this, a reload leaves raw weights in packed storage. The model is then silently wrong: log-probabilities
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


def make_transfer_engine(
    vllm_config: VllmConfig,
    model: torch.nn.Module,
    *,
    device: torch.device,
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
) -> JointWeightTransferEngine:
    """Makes a transfer engine for a worker whose vLLM was not configured to make one.

    Args:
        vllm_config: The worker's configuration.
        model: The worker's part of the model.
        device: Device of the model.
        load: Loads whole weights into the model.
    """
    made = JointWeightTransferEngine(WeightTransferConfig(backend=BACKEND), vllm_config, device, model)
    made.weight_loader = load
    return made


def register() -> None:
    """Registers the engine with vLLM in this process. Idempotent."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, JointWeightTransferEngine)
