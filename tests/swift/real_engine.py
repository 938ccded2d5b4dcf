"""ms-swift's own vLLM engine in a rank, with vLLM's CPU build. Some weight syncs go wrong in it; the double generates.

vLLM and ms-swift have environments of their own, because they want different versions of transformers. vLLM's comes
behind ms-swift's.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faulty_weights import GATE, NORM, FaultyParameters, flip_a_bit, reverse_weight
from tests.swift import engine_double

FAULTS = "ENGINE_FAULTS"
"""The variable has a JSON object with the faults of training rank 1, by the number of the sync, from 1. It is there for
jobs with this engine alone."""
RANK = "1"
OF_VLLM = Path(__file__).parents[2] / f".venv/lib/python3.{sys.version_info.minor}/site-packages"
HAS_VLLM = (OF_VLLM / "vllm").is_dir()
needed = pytest.mark.skipif(not HAS_VLLM, reason="vLLM's environment is not there: scripts/setup test")
ARGUMENTS = (
    *("--vllm_mode", "colocate", "--sleep_level", "0", "--vllm_enforce_eager", "true"),
    *("--vllm_max_model_len", "64", "--vllm_gpu_memory_utilization", "0.05"),
)


def preparing(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps ``_prepare_vllm_engine``, which makes the engine in this process."""

    def prepare_vllm_engine(trainer: Any) -> Any:
        from swift.megatron.trainers import rollout_mixin

        prepare()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        keep_parameters()
        engine = original(trainer)
        engine.infer = engine_double.infer
        Faulty(engine.inner_model, rollout_mixin, faults() if os.environ["RANK"] == RANK else {}).install()
        return engine

    return prepare_vllm_engine


def prepare() -> None:
    """Makes vLLM importable. What it does then fits a CPU and this environment."""
    sys.path.append(str(OF_VLLM))
    # vLLM looks for the whole of triton, and ms-swift's plugin of vLLM for torchvision.
    sys.modules.pop("triton", None)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}


def keep_parameters() -> None:
    """Has vLLM's layers convert weights as on a GPU: its CPU build frees parameters, into which ms-swift loads."""
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = reverse_weight
    torch.compiler.set_stance("force_eager")


def faults() -> dict[int, str]:
    """The faults of this job."""
    return {int(number): fault for number, fault in json.loads(os.environ[FAULTS]).items()}


class Faulty:
    """Changes weights as they come, or between the loaders and the layers."""

    def __init__(self, model: Any, module: Any, faults: dict[int, str]) -> None:
        """Changes nothing yet.

        Args:
            model: The engine's.
            module: ms-swift's, which ends a sync by ``finish_vllm_weight_reload``.
            faults: Of syncs, by their numbers.
        """
        self._model, self._module, self._faults, self._number = model, module, faults, 0
        self._parameters = FaultyParameters()

    def install(self) -> None:
        load, finish = self._model.load_weights, self._module.finish_vllm_weight_reload

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            self._number += 1
            return load(self._arriving(weights))

        @functools.wraps(finish)
        def finish_reload(*args: Any, **kwargs: Any) -> None:
            self._parameters.change(self._fault, dict(self._model.named_parameters()))
            finish(*args, **kwargs)

        self._model.load_weights = load_weights
        self._module.finish_vllm_weight_reload = finish_reload

    @property
    def _fault(self) -> str:
        return self._faults.get(self._number, "")

    def _arriving(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            arrived = tensor.clone()
            if self._fault == "wire" and name == NORM:
                flip_a_bit(arrived)
            if not (self._fault == "lost" and name == GATE):
                yield name, arrived
