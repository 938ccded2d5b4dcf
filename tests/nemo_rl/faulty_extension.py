"""Our part of a vLLM worker under NeMo RL, in which some refits go wrong. It is in the process of the test."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import utils

from rl_safe_workers.adapters.nemo_rl.vllm_extension import SafeVllmExtension
from tests.faulty_weights import NORM, FaultyParameters, flip_a_bit, reverse_weight

faults: list[str] = []
"""Faults of the next refits, in their order; none is left: they go well."""


utils.dispatch_cpu_unquantized_gemm = reverse_weight


class FaultyExtension(SafeVllmExtension):
    """Changes weights between loader and layers, or as they come."""

    _loaded = 0
    _fault = ""
    _parameters: FaultyParameters | None = None

    def _rl_safe_received(self, *args: Any) -> bool:
        self._loaded, self._fault = 0, faults.pop(0) if faults else ""
        return super()._rl_safe_received(*args)

    @torch.no_grad()
    def _load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        if self._fault == "wire":
            weights = [(name, tensor.clone()) for name, tensor in weights]
            for name, tensor in weights:
                if name == NORM:
                    flip_a_bit(tensor)
        super()._load_weights(weights)
        self._loaded += len(weights)
        if self._loaded == len(self.state_dict_info):
            self._parameters = self._parameters or FaultyParameters()
            self._parameters.change(self._fault, dict(self.model_runner.model.named_parameters()))

    def _synchronize_before_ipc_data_ack(self) -> None:
        """There is no stream on a CPU."""
