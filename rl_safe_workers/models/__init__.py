"""HF weights in and out of Megatron, through mbridge or Megatron-Bridge; layers without Transformer Engine.

A model directory comes in by ``bridge.py``. Megatron's chunks, or HF tensors, leave.
"""
