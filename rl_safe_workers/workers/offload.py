"""The offload mixin: Megatron state out of the rollout's way and back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rl_safe_workers.errors import LifecycleError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.workers.comms import CommsMixin

USES_STATE = frozenset({Phase.CONVERT, Phase.LOAD, Phase.LOGPROB, Phase.TRAIN, Phase.SYNC, Phase.SAVE})
"""Phases that read or write parameters, gradients or optimizer state."""


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


class OffloadMixin(CommsMixin):
    """Moves parameters and optimizer state to host memory and frees gradients, as ``megatron.*_offload`` says.

    Storage is resized in place, so every view that Megatron keeps into its buffers stays valid.
    """

    chunks: list[Any]
    optimizer: Any
    _host_params: list[torch.Tensor]
    _host_optimizer: list[dict[str, torch.Tensor]]
    is_offloaded: bool = False

    def check_phase(self, phase: Phase) -> None:
        """Refuses phases that use what is offloaded.

        Raises:
            LifecycleError: If it is not back on the device.
        """
        super().check_phase(phase)
        if self.is_offloaded and phase in USES_STATE:
            raise LifecycleError(
                f"phase {phase} on training rank {self.training_rank}: its state is in host memory; call onload() first"
            )

    def offload(self) -> int:
        """Frees device memory before a rollout. Collective over: the training world. Idempotent.

        Returns:
            Bytes of device memory freed on this rank.

        Raises:
            LifecycleError: If the bootstrap has not run.
        """
        with self.phase(Phase.OFFLOAD):
            return 0 if self.is_offloaded else self._offload()

    def _offload(self) -> int:
        freed = 0
        self._host_params, self._host_optimizer = [], []
        for buffer in self._ddp_buffers():
            if self.megatron.grad_offload:
                freed += self._release(buffer.grad_data)
            if self.megatron.param_offload:
                self._host_params.append(_to_host(buffer.param_data))
                freed += self._release(buffer.param_data)
        if self.megatron.optimizer_offload:
            for state in self._optimizer_states():
                tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
                self._host_optimizer.append({k: _to_host(v) for k, v in tensors.items()})
                freed += sum(self._release(v) for v in tensors.values())
        self.is_offloaded = True
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def onload(self) -> None:
        """Brings everything back; gradients come back as zeros. Collective over: the training world. Idempotent."""
        with self.phase(Phase.ONLOAD):
            if not self.is_offloaded:
                return
            params, states = iter(self._host_params), iter(self._host_optimizer)
            for buffer in self._ddp_buffers():
                if self.megatron.param_offload:
                    self._restore(buffer.param_data, next(params))
                if self.megatron.grad_offload:
                    self._allocate(buffer.grad_data)
                    buffer.grad_data.zero_()
            if self.megatron.optimizer_offload:
                for state in self._optimizer_states():
                    for key, host in next(states).items():
                        self._restore(state[key], host)
            self._host_params, self._host_optimizer = [], []
            self.is_offloaded = False

    def _ddp_buffers(self) -> Iterator[Any]:
        for chunk in self.chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    def _optimizer_states(self) -> Iterator[dict[str, Any]]:
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            yield from part.optimizer.state.values()

    @staticmethod
    def _release(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        size: int = storage.nbytes()
        storage.resize_(0)
        return size

    @staticmethod
    def _allocate(tensor: torch.Tensor) -> None:
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        tensor.untyped_storage().resize_(int(needed))

    @classmethod
    def _restore(cls, tensor: torch.Tensor, host: torch.Tensor) -> None:
        cls._allocate(tensor)
        tensor.copy_(host, non_blocking=False)
