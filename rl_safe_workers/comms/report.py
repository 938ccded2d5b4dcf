"""What communicator work reports. Pure Python, so that a driver can receive it without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapReport:
    """What a bootstrap did on this rank.

    Example: ``BootstrapReport(groups=9, collectives=21, skipped_single_rank=7, seconds=0.04)``
    """

    groups: int
    collectives: int
    skipped_single_rank: int
    seconds: float
