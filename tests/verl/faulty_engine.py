"""Our part of a vLLM worker, in which some weight syncs go wrong.

A sync that is wrong once is redone, so that one job shows many faults. The last one is wrong twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.model_executor.layers import utils

from rl_safe_workers.adapters.verl.proved_engine import ProvedWorkerExtension

OUT = "model.layers.0.self_attn.o_proj.weight"
GATE = "model.layers.1.mlp.gate.weight"
NORM = "model.norm.weight"
EXPERTS = "model.layers.1.mlp.experts.routed_experts.w2_weight"
FAULTS = {3: "a bit", 5: "experts", 7: "stale", 9: "wire", 11: "a bit", 12: "a bit"}
"""By the number of the sync. The first comes before step 1, the second after it; each that is wrong is redone."""


def _keep_weight(layer: Any, remove_weight: bool) -> None:
    # vLLM's CPU build packs a weight and frees the parameter, into which verl loads the next one.
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = _keep_weight


def _flip(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.int16)[7] ^= 1


class FaultyWorkerExtension(ProvedWorkerExtension):
    """Changes weights between loader and layers, or as they come."""

    _syncs = 0
    _before: torch.Tensor

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        self._syncs += 1
        super().update_weights_from_ipc(*args, **kwargs)

    def _update_weights(self, weights: Sequence[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> None:
        if FAULTS.get(self._syncs) == "wire":
            weights = [(name, tensor.clone()) for name, tensor in weights]
            _flip(dict(weights)[NORM])
        super()._update_weights(weights, *args, **kwargs)

    @torch.no_grad()
    def _iter_all_models_with_config(self) -> Iterator[tuple[Any, Any]]:
        fault, held = FAULTS.get(self._syncs), dict(self.model_runner.model.named_parameters())
        gate = held[GATE]
        now = gate.clone()
        if fault == "a bit":
            _flip(held[OUT])
        elif fault == "experts":
            held[EXPERTS][[0, 1]] = held[EXPERTS][[1, 0]]
        elif fault == "stale":
            assert not torch.equal(now, self._before), "the step has changed it"
            gate.copy_(self._before)
        self._before = now
        yield from super()._iter_all_models_with_config()
