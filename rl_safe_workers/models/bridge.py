"""Loads HF weights into a Megatron model and exports them, behind one small interface.

The weight mapping comes from mbridge or from Megatron-Bridge, as ``model.bridge`` says.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from transformers import AutoConfig, PretrainedConfig

from rl_safe_workers.config import BridgeLibrary
from rl_safe_workers.errors import ModelError
from rl_safe_workers.models.own_weights import OwnWeight
from rl_safe_workers.topology.layout import SUPPORTED_MODEL_TYPES
from rl_safe_workers.versions import version_of

logger = logging.getLogger(__name__)


class WeightBridge(Protocol):
    """The interface of a bridge for the trainer and the conversion. It is limited to what both libraries offer."""

    config: Any
    """Megatron's TransformerConfig."""

    def _model_provider(self, post_model_creation_callbacks: list[Any]) -> Any:
        """Returns ``provide(pre_process, post_process, vp_stage=None)``, which builds one GPTModel.

        The method's name is mbridge's.
        """
        ...

    def load_weights(self, models: Sequence[torch.nn.Module], weights_path: str) -> None:
        """Reads HF weights into model chunks, one at a time.

        Not collective with mbridge. With Megatron-Bridge it is collective over the groups that split each weight.
        """
        ...

    def export_weights(self, models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every HF weight, unsharded, on every rank, in the same order. Collective over: the training world."""
        ...

    def own_weights(self, models: Sequence[torch.nn.Module]) -> list[OwnWeight] | None:
        """Returns the HF weights that this rank's tensor-parallel group can build; None if a weight needs other ranks.

        Collective over: the tensor and expert-tensor groups with mbridge; the training world with Megatron-Bridge.
        """
        ...


def open_bridge(
    hf_path: str,
    *,
    dtype: torch.dtype,
    transformer_engine: bool,
    library: BridgeLibrary = "auto",
    **settings: Any,
) -> WeightBridge:
    """Returns a bridge for a local HF directory, and logs which one and why. Needs Megatron's groups; not collective.

    Args:
        hf_path: Local directory with ``config.json`` and safetensors. Remote code is never run.
        dtype: Parameter dtype of the Megatron model.
        transformer_engine: True for Transformer Engine's layers, False for Megatron's local ones.
        library: As `config.ModelConfig.bridge`.
        **settings: Fields of Megatron's TransformerConfig that override the bridge's own.

    Raises:
        ModelError: If no bridge has a mapping for the model type, or if the bridge refuses a setting.
    """
    hf_config = AutoConfig.from_pretrained(hf_path, trust_remote_code=False, local_files_only=True)
    options: dict[str, Any] = {"dtype": dtype, "settings": settings, "transformer_engine": transformer_engine}
    reasons = [] if library == "auto" else [f"model.bridge is {library}"]
    for name, open_with in _LIBRARIES.items():
        if library not in ("auto", name):
            continue
        opened = open_with(hf_path, hf_config, options)
        if not isinstance(opened, str):
            why = "; ".join(reasons) or f"it has a mapping for {hf_config.model_type}"
            logger.info("bridge: %s %s: %s", name, version_of(name.replace("_", "-")), why)
            return opened
        reasons.append(opened)
    raise ModelError(
        f"{hf_path}: no bridge for model type {hf_config.model_type!r}: {'; '.join(reasons)}; "
        f"the supported ones are {', '.join(SUPPORTED_MODEL_TYPES)}"
    )


def _is_installed(module: str) -> bool:
    """Returns True if a module can be found; False also if its parent package is missing."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _with_mbridge(hf_path: str, hf_config: PretrainedConfig, options: dict[str, Any]) -> WeightBridge | str:
    """Returns mbridge's bridge, or the reason why there is none."""
    if not _is_installed("mbridge"):
        return "mbridge is not installed"
    from rl_safe_workers.models.mbridge_bridge import open_mbridge

    bridge: WeightBridge | None = open_mbridge(hf_config, **options)
    return bridge or f"mbridge has no mapping for {hf_config.model_type}"


def _with_megatron_bridge(hf_path: str, hf_config: PretrainedConfig, options: dict[str, Any]) -> WeightBridge | str:
    """Returns Megatron-Bridge's bridge, or the reason why there is none."""
    if not _is_installed("megatron.bridge"):
        return "Megatron-Bridge is not installed"
    from rl_safe_workers.models.megatron_bridge import open_megatron_bridge, why_no_mapping

    reason = why_no_mapping(hf_config)
    return f"Megatron-Bridge: {reason}" if reason else open_megatron_bridge(hf_path, hf_config, **options)


_LIBRARIES: dict[str, Callable[[str, PretrainedConfig, dict[str, Any]], WeightBridge | str]] = {
    "mbridge": _with_mbridge,
    "megatron_bridge": _with_megatron_bridge,
}
"""The libraries, in the order in which ``auto`` asks them. mbridge is first, because its loads need no collective."""
