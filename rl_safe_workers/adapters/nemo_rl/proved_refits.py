"""Checks in the driver that a run's refits can be proved, and swaps in generation workers that read weights back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NODE
from rl_safe_workers.errors import ConfigError

_HOST = "nemo_rl.models.generation.vllm"
_OURS = "rl_safe_workers.adapters.nemo_rl.generation_workers"
WORKERS = {
    f"{_HOST}.vllm_worker.VllmGenerationWorker": f"{_OURS}.ProvedGenerationWorker",
    f"{_HOST}.vllm_worker_async.VllmAsyncGenerationWorker": f"{_OURS}.ProvedAsyncGenerationWorker",
}
"""NeMo RL's generation workers, each with our worker that reads weights back."""
BUILDER_MODULE, BUILDER = f"{_HOST}.vllm_generation", "RayWorkerBuilder"
"""The module and the name in which NeMo RL looks up the builder that makes a generation worker from its name."""
_TENSOR_PARALLEL = "an engine's ranks must be tensor-parallel to be read back"
_NOT_QUANTISED = "only engines that are not quantised are read back"
_PROVED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("backend", lambda value: value == "vllm", "only vLLM's engines are read back"),
    ("refit_transport", lambda value: value is None, "only NeMo RL's default transports are proved"),
    ("vllm_cfg.pipeline_parallel_size", lambda value: value == 1, _TENSOR_PARALLEL),
    ("vllm_cfg.precision", lambda value: value != "fp8", _NOT_QUANTISED),
    ("vllm_cfg.kv_cache_dtype", lambda value: not str(value).startswith("fp8"), "its scales are sent as weights"),
    ("quant_cfg", lambda value: value is None, _NOT_QUANTISED),
)
"""Keys of ``policy.generation``, a test for the values with which refits can be proved, and the reason."""


def check_generation(generation: Mapping[str, Any] | None, *, every: int) -> None:
    """Refuses a run whose refits cannot be proved.

    Args:
        generation: NeMo RL's node ``policy.generation``.
        every: The setting ``prove_sync_freq``.

    Raises:
        ConfigError: If a key has an unsuitable value; names the key.
    """
    for key, fits, reason in _PROVED:
        value: Any = generation or {}
        for part in key.split("."):
            value = (value or {}).get(part)
        if not fits(value):
            raise _refused(key, value, reason, every)
    parallel = (generation or {}).get("vllm_cfg") or {}
    experts = parallel.get("expert_parallel_size") or 1
    if experts > parallel.get("tensor_parallel_size", 1):  # NeMo RL then makes vLLM data-parallel
        raise _refused("vllm_cfg.expert_parallel_size", experts, _TENSOR_PARALLEL, every)


def _refused(key: str, value: object, reason: str, every: int) -> ConfigError:
    return ConfigError(
        f"{NODE}.prove_sync_freq={every} with policy.generation.{key}={value}: {reason}; set {NODE}.prove_sync_freq=-1"
    )


def proving_builder(builder: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a builder that makes our generation workers instead of NeMo RL's.

    Args:
        builder: NeMo RL's ``RayWorkerBuilder``.
    """

    def build(worker: str, *args: Any, **kwargs: Any) -> Any:
        if worker not in WORKERS:
            raise ConfigError(f"{NODE}.prove_sync_freq: {worker} does not read weights back; set it to -1")
        return builder(WORKERS[worker], *args, **kwargs)

    return build
