from transformer_engine.pytorch import attention, distributed, fp8, ops
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.layers import (
    DotProductAttention,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "attention",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
]
