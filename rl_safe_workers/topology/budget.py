"""Plans the limits of NCCL channels: small limits for groups that carry little, NCCL's default for the others.

Measured on 4 x H200 over NVLink (``docs/benchmarks.md``): a limit of one CTA does not slow scalars down, and reduces a
communicator from 484 MiB to 22. A limit of 12 does not slow large sends between two ranks down, but slows sends of
32 MiB down by a fifth. Every other large collective becomes slower.

Between hosts, do not limit groups that carry bandwidth. Over sockets NCCL uses two channels of its own accord, so a
limit of two or more changes nothing. A limit of one halves the bandwidth, and saves 12 of 32 MiB. RDMA was not
measured. Fewer channels use fewer NICs there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from rl_safe_workers.errors import ConfigError
from rl_safe_workers.setting_names import bootstrap_setting
from rl_safe_workers.topology.groups import KINDS, Features, Traffic, kinds_of
from rl_safe_workers.topology.layout import ParallelLayout

NCCL_MAXIMUM = 64
"""NCCL's MAXCHANNELS. A larger limit would have no effect."""
LIMITS = {Traffic.CONTROL: 1, Traffic.STAGES: 12}
"""Limit in CTAs, by the traffic of a group. For sends, NCCL rounds it up to a power of two."""


Names = Callable[[str], str]
"""Returns the name of a setting of the bootstrap, for errors; see `setting_names.bootstrap_setting`."""


def plan_limits(
    layout: ParallelLayout, features: Features, overrides: Mapping[str, int], *, named: Names = bootstrap_setting
) -> dict[str, int]:
    """Returns limits in CTAs, by the keys of Megatron's ``nccl_communicator_config_path`` file and ``world``.

    Groups that carry scalars, and groups of one rank, get one CTA. Groups between pipeline stages get 12. Other groups
    have no entry.

    Args:
        layout: Sizes of the training world's axes.
        features: Features of the run that decide which collectives the groups carry.
        overrides: Limits by key, from the configuration.
        named: Names the settings in errors.

    Raises:
        ConfigError: If an override names an unknown group or has a value that is not a number of CTAs.
    """
    kinds = list(kinds_of(layout, features).values())
    check_overrides(overrides, keys=[kind.key for kind in kinds], named=named)
    found = {}
    for kind in kinds:
        alone = kind.size(layout, features) == 1
        limit = LIMITS[Traffic.CONTROL] if alone else LIMITS.get(kind.traffic(layout, features))
        if limit is not None:
            found[kind.key] = limit
    return {**found, **overrides}


def check_overrides(overrides: Mapping[str, int], *, keys: list[str], named: Names = bootstrap_setting) -> None:
    """Raises ConfigError if a limit names a group that is not in ``keys``, or is not a number of CTAs."""
    for key, limit in overrides.items():
        if key not in keys:
            known = {kind.key for kind in KINDS.values()}
            near = get_close_matches(key, keys, n=1)
            reason = "Megatron creates none in this layout" if key in known else "there is no group of that name"
            raise ConfigError(
                f"{named(f'max_ctas.{key}')}: {reason}"
                + (f"; did you mean {near[0]}?" if near else f"; use {', '.join(keys)}")
            )
        if not 1 <= limit <= NCCL_MAXIMUM:
            raise ConfigError(f"{named(f'max_ctas.{key}={limit}')} must be from 1 to {NCCL_MAXIMUM} CTAs")
