"""The Ray side of the built-in run: cluster, actors, calls with deadlines, GRPO loop, report.

A `RunConfig` comes in by ``run.py``; metrics, checkpoints and a report leave. Three packages: ``inputs``,
``cluster`` and ``outputs``. The loop and the session that use them are here. No code of Megatron, shards or process
groups is.
"""
