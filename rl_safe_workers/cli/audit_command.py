"""Implements ``rl-safe audit DIR``: checks that a checkpoint is complete, or that two steps differ as they should."""

from __future__ import annotations

import argparse
import json

from rl_safe_workers.checkpoint.audit import audit
from rl_safe_workers.checkpoint.audit_report import AuditReport, StepsReport
from rl_safe_workers.cli.terminal import to_path
from rl_safe_workers.errors import UsageError
from rl_safe_workers.foreign_files import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.description = (
        "Checks a torch_dist checkpoint: ours, or one of verl, NeMo RL or Megatron-LM. "
        "With a later step of the same run, it finds weights and optimizer states that did not move between the two. "
        "Exit code 0: it is whole, or all moved; 1: it is damaged, or something is stale."
    )
    parser.add_argument(
        "directory", metavar="DIR", type=to_path, help="global_step_N, iter_N or the directory of shards"
    )
    parser.add_argument(
        "later", metavar="LATER", type=to_path, nargs="?", help="a later step of the same run, to compare with"
    )
    parser.add_argument("--deep", action="store_true", help="also read every byte and compare checksums")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more than warnings")
    parser.set_defaults(execute=run_audit)


def run_audit(arguments: argparse.Namespace) -> int:
    """Audits, prints the report and returns the exit code.

    Raises:
        UsageError: If ``--deep`` is given with two steps.
    """
    if arguments.later is not None:
        if arguments.deep:
            raise UsageError("--deep reads one checkpoint through; leave it out to compare two steps")
        from rl_safe_workers.checkpoint.audit_steps import audit_steps  # imported here, because it imports numpy

        compared = audit_steps(arguments.directory, arguments.later)
        return _print(compared, _comparison_lines(compared), as_json=arguments.json)
    report = audit(arguments.directory, deep=arguments.deep)
    return _print(report, _lines(report), as_json=arguments.json)


def _print(report: AuditReport | StepsReport, lines: list[str], *, as_json: bool) -> int:
    print(json.dumps(report.as_dict(), indent=1) if as_json else "\n".join(map(printable, lines)))
    return 0 if report.ok else 1


def _comparison_lines(report: StepsReport) -> list[str]:
    first, second = ("" if step is None else f" (step {step})" for step in report.steps)
    lines = [
        f"{report.first}{first} to {report.second}{second}: {report.moved} of {report.units} weights moved",
        *_problem_lines(report),
    ]
    if report.not_judged:
        lines.append(f"{report.not_judged} weights cannot be judged: their fp32 weights are not stored")
    verdict = "nothing is stale" if report.ok else f"STALE: {sum(report.counts.values())} problems"
    return [*lines, f"{verdict} ({report.seconds:.2f} s)"]


def _problem_lines(report: AuditReport | StepsReport) -> list[str]:
    lines = [f"{problem.kind}: {problem.text}" for problem in report.problems]
    if unlisted := sum(report.counts.values()) - len(report.problems):
        lines.append(f"and {unlisted} more problems")
    return lines


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
    lines += _problem_lines(report)
    depth = "every byte read" if report.deep else "bytes not read: --deep does"
    verdict = "whole" if report.ok else f"DAMAGED: {sum(report.counts.values())} problems"
    return [*lines, f"{verdict} ({depth}; {report.seconds:.2f} s)"]
