"""``rl-safe doctor``: facts about a machine and a cluster, and what is wrong with them for a run.

A recipe may come in by ``examine.py``. Facts and findings leave. It asks other processes about torch, Ray and vLLM, and
imports none of them.
"""
