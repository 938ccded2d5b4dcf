"""``rl-safe audit DIR``: whether a checkpoint is whole."""

from __future__ import annotations

import argparse
import json

from rl_safe_workers.checkpoint.audit import audit
from rl_safe_workers.checkpoint.audit_report import AuditReport
from rl_safe_workers.cli.terminal import to_path
from rl_safe_workers.foreign_files import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    parser.description = (
        "Checks a torch_dist checkpoint: ours, or one of verl, NeMo RL or Megatron-LM. "
        "Exit code 0: it is whole; 1: it is damaged."
    )
    parser.add_argument(
        "directory", metavar="DIR", type=to_path, help="global_step_N, iter_N or the directory of shards"
    )
    parser.add_argument("--deep", action="store_true", help="also read every byte and compare checksums")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more than warnings")
    parser.set_defaults(execute=run_audit)


def run_audit(arguments: argparse.Namespace) -> int:
    """Audits, prints the report and returns the exit code."""
    report = audit(arguments.directory, deep=arguments.deep)
    print(json.dumps(report.as_dict(), indent=1) if arguments.json else "\n".join(map(printable, _lines(report))))
    return 0 if report.ok else 1


def _lines(report: AuditReport) -> list[str]:
    origin = f"of ours, step {report.step}" if report.has_manifest else "without a manifest of ours"
    lines = [
        f"{report.directory}: {report.backend or 'format unknown'}, {origin}",
        f"{report.tensors} tensors in {report.chunks} chunks, {report.objects} objects, {report.files} files, "
        f"{report.bytes / 2**20:.1f} MiB",
    ]
    if report.layout:
        lines.append("layout " + ", ".join(f"{name} {size}" for name, size in report.layout.items()))
    if report.versions:
        lines.append("written by " + ", ".join(f"{name} {version}" for name, version in report.versions.items()))
    lines += [f"{problem.kind}: {problem.text}" for problem in report.problems]
    if unlisted := sum(report.counts.values()) - len(report.problems):
        lines.append(f"and {unlisted} more problems")
    depth = "every byte read" if report.deep else "bytes not read: --deep does"
    verdict = "whole" if report.ok else f"DAMAGED: {sum(report.counts.values())} problems"
    return [*lines, f"{verdict} ({depth}; {report.seconds:.2f} s)"]
