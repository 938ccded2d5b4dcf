"""Stands in for Transformer Engine where there is no GPU: its layers in plain torch, without 8-bit types.

megatron-core's own wrappers and mcore-bridge run over it unchanged. It has what they use for a dense model or one with
experts, at tensor and context parallelism of 1; anything else raises an error.
"""

import importlib.util

import triton_stand_in

from transformer_engine import common, pytorch

if importlib.util.find_spec("triton") is None:  # the CUDA builds of torch bring it
    # megatron-core asks for Transformer Engine before mcore-bridge asks for triton, and after torch has looked for it.
    triton_stand_in.put()

__version__ = "2.3.0"
__all__ = ["common", "pytorch"]
