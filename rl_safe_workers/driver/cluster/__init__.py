"""Ray's side of a run: nodes, their check and their agents, placement, actors and calls with deadlines.

A `RunConfig` comes in by ``cluster.py``; groups of actors leave. Everything that it started ends with it.
"""
