"""Which communicators get how many of NCCL's channels: few where few are enough, NCCL's own elsewhere.

Measured on 4 x H200 over NVLink (``docs/benchmarks.md``): scalars lose nothing at one CTA, which leaves 22 MiB of 484;
large sends between two ranks lose nothing at 12, and those of 32 MiB a fifth; every other large collective loses there.
Across nodes a limit costs more than it saves, as fewer channels drive fewer NICs: leave groups that carry bandwidth
alone there.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from rl_safe_workers.errors import ConfigError
from rl_safe_workers.topology.groups import KINDS, Features, Traffic, kinds_of
from rl_safe_workers.topology.layout import ParallelLayout

SETTING = "rl_safe.bootstrap.max_ctas"
NCCL_MAXIMUM = 64
"""NCCL's MAXCHANNELS; a larger limit is no limit."""
LIMITS = {Traffic.CONTROL: 1, Traffic.STAGES: 12}
"""CTAs by what a group carries. A send uses as many channels as the next power of two."""


def plan_limits(layout: ParallelLayout, features: Features, overrides: Mapping[str, int]) -> dict[str, int]:
    """Returns the limit of CTAs by key of Megatron's ``nccl_communicator_config_path`` file, and for ``world``.

    Groups that carry scalars, and groups of one rank, get one CTA, those between pipeline stages 12; the others have no
    entry.

    Args:
        layout: Sizes of the training world's axes.
        features: What decides about the collectives.
        overrides: Limits by key from the configuration.

    Raises:
        ConfigError: If an override names no group of this layout, or is no number of CTAs.
    """
    kinds = list(kinds_of(layout, features).values())
    check_overrides(overrides, keys=[kind.key for kind in kinds])
    found = {}
    for kind in kinds:
        alone = kind.size(layout, features) == 1
        limit = LIMITS[Traffic.CONTROL] if alone else LIMITS.get(kind.traffic(layout, features))
        if limit is not None:
            found[kind.key] = limit
    return {**found, **overrides}


def check_overrides(overrides: Mapping[str, int], *, keys: list[str]) -> None:
    """Raises ConfigError if limits name no group, or are no numbers of CTAs."""
    for key, limit in overrides.items():
        if key not in keys:
            known = {kind.key for kind in KINDS.values()}
            near = get_close_matches(key, keys, n=1)
            reason = "Megatron creates none in this layout" if key in known else "there is no group of that name"
            raise ConfigError(
                f"{SETTING}.{key}: {reason}" + (f"; did you mean {near[0]}?" if near else f"; use {', '.join(keys)}")
            )
        if not 1 <= limit <= NCCL_MAXIMUM:
            raise ConfigError(f"{SETTING}.{key}={limit} must be from 1 to {NCCL_MAXIMUM} CTAs")
