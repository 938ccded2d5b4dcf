"""Checks in the driver that our generation workers suit a run, and swaps them in.

These workers read weights back for a proof, and receive refits over our joint group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NODE, NemoRlSettings
from rl_safe_workers.errors import ConfigError

_HOST = "nemo_rl.models.generation.vllm"
_OURS = "rl_safe_workers.adapters.nemo_rl.generation_workers"
WORKERS = {
    f"{_HOST}.vllm_worker.VllmGenerationWorker": f"{_OURS}.SafeGenerationWorker",
    f"{_HOST}.vllm_worker_async.VllmAsyncGenerationWorker": f"{_OURS}.SafeAsyncGenerationWorker",
}
"""NeMo RL's generation workers, each with our worker that takes its place."""
BUILDER_MODULE, BUILDER = f"{_HOST}.vllm_generation", "RayWorkerBuilder"
"""The module and the name in which NeMo RL looks up the builder that makes a generation worker from its name."""
_TENSOR_PARALLEL = "an engine's ranks must be tensor-parallel"
_NOT_QUANTISED = "an engine must not be quantised"
_SUITABLE: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("backend", lambda value: value == "vllm", "it needs vLLM's engines"),
    ("refit_transport", lambda value: value is None, "it needs NeMo RL's default transport"),
    ("vllm_cfg.pipeline_parallel_size", lambda value: value == 1, _TENSOR_PARALLEL),
    ("vllm_cfg.precision", lambda value: value != "fp8", _NOT_QUANTISED),
    ("vllm_cfg.kv_cache_dtype", lambda value: not str(value).startswith("fp8"), "its scales are sent as weights"),
    ("quant_cfg", lambda value: value is None, _NOT_QUANTISED),
)
"""Keys of ``policy.generation``, a test for the values with which our part of vLLM's worker works, and the reason."""
_APART = ("colocated.enabled", lambda value: not value, "it needs engines on GPUs of their own")
"""The same for ``refit_transport: joint`` alone."""


def own_refits(settings: NemoRlSettings) -> tuple[str, str] | None:
    """Returns the setting that needs our generation workers, and one that does not; None if no setting needs them."""
    if settings.refit_transport == "joint":
        return f"{NODE}.refit_transport=joint", f"{NODE}.refit_transport=host"
    if settings.prove_sync_freq >= 0:
        return f"{NODE}.prove_sync_freq={settings.prove_sync_freq}", f"{NODE}.prove_sync_freq=-1"
    return None


def check_generation(generation: Mapping[str, Any] | None, settings: NemoRlSettings) -> None:
    """Refuses a run whose refits cannot be done as the settings say.

    Args:
        generation: NeMo RL's node ``policy.generation``.
        settings: The settings. At least one of them needs our generation workers.

    Raises:
        ConfigError: If a key has an unsuitable value; names the key.
    """
    for key, fits, reason in (*_SUITABLE, *([_APART] if settings.refit_transport == "joint" else [])):
        value: Any = generation or {}
        for part in key.split("."):
            value = (value or {}).get(part)
        if not fits(value):
            raise _refused(key, value, reason, settings)
    parallel = (generation or {}).get("vllm_cfg") or {}
    experts = parallel.get("expert_parallel_size") or 1
    if experts > parallel.get("tensor_parallel_size", 1):  # NeMo RL then makes vLLM data-parallel
        raise _refused("vllm_cfg.expert_parallel_size", experts, _TENSOR_PARALLEL, settings)


def _refused(key: str, value: object, reason: str, settings: NemoRlSettings) -> ConfigError:
    wants = own_refits(settings)
    assert wants is not None, "the caller has asked"
    return ConfigError(f"{wants[0]} with policy.generation.{key}={value}: {reason}; set {wants[1]}")


def safe_builder(builder: Callable[..., Any], *, setting: str, remedy: str) -> Callable[..., Any]:
    """Returns a builder that makes our generation workers instead of NeMo RL's.

    Args:
        builder: NeMo RL's ``RayWorkerBuilder``.
        setting: The setting that needs our workers, for errors.
        remedy: The same setting with a value that does not need our workers, for errors.
    """

    def build(worker: str, *args: Any, **kwargs: Any) -> Any:
        if worker not in WORKERS:
            raise ConfigError(f"{setting}: there is no worker of ours for {worker}; set {remedy}")
        return builder(WORKERS[worker], *args, **kwargs)

    return build
