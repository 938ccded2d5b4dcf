"""Runs vLLM's engine, receives weight syncs, and proves them. Only ``vllm.py`` and ``vllm_transfer.py`` import vLLM.

The engine takes prompts and returns samples with log-probabilities. It receives weights in buckets.
"""
