"""Reports of communicator work. Pure Python, so that a driver can receive them without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rl_safe_workers.topology.groups import OpClass
from rl_safe_workers.topology.memory import KERNEL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """The cost of connecting one op class of one group on one rank.

    Example: ``LedgerEntry(group="EXPERT_DATA_PARALLEL_GROUP", ranks=(0, 2), op_class="reduce", seconds=0.31,
    bytes=507510784, predicted_bytes=507510784)``
    """

    group: str
    ranks: tuple[int, ...]
    op_class: OpClass
    seconds: float
    bytes: int | None
    """Growth of device memory outside torch's allocator; None where there is no device to ask."""
    predicted_bytes: int
    """Bytes that the model of ``topology.memory`` expects on NVLink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapReport:
    """The result of a bootstrap on this rank.

    Example: ``BootstrapReport(entries=(…), skipped=7, unknown=(), seconds=0.04)``
    """

    entries: tuple[LedgerEntry, ...]
    """The connected op classes, in the order of connecting."""
    skipped: int
    """Groups that carry nothing under this configuration."""
    unknown: tuple[str, ...]
    """Groups that the table of groups lacks, with their ranks. Some of their op classes may connect late."""
    seconds: float
    kernel_bytes: int | None = None
    """Device memory of NCCL's kernels, which stay loaded; None without a device, 0 if they were loaded before."""
    kernel_seconds: float = 0.0
    """Seconds to load the kernels; part of ``seconds``."""

    @property
    def groups(self) -> int:
        """Number of groups that were connected."""
        return len({(entry.group, entry.ranks) for entry in self.entries})

    @property
    def bytes(self) -> int | None:
        """Device memory of all groups and of NCCL's kernels; None where there is no device to ask."""
        measured = [entry.bytes for entry in self.entries if entry.bytes is not None]
        return sum(measured) + (self.kernel_bytes or 0) if measured else None

    @property
    def predicted_bytes(self) -> int:
        """Bytes that the model of ``topology.memory`` expects for all entries."""
        return sum(entry.predicted_bytes for entry in self.entries) + (KERNEL_BYTES if self.kernel_bytes else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateAllocation:
    """A collective that took device memory, or could have, after the bootstrap.

    Example: ``LateAllocation(group="EXPERT_MODEL_PARALLEL_GROUP", ranks=(0, 1), op_class="all_to_all",
    operation="alltoall_base_", phase="train", bytes=402653184)``
    """

    group: str
    ranks: tuple[int, ...]
    op_class: OpClass | None
    operation: str
    """torch's name of the collective."""
    phase: str
    bytes: int | None
    """Growth of device memory outside torch's allocator; None where there is no device to ask."""

    def __str__(self) -> str:
        taken = "" if self.bytes is None else f" took {self.bytes / 2**20:.0f} MiB of device memory"
        return f"{self.operation} ({self.op_class}) on {self.group} {list(self.ranks)} in phase {self.phase}{taken}"


def add_reports(first: BootstrapReport, second: BootstrapReport) -> BootstrapReport:
    """Returns the joint cost of two bootstraps over the same groups; each op class of a group is listed once."""
    entries: dict[Any, LedgerEntry] = {}
    for entry in (*first.entries, *second.entries):
        key = (entry.group, entry.ranks, entry.op_class)
        entries[key] = _add_entries(entries[key], entry) if key in entries else entry
    total = replace(
        first,
        entries=tuple(entries.values()),
        unknown=tuple(dict.fromkeys(first.unknown + second.unknown)),
        seconds=first.seconds + second.seconds,
        kernel_bytes=_sum(first.kernel_bytes, second.kernel_bytes),
        kernel_seconds=first.kernel_seconds + second.kernel_seconds,
    )
    return replace(total, skipped=first.skipped - (total.groups - first.groups))


def _add_entries(first: LedgerEntry, second: LedgerEntry) -> LedgerEntry:
    """Adds the costs of an op class that was connected twice. The second time takes no memory: the prediction stays."""
    return replace(first, seconds=first.seconds + second.seconds, bytes=_sum(first.bytes, second.bytes))


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None and second is None else (first or 0) + (second or 0)
