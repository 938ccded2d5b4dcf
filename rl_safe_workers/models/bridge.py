"""Loads HF weights into a Megatron model and exports them, behind one small interface.

The weight mapping comes from mbridge; from Megatron-Bridge if mbridge has no mapping and Megatron-Bridge is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from transformers import AutoConfig, PretrainedConfig

from rl_safe_workers.errors import ModelError
from rl_safe_workers.models.own_weights import OwnWeight
from rl_safe_workers.topology.layout import SUPPORTED_MODEL_TYPES


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
        """Returns the HF weights that this rank's tensor-parallel group can build; None if the library cannot tell.

        Collective over: tensor and expert-tensor groups.
        """
        ...


def open_bridge(hf_path: str, *, dtype: torch.dtype, transformer_engine: bool, **settings: Any) -> WeightBridge:
    """Returns a bridge for a local HF directory. Needs Megatron's groups; not collective.

    Args:
        hf_path: Local directory with ``config.json`` and safetensors. Remote code is never run.
        dtype: Parameter dtype of the Megatron model.
        transformer_engine: True for Transformer Engine's layers, False for Megatron's local ones.
        **settings: Fields of Megatron's TransformerConfig that override the bridge's own.

    Raises:
        ModelError: If no installed bridge has a mapping for the model type, or if the bridge refuses a setting.
    """
    hf_config = AutoConfig.from_pretrained(hf_path, trust_remote_code=False, local_files_only=True)
    for library in (_open_mbridge, _open_megatron_bridge):
        bridge = library(hf_path, hf_config, dtype, settings, transformer_engine)
        if bridge is not None:
            return bridge
    raise ModelError(
        f"{hf_path}: no installed bridge has a weight mapping for model type {hf_config.model_type!r}; mbridge has one "
        f"for {', '.join(SUPPORTED_MODEL_TYPES)}"
    )


def _is_installed(module: str) -> bool:
    """Returns True if a module can be found; False also if its parent package is missing."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _open_mbridge(
    hf_path: str, hf_config: PretrainedConfig, dtype: torch.dtype, settings: dict[str, Any], transformer_engine: bool
) -> WeightBridge | None:
    if not _is_installed("mbridge"):
        return None
    from rl_safe_workers.models.mbridge_bridge import open_mbridge

    return open_mbridge(hf_config, dtype=dtype, settings=settings, transformer_engine=transformer_engine)


def _open_megatron_bridge(
    hf_path: str, hf_config: PretrainedConfig, dtype: torch.dtype, settings: dict[str, Any], transformer_engine: bool
) -> WeightBridge | None:
    if not _is_installed("megatron.bridge"):
        return None
    from rl_safe_workers.models.megatron_bridge import open_megatron_bridge

    return open_megatron_bridge(hf_path, dtype=dtype, settings=settings)
