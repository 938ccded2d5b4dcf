"""Parallel sizes, the groups that they make, what each carries and costs, and which rank goes on which node.

Sizes come in; plain records leave. Pure Python.
"""
