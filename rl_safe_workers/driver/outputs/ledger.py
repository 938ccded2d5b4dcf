"""Reports the cost of the communicators: as metrics, as a table, as JSON and to Ray's dashboard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ray.util.metrics import Gauge
from rich.table import Table

from rl_safe_workers.comms.report import BootstrapReport, LateAllocation, LedgerEntry
from rl_safe_workers.topology.memory import KERNEL_BYTES

MIB = 2**20
GROUPS, SECONDS = "rl_safe/comms_groups", "rl_safe/comms_bootstrap_s"
BYTES, PREDICTED_BYTES = "rl_safe/comms_bytes", "rl_safe/comms_predicted_bytes"
LATE, LATE_BYTES = "rl_safe/comms_late", "rl_safe/comms_late_bytes"


def ledger_metrics(reports: Sequence[BootstrapReport]) -> dict[str, float]:
    """Returns the largest figures over all ranks of a bootstrap, for ``metrics.jsonl``."""
    found = {
        GROUPS: float(max(report.groups for report in reports)),
        SECONDS: max(report.seconds for report in reports),
    }
    measured = [report.bytes for report in reports if report.bytes is not None]
    if measured:
        found[BYTES] = float(max(measured))
        found[PREDICTED_BYTES] = float(max(report.predicted_bytes for report in reports))
    return found


def late_metrics(found: Sequence[Sequence[LateAllocation]]) -> dict[str, float]:
    """Returns the largest count and the largest bytes over all ranks of late allocations.

    Args:
        found: Late allocations of each training rank, in the order of ranks.
    """
    return {
        LATE: float(max(map(len, found), default=0)),
        LATE_BYTES: float(max((sum(late.bytes or 0 for late in of_rank) for of_rank in found), default=0)),
    }


def ledger_table(report: BootstrapReport) -> Table:
    """Returns a table of training rank 0's communicators, in the order in which they were connected."""
    table = Table(title="communicators of training rank 0", title_justify="left", highlight=False)
    table.add_column("group")
    table.add_column("ranks")
    table.add_column("op class")
    for heading in ("s", "MiB", "predicted MiB"):
        table.add_column(heading, justify="right")
    if report.kernel_bytes:
        kernels = (f"{report.kernel_seconds:.3f}", f"{report.kernel_bytes / MIB:.0f}", f"{KERNEL_BYTES / MIB:.0f}")
        table.add_row("NCCL's kernels", "", "", *kernels)
    for entry in report.entries:
        table.add_row(*_cells(entry))
    return table


def _cells(entry: LedgerEntry) -> tuple[str, ...]:
    taken = "-" if entry.bytes is None else f"{entry.bytes / MIB:.0f}"
    ranks = ",".join(map(str, entry.ranks)) if len(entry.ranks) <= 8 else f"{len(entry.ranks)} ranks"
    return entry.group, ranks, entry.op_class, f"{entry.seconds:.3f}", taken, f"{entry.predicted_bytes / MIB:.0f}"


def write_ledger(path: Path, reports: Sequence[BootstrapReport]) -> None:
    """Writes the ledgers of all ranks as a JSON list, in the order of training ranks."""
    path.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n", encoding="utf-8")


def export_ledger(reports: Sequence[BootstrapReport]) -> None:
    """Sets Ray's metrics ``rl_safe_comms_bytes`` and ``rl_safe_comms_seconds``, tagged by group, op class and rank."""
    tags = ("group", "op_class", "training_rank")
    size = Gauge("rl_safe_comms_bytes", description="Device memory of a communicator's op class", tag_keys=tags)
    seconds = Gauge("rl_safe_comms_seconds", description="Seconds to connect a communicator's op class", tag_keys=tags)
    for rank, report in enumerate(reports):
        for entry in report.entries:
            named = {"group": entry.group, "op_class": str(entry.op_class), "training_rank": str(rank)}
            seconds.set(entry.seconds, tags=named)
            if entry.bytes is not None:
                size.set(entry.bytes, tags=named)
