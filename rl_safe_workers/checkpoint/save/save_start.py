"""The ranks' reports to rank 0 before a save, and a check that the copies of a background save fit into host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_safe_workers.ranks import name_ranks, trainer_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """A rank's report to rank 0 before a save.

    Example: ``StartReport(digest="9f2c...", size_bytes=2**30, host="c1f03a77", staged_bytes=0, free_memory_bytes=0)``
    """

    digest: str
    """The digest of the rank's holdings."""
    size_bytes: int
    """Bytes that the rank writes."""
    host: str
    """See `comms.hosts.own_host`."""
    staged_bytes: int
    """New host memory for the copy that a save in the background writes."""
    free_memory_bytes: int
    """Free host memory; 0 if ``staged_bytes`` is 0."""


def short_of_memory(reports: Sequence[StartReport]) -> list[str]:
    """Returns a sentence for each host on which the copies of a save in the background may not fit into memory."""
    hosts: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report.staged_bytes:
            hosts.setdefault(report.host, []).append(rank)
    found = []
    for ranks in hosts.values():
        needed = sum(reports[rank].staged_bytes for rank in ranks)
        free = min(reports[rank].free_memory_bytes for rank in ranks)
        if needed > free:
            found.append(
                f"the copies of {name_ranks(trainer_ids(ranks))} take {needed / 2**30:.1f} GiB of host memory, and "
                f"{free / 2**30:.1f} GiB are free there: the kernel may kill a process; turn async_save off, or give "
                "the container more memory"
            )
    return found
