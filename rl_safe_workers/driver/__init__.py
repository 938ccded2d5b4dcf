"""The Ray side of the built-in run: cluster, actors, calls with deadlines, GRPO loop, report.

A `RunConfig` comes in by ``run.py``; metrics, checkpoints and a report leave. It holds no code of Megatron, shards or
process groups.
"""
