"""Our part of a vLLM worker, in which some weight syncs go wrong.

A sync that is wrong once is redone, so that one job shows many faults. The last one is wrong twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.model_executor.layers import utils

from rl_safe_workers.adapters.verl.vllm_engine import SafeWorkerExtension
from tests.faulty_weights import NORM, FaultyParameters, flip_a_bit

FAULTS = {3: "a bit", 5: "experts", 7: "stale", 9: "wire", 11: "a bit", 12: "a bit"}
"""By the number of the sync. The first comes before step 1, the second after it; each that is wrong is redone."""


def _keep_weight(layer: Any, remove_weight: bool) -> None:
    # vLLM's CPU build packs a weight and frees the parameter, into which verl loads the next one.
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = _keep_weight


class FaultyWorkerExtension(SafeWorkerExtension):
    """Changes weights between loader and layers, or as they come."""

    _syncs = 0
    _parameters: FaultyParameters | None = None

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        self._syncs += 1
        super().update_weights_from_ipc(*args, **kwargs)

    def _update_weights(self, weights: Sequence[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> None:
        if FAULTS.get(self._syncs) == "wire":
            weights = [(name, tensor.clone()) for name, tensor in weights]
            by_name = dict(weights)
            flip_a_bit(by_name[NORM] if NORM in by_name else by_name["rl_safe.bucket.0"])
        super()._update_weights(weights, *args, **kwargs)

    @torch.no_grad()
    def _iter_all_models_with_config(self) -> Iterator[tuple[Any, Any]]:
        self._parameters = self._parameters or FaultyParameters()
        self._parameters.change(FAULTS.get(self._syncs), dict(self.model_runner.model.named_parameters()))
        yield from super()._iter_all_models_with_config()
