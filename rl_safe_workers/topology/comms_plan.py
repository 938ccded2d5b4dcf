"""A training world's communicators before they exist: their limits, their bytes, and whether they fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.topology.budget import SETTING, plan_limits
from rl_safe_workers.topology.groups import Features, OpClass, Traffic
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.topology.memory import KERNEL_BYTES, MIB, PredictedGroup, far_bytes, predict_groups

logger = logging.getLogger(__name__)

_NAMED = 3
LACKS: Mapping[str, frozenset[OpClass]] = {
    "gloo": frozenset(),
    "nccl": frozenset(),
    "rl_safe_gloo": frozenset(),
    "rl_safe_nccl": frozenset(),
    "mpi": frozenset({OpClass.GATHER_SCATTER}),
}
"""Op classes that torch's backends lack, by its table of them: MPI has no reduce_scatter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommsPlan:
    """The groups to connect, and their limits.

    Example: ``CommsPlan.of(layout, Features(), {}).bytes``
    """

    layout: ParallelLayout
    features: Features
    limits: Mapping[str, int]
    """CTAs at most by key of Megatron's ``nccl_communicator_config_path`` file."""
    groups: tuple[PredictedGroup, ...]
    """The heaviest first."""

    @classmethod
    def of(
        cls, layout: ParallelLayout, features: Features, overrides: Mapping[str, int], *, budget: bool = True
    ) -> CommsPlan:
        """Plans.

        Args:
            layout: Sizes of the training world's axes.
            features: What decides about the collectives.
            overrides: Limits by key from the configuration.
            budget: Whether groups have limits beside those.

        Raises:
            ConfigError: If an override names no group of the layout, or is no number of CTAs.
        """
        limits = plan_limits(layout, features, overrides)
        if not budget:
            limits = dict(overrides)
        groups = predict_groups(layout, features, limits)
        return cls(layout=layout, features=features, limits=limits, groups=tuple(groups))

    @property
    def bytes(self) -> int:
        """Device memory of all of them on a rank, with NCCL's kernels."""
        return KERNEL_BYTES + sum(group.bytes for group in self.groups)

    def check_backend(self, backend: str) -> None:
        """Raises CommunicatorError if a backend lacks what a group will carry.

        Args:
            backend: Of the default group, which the others inherit, e.g. ``"cpu:gloo,cuda:nccl"``.
        """
        parts = [part.rpartition(":")[2] for part in backend.split(",")]
        if unknown := [part for part in parts if part not in LACKS]:
            raise CommunicatorError(f"backend {unknown[0]} is not known: use one of {', '.join(LACKS)}")
        for group in self.groups:
            for part in parts:
                if lacking := [op_class for op_class in group.classes if op_class in LACKS[part]]:
                    raise CommunicatorError(f"{group.description} will carry {lacking[0]}, which backend {part} lacks")

    def check_fits(self, *, free_bytes: int, gpus_per_node: int | None = None) -> None:
        """Refuses what will not fit, and warns of what may not: across nodes the prediction is an upper bound.

        Args:
            free_bytes: Of the device.
            gpus_per_node: Ranks that a rank may have as neighbours of its node, itself included; None counts all.

        Raises:
            CommunicatorError: If the groups take more than is free, though no connection to a peer of another node be
                counted; names the heaviest and what helps.
        """
        if self.bytes <= free_bytes:
            return
        large = [g for g in self.groups if g.kind.traffic(self.layout, self.features) is not Traffic.CONTROL]
        heaviest = large[:_NAMED]
        named = ", ".join(f"{g.description} {g.bytes / MIB:.0f} MiB" for g in heaviest)
        settings = " ".join(f"{SETTING}.{g.kind.key}=8" for g in heaviest)
        free = f"{free_bytes / MIB:.0f} MiB are free; the heaviest are {named}"
        least = self.bytes - sum(far_bytes(group, gpus_per_node) for group in self.groups)
        if least <= free_bytes:
            logger.warning(
                "the communicators may take up to %.0f MiB of device memory, %.0f of it for peers on other nodes, "
                "which may have fewer channels, and %s: should connecting them fail for want of memory, set %s",
                self.bytes / MIB, (self.bytes - least) / MIB, free, settings,
            )  # fmt: skip
            return
        raise CommunicatorError(
            f"the communicators will take {self.bytes / MIB:.0f} MiB of device memory and {free}: free memory before "
            f"init_groups, or limit them with {settings}"
        )
