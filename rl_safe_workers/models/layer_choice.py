"""Chooses a model's layers: Transformer Engine's, or Megatron's local ones."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.errors import ModelError, first_line
from rl_safe_workers.versions import version_of

logger = logging.getLogger(__name__)


@cache
def why_no_transformer_engine() -> str:
    """Returns the reason why this process cannot use Transformer Engine's layers, and "" if it can."""
    if find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    if not torch.cuda.is_available():
        return "there is no GPU"
    try:
        import_module("transformer_engine.pytorch")
    except Exception as error:  # a library that does not fit fails in many ways: ImportError, OSError, AssertionError
        return f"Transformer Engine does not import: {type(error).__name__}: {first_line(error)}"
    return ""


def takes_transformer_engine(config: MegatronConfig) -> bool:
    """Chooses the layers, and logs the choice and its reason. Not collective.

    Returns:
        True for Transformer Engine's layers.

    Raises:
        ModelError: If the settings need Transformer Engine's layers but this process cannot use them; says why.
    """
    reason = "transformer_impl is local" if config.transformer_impl == "local" else why_no_transformer_engine()
    if not reason:
        logger.info("layers: those of Transformer Engine %s", version_of("transformer_engine"))
        return True
    if config.needs_transformer_engine:
        raise ModelError(
            f"megatron.transformer_impl={config.transformer_impl}, moe_grouped_gemm={config.moe_grouped_gemm}, "
            f"fp8={config.fp8} need Transformer Engine's layers: {reason}"
        )
    logger.info("layers: Megatron's local ones: %s", reason)
    return False
