"""A real vLLM engine of two ranks, each in a process of its own, whose workers read their weights back.

Stands for a host whose workers get whole weights and load them with vLLM's own loaders.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rl_safe_workers.rollout.packing import spec_of
from rl_safe_workers.rollout.proved_worker import ProvedWorker
from rl_safe_workers.rollout.sync_proof import HeldWeights
from tests.distributed.proved_engine import SMALL_ENGINE

SIZE = 2
LAST = SIZE - 1
CLEAN = ""


class ReadingWorker(ProvedWorker):
    """Our part of vLLM's worker."""

    def receive(self, path: str, wrong: str) -> None:
        """Loads the weights of a folder. The last rank gets another value of one weight, or of none if it is empty."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        weights = load_file(Path(path) / "model.safetensors")
        if wrong != CLEAN and self.rank == LAST:
            weights[wrong].view(-1)[-1] += 1
        model = self.model_runner.model
        with self._rl_safe_proving(), torch.device("cpu"):
            self._rl_safe_watch([spec_of(name, tensor) for name, tensor in weights.items()])
            initialize_layerwise_reload(model)
            model.load_weights(iter(weights.items()))
            finalize_layerwise_reload(model, self.model_runner.model_config)


def held_by_ranks(rank: int, path: Path, wrong: list[str], options: Mapping[str, Any]) -> list[HeldWeights | None]:
    """Returns what an engine holds after each sync. One weight is wrong in each."""
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM

    llm = LLM(
        model=str(path),
        load_format="dummy",
        tensor_parallel_size=SIZE,
        distributed_executor_backend="mp",
        worker_extension_cls=f"{ReadingWorker.__module__}.{ReadingWorker.__qualname__}",
        **SMALL_ENGINE,
        **options,
    )
    found = []
    for name in wrong:
        assert llm.collective_rpc("rl_safe_prove") == [None] * SIZE
        llm.collective_rpc("receive", args=(str(path), name))
        found.append(HeldWeights.of_workers(llm.collective_rpc("rl_safe_held")))
    assert HeldWeights.of_workers(llm.collective_rpc("rl_safe_held")) is None
    llm.llm_engine.engine_core.shutdown()
    return found
