"""Plans a training world's communicators before they exist: their limits, their bytes, and if they fit into memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.setting_names import bootstrap_setting
from rl_safe_workers.topology.budget import plan_limits
from rl_safe_workers.topology.groups import Features, OpClass, Traffic
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.topology.memory import KERNEL_BYTES, MIB, PredictedGroup, group_bytes, links_of, predict_groups

logger = logging.getLogger(__name__)

_NAMED = 3
LACKS: Mapping[str, frozenset[OpClass]] = {
    "gloo": frozenset(),
    "nccl": frozenset(),
    "rl_safe_gloo": frozenset(),
    "rl_safe_nccl": frozenset(),
    "mpi": frozenset({OpClass.GATHER_SCATTER}),
}
"""Op classes that torch's backends lack, from torch's table of backends: MPI has no reduce_scatter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommsPlan:
    """The groups that a bootstrap will connect, with their limits and predicted sizes.

    Example: ``CommsPlan.of(layout, Features(), {}).bytes``
    """

    layout: ParallelLayout
    features: Features
    limits: Mapping[str, int]
    """Limits in CTAs, by the keys of Megatron's ``nccl_communicator_config_path`` file."""
    groups: tuple[PredictedGroup, ...]
    """The groups of a rank, the largest first."""

    @classmethod
    def of(
        cls, layout: ParallelLayout, features: Features, overrides: Mapping[str, int], *, budget: bool = True
    ) -> CommsPlan:
        """Makes the plan for a layout.

        Args:
            layout: Sizes of the training world's axes.
            features: Features of the run that decide which collectives the groups carry.
            overrides: Limits by key, from the configuration.
            budget: True to also limit groups that carry little; False to use only ``overrides``.

        Raises:
            ConfigError: If an override names an unknown group or has a value that is not a number of CTAs.
        """
        limits = plan_limits(layout, features, overrides)
        if not budget:
            limits = dict(overrides)
        groups = predict_groups(layout, features, limits)
        return cls(layout=layout, features=features, limits=limits, groups=tuple(groups))

    @property
    def bytes(self) -> int:
        """The bytes of device memory that all groups and NCCL's kernels take on a rank."""
        return KERNEL_BYTES + sum(group.bytes for group in self.groups)

    @property
    def sends_unbatched(self) -> bool:
        """True if some group carries unbatched sends."""
        return any(OpClass.UNBATCHED_P2P in group.classes for group in self.groups)

    def check_backend(self, backend: str) -> None:
        """Raises CommunicatorError if a backend is unknown, or lacks an op class that a group will carry.

        Args:
            backend: The backend of the default group, which other groups inherit, e.g. ``"cpu:gloo,cuda:nccl"``.
        """
        parts = [part.rpartition(":")[2] for part in backend.split(",")]
        if unknown := [part for part in parts if part not in LACKS]:
            raise CommunicatorError(f"backend {unknown[0]} is not known: use one of {', '.join(LACKS)}")
        for group in self.groups:
            for part in parts:
                if lacking := [op_class for op_class in group.classes if op_class in LACKS[part]]:
                    raise CommunicatorError(f"{group.description} will carry {lacking[0]}, which backend {part} lacks")

    def check_fits(self, *, free_bytes: int, gpus_per_node: int | None = None) -> None:
        """Raises if the groups will not fit into memory, and warns if they may not fit.

        For a group on several nodes the prediction is an upper bound, because the network is not known yet. What is
        certain is what it takes over sockets.

        Args:
            free_bytes: Free bytes of the device.
            gpus_per_node: Largest number of ranks on a node; None if all ranks may be on one node.

        Raises:
            CommunicatorError: If even the certain part is larger than ``free_bytes``. It names the largest groups and
                the settings that help.
        """
        if self.bytes <= free_bytes:
            return
        large = [g for g in self.groups if g.kind.traffic(self.layout, self.features) is not Traffic.CONTROL]
        heaviest = large[:_NAMED]
        named = ", ".join(f"{g.description} {g.bytes / MIB:.0f} MiB" for g in heaviest)
        settings = ", ".join(bootstrap_setting(f"max_ctas.{g.kind.key}=8") for g in heaviest)
        free = f"{free_bytes / MIB:.0f} MiB are free; the heaviest are {named}"
        least = KERNEL_BYTES + sum(self._least(group, gpus_per_node) for group in self.groups)
        if least <= free_bytes:
            logger.warning(
                "the communicators may take up to %.0f MiB of device memory, %.0f of it in groups on several nodes, "
                "which may have fewer channels, and %s: should connecting them fail for want of memory, set %s",
                self.bytes / MIB,
                (self.bytes - least) / MIB,
                free,
                settings,
            )
            return
        raise CommunicatorError(
            f"the communicators will take {self.bytes / MIB:.0f} MiB of device memory and {free}: free memory before "
            f"the groups are made, or limit them with {settings}"
        )

    def _least(self, group: PredictedGroup, gpus_per_node: int | None) -> int:
        if gpus_per_node is None or group.size <= gpus_per_node:
            return group.bytes
        links = links_of(group.description, group.size, self.features)
        return group_bytes(group.classes, size=group.size, max_ctas=group.max_ctas, links=links, near=gpus_per_node)
