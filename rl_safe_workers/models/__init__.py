"""Builds Megatron models, and converts HF weights to Megatron's and back, through mbridge or Megatron-Bridge.

``bridge.py`` opens a model directory. The other modules build chunks, with or without Transformer Engine, and export HF
tensors.
"""
