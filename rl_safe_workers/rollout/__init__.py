"""vLLM's engine, and the receiving end of a weight sync. Only ``vllm.py`` and ``vllm_transfer.py`` import vLLM.

Prompts come in; samples with log-probabilities leave. Weights come in, packed into buckets.
"""
