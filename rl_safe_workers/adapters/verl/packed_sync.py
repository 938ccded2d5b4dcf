"""Packs the weights of verl's weight syncs: the trainers' side.

verl exports weights one by one over its trainers' groups, and sends each as a tensor of its own. Here each weight goes
once, in a bucket, from a rank that has it. `vllm_engine` unpacks the buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from rl_safe_workers.models.conversion_tasks import own_weights_of_tasks
from rl_safe_workers.models.own_weights import OwnWeight, difference_from_export
from rl_safe_workers.rollout.packed_updates import bucket_tensor, plan_tensor
from rl_safe_workers.rollout.packing import NamedTensor, dtype_name
from rl_safe_workers.rollout.protocol import ITEM_BYTES
from rl_safe_workers.rollout.sent_digests import SentDigests
from rl_safe_workers.workers.packed_export import PackedExport

logger = logging.getLogger(__name__)

BUCKET_BYTES = 256 * 2**20
"""Most bytes of weights in a bucket, if verl's own buckets are not smaller. A larger weight has a bucket of its own."""


class PackedSync:
    """Yields the weights that an engine sends. The first sync is verl's own. Later ones are packed if possible."""

    def __init__(self, engine: Any, *, host_bytes: int) -> None:
        """Stores its arguments.

        Args:
            engine: verl's Megatron engine.
            host_bytes: Size of verl's own buckets, in bytes.
        """
        self._engine, self._host_bytes = engine, host_bytes
        self._export: PackedExport | None = None
        self._is_planned = False

    @property
    def is_ready(self) -> bool:
        """True if the next sync is packed. The same on every rank."""
        return self._export is not None

    def weights(self, exported: Iterable[NamedTensor], digests: SentDigests | None) -> Iterator[NamedTensor]:
        """Yields the tensors of a sync. Collective over: the training world, at each item.

        Args:
            exported: verl's own export, which has not begun. It is not used if the sync is packed.
            digests: Takes digests of the weights that this rank packs; None if the sync is not to be proved.

        Raises:
            WeightSyncError: If a weight is not as it was planned.
        """
        if self._export is not None:
            yield from self._packed(self._export, digests)
            return
        form: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for name, weight in exported:
            form[name] = weight.shape, weight.dtype
            yield name, weight
        if not self._is_planned:
            self._is_planned = True
            self._plan(form)

    def _packed(self, export: PackedExport, digests: SentDigests | None) -> Iterator[NamedTensor]:
        device = next(self._engine.module[0].parameters()).device
        yield plan_tensor(export.buckets, device=device)
        buffers = export.tensors(device, digests=digests)
        for number in range(len(export.buckets)):
            buffer = next(buffers)
            if buffer.nbytes > self._host_bytes and buffer.is_cuda:
                # verl lets the engine read such a tensor in place, perhaps before it is complete
                # (bucketed_weight_transfer.py: _direct_send_large_weight).
                torch.cuda.current_stream(device).synchronize()
            yield bucket_tensor(number, buffer)
            del buffer  # before the next one is made

    @torch.no_grad()
    def _plan(self, form: dict[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Finds out which rank has which weight. Collective over: the training world."""
        own = self._own_weights(form)
        if isinstance(own, str):
            if dist.get_rank() == 0:
                logger.warning("rl_safe: weight syncs are not packed: %s", own)
            return
        self._export = PackedExport(
            own, training_rank=dist.get_rank(), bucket_bytes=min(BUCKET_BYTES, self._host_bytes)
        )
        if dist.get_rank() == 0:
            logger.warning(
                "rl_safe: later weight syncs send %d weights in %d buckets", len(form), len(self._export.buckets)
            )

    def _own_weights(self, form: dict[str, tuple[torch.Size, torch.dtype]]) -> list[OwnWeight] | str:
        engine = self._engine
        for name, (_, dtype) in form.items():
            if dtype_name(dtype) not in ITEM_BYTES:
                return f"{name} is {dtype}"
        if engine.vanilla_bridge:
            if not hasattr(engine.bridge, "own_weights"):
                return "mbridge does not tell which rank has which weight; use Megatron-Bridge (vanilla_mbridge=false)"
            # The bridge of `local_layers`.
            found: list[OwnWeight] = engine.bridge.own_weights(engine.module)
            return difference_from_export(found, form) or found
        tasks = engine._mbridge_export_tasks()
        if tasks is None:
            return "the export converts weights to fp8"
        return own_weights_of_tasks(engine.bridge, engine.module, filter(None, tasks), form)
