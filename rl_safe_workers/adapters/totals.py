"""What several bootstraps over the same groups have cost together: engines of one process share Megatron's groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rl_safe_workers.comms.report import BootstrapReport, LedgerEntry


def add_reports(first: BootstrapReport, second: BootstrapReport) -> BootstrapReport:
    """What two bootstraps over the same groups have cost together; each op class of a group is listed once."""
    entries: dict[Any, LedgerEntry] = {}
    for entry in (*first.entries, *second.entries):
        key = (entry.group, entry.ranks, entry.op_class)
        entries[key] = _add_entries(entries[key], entry) if key in entries else entry
    total = replace(
        first, entries=tuple(entries.values()), unknown=tuple(dict.fromkeys(first.unknown + second.unknown)),
        seconds=first.seconds + second.seconds, kernel_bytes=_sum(first.kernel_bytes, second.kernel_bytes),
        kernel_seconds=first.kernel_seconds + second.kernel_seconds,
    )  # fmt: skip
    return replace(total, skipped=first.skipped - (total.groups - first.groups))


def _add_entries(first: LedgerEntry, second: LedgerEntry) -> LedgerEntry:
    """The same op class again: what was connected takes no memory a second time, so the prediction stays."""
    return replace(first, seconds=first.seconds + second.seconds, bytes=_sum(first.bytes, second.bytes))


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None and second is None else (first or 0) + (second or 0)
