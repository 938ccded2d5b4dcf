"""ms-swift's extension of vLLM's worker, made to read its weights back after a sync. Importing this imports vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from swift.pipelines.infer import rollout

from rl_safe_workers.adapters.patches import replaced
from rl_safe_workers.rollout.packing import spec_of
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.proved_worker import ProvedWorker


class ProvedSwiftExtension(ProvedWorker, rollout.WeightSyncWorkerExtension):
    """ms-swift's extension for its Ray mode, made to read weights back."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Receives weights as ms-swift does. Reads them back if they are to be proved."""
        specs: list[WeightSpec] = []

        def loading(original: Callable[..., Any]) -> Callable[..., Any]:
            def load_weights(weights: Sequence[tuple[str, torch.Tensor]]) -> Any:
                specs.extend(spec_of(name, tensor) for name, tensor in weights)
                return original(weights)

            return load_weights

        def finishing(original: Callable[..., None]) -> Callable[..., None]:
            def finish(*args: Any, **kwargs: Any) -> None:
                self._rl_safe_watch(specs)
                original(*args, **kwargs)

            return finish

        with (
            self._rl_safe_proving(),
            replaced(self.model_runner.model, "load_weights", loading),
            replaced(rollout, "finish_vllm_weight_reload", finishing),
        ):
            super().update_weights_from_ipc(*args, **kwargs)
