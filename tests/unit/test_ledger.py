"""The ledger: what communicators have cost, for people, for metrics and as a file."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

from rich.console import Console

from rl_safe_workers.comms.report import BootstrapReport, LateAllocation, LedgerEntry
from rl_safe_workers.driver.outputs.ledger import late_metrics, ledger_metrics, ledger_table, write_ledger
from rl_safe_workers.topology.groups import OpClass
from rl_safe_workers.topology.memory import KERNEL_BYTES

MIB = 2**20
ENTRY = LedgerEntry(
    group="EXPERT_DATA_PARALLEL_GROUP",
    ranks=(0, 2),
    op_class=OpClass.REDUCE,
    seconds=0.31,
    bytes=486 * MIB,
    predicted_bytes=484 * MIB,
)
REPORT = BootstrapReport(
    entries=(ENTRY, replace(ENTRY, op_class=OpClass.GATHER_SCATTER, bytes=0, predicted_bytes=0)),
    skipped=7,
    unknown=(),
    seconds=1.2,
    kernel_bytes=428 * MIB,
    kernel_seconds=0.7,
)


def test_kernels_count_once_and_only_where_they_were_loaded() -> None:
    assert REPORT.bytes == (486 + 428) * MIB
    assert REPORT.predicted_bytes == 484 * MIB + KERNEL_BYTES
    again = replace(REPORT, kernel_bytes=0)
    assert (again.bytes, again.predicted_bytes) == (486 * MIB, 484 * MIB)


def test_the_table_has_a_row_for_the_kernels_and_one_for_each_class() -> None:
    text = _text(REPORT)
    assert "NCCL's kernels" in text
    assert [text.count(str(op_class)) for op_class in (OpClass.REDUCE, OpClass.GATHER_SCATTER)] == [1, 1]
    assert "NCCL's kernels" not in _text(replace(REPORT, kernel_bytes=0))


def _text(report: BootstrapReport) -> str:
    console = Console(width=120, record=True, file=StringIO())
    console.print(ledger_table(report))
    return console.export_text()


def test_metrics_are_those_of_the_worst_rank_and_have_no_bytes_without_a_device() -> None:
    worse = replace(REPORT, entries=(replace(ENTRY, bytes=600 * MIB),), seconds=2.0)
    assert ledger_metrics([REPORT, worse]) == {
        "rl_safe/comms_groups": 1.0,
        "rl_safe/comms_bootstrap_s": 2.0,
        "rl_safe/comms_bytes": (600 + 428) * MIB,
        "rl_safe/comms_predicted_bytes": 484 * MIB + KERNEL_BYTES,
    }
    on_cpu = replace(REPORT, entries=(replace(ENTRY, bytes=None),), kernel_bytes=None)
    assert ledger_metrics([on_cpu]).keys() == {"rl_safe/comms_groups", "rl_safe/comms_bootstrap_s"}


def test_late_bytes_are_those_of_the_worst_rank() -> None:
    late = LateAllocation(
        group="EXPERT_MODEL_PARALLEL_GROUP",
        ranks=(0, 1),
        op_class=OpClass.ALL_TO_ALL,
        operation="alltoall_base_",
        phase="train",
        bytes=384 * MIB,
    )
    assert late_metrics([[], [late, late]]) == {"rl_safe/comms_late": 2.0, "rl_safe/comms_late_bytes": 768.0 * MIB}
    assert late_metrics([]) == {"rl_safe/comms_late": 0.0, "rl_safe/comms_late_bytes": 0.0}


def test_the_file_has_every_rank(tmp_path: Path) -> None:
    write_ledger(tmp_path / "comms.json", [REPORT, REPORT])
    first, _ = json.loads((tmp_path / "comms.json").read_text())
    assert first["kernel_bytes"] == 428 * MIB
    assert first["entries"][0]["group"] == "EXPERT_DATA_PARALLEL_GROUP"
