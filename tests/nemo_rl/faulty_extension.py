"""Our part of a vLLM worker under NeMo RL, in which some refits go wrong. It is in the process of the test."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import utils

from rl_safe_workers.adapters.nemo_rl.vllm_extension import ProvedVllmExtension

OUT = "model.layers.0.self_attn.o_proj.weight"
GATE = "model.layers.1.mlp.gate.weight"
NORM = "model.norm.weight"
EXPERTS = "model.layers.1.mlp.experts.routed_experts.w2_weight"
faults: list[str] = []
"""Faults of the next refits, in their order; none is left: they go well."""


def _reverse_weight(layer: Any, remove_weight: bool) -> None:
    # vLLM's CPU build packs a weight and frees the parameter, into which NeMo RL loads the next one.
    layer.weight.data = layer.weight.data.flip(0)
    layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, weight.flip(0), bias)


utils.dispatch_cpu_unquantized_gemm = _reverse_weight


def _flip(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.int16)[7] ^= 1


class FaultyExtension(ProvedVllmExtension):
    """Changes weights between loader and layers, or as they come."""

    _loaded = 0
    _fault = ""
    _before: torch.Tensor

    def _rl_safe_received(self, *args: Any) -> bool:
        self._loaded, self._fault = 0, faults.pop(0) if faults else ""
        return super()._rl_safe_received(*args)

    @torch.no_grad()
    def _load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        if self._fault == "wire":
            weights = [(name, tensor.clone()) for name, tensor in weights]
            for name, tensor in weights:
                if name == NORM:
                    _flip(tensor)
        super()._load_weights(weights)
        self._loaded += len(weights)
        if self._loaded == len(self.state_dict_info):
            self._corrupt(dict(self.model_runner.model.named_parameters()))

    def _corrupt(self, held: dict[str, torch.Tensor]) -> None:
        now = held[GATE].clone()
        if self._fault == "a bit":
            _flip(held[OUT])
        elif self._fault == "experts":
            held[EXPERTS][[0, 1]] = held[EXPERTS][[1, 0]]
        elif self._fault == "stale":
            assert not torch.equal(now, self._before), "the step has changed it"
            held[GATE].copy_(self._before)
        self._before = now

    def _synchronize_before_ipc_data_ack(self) -> None:
        """There is no stream on a CPU."""
