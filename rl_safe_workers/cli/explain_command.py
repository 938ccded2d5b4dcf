"""Implements ``rl-safe explain``: says why a run hangs or has died. Any framework may have started it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rl_safe_workers.cli.terminal import to_path
from rl_safe_workers.errors import UsageError

if TYPE_CHECKING:
    from rl_safe_workers.diagnostics.explanation import Explanation

DESCRIPTION = """
Says why a run stands still or has died. The run need not know this package.
--pid looks at living ranks from outside, by py-spy and the operating system. A launcher such as torchrun stands for its
ranks. --ray looks at the actors of a Ray cluster on this node. FOLDER is what a dead run has left: logs, Ray's session
folder, Flight Recorder files. The first line is the root cause, the second what to do.
Exit code 0: the root cause is known; 1: it is not; 2: the input is wrong.
"""
EPILOG = """
rl-safe explain --pid 4711 |
rl-safe explain --ray auto --job 02000000 |
rl-safe explain /tmp/ray/session_latest --html why.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("folder", metavar="FOLDER", type=to_path, nargs="?", help="what is left of a dead run")
    parser.add_argument("--pid", metavar="PID", type=int, nargs="+", help="processes of ranks, or their launcher")
    parser.add_argument("--ray", metavar="ADDRESS", help="address of a Ray cluster, or auto")
    parser.add_argument("--job", metavar="ID", help="only the actors of this job of the cluster")
    parser.add_argument("--patience", metavar="S", type=float, default=60.0, help="longest wait in seconds (60)")
    parser.add_argument("--json", metavar="FILE", type=to_path, help="also write everything as JSON")
    parser.add_argument("--trace", metavar="FILE", type=to_path, help="also write collectives for ui.perfetto.dev")
    parser.add_argument("--html", metavar="FILE", type=to_path, help="also write a page")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more than warnings")
    parser.set_defaults(execute=run_explain)


def run_explain(arguments: argparse.Namespace) -> int:
    """Explains a run, prints the explanation, and returns the exit code.

    Raises:
        UsageError: If the arguments do not give exactly one of a folder, processes and a cluster, or if that does not
            exist.
    """
    if sum(one is not None for one in (arguments.folder, arguments.pid, arguments.ray)) != 1:
        raise UsageError("explain takes one of FOLDER, --pid PID ... and --ray ADDRESS")
    if arguments.job is not None and arguments.ray is None:
        raise UsageError("--job names a job of a Ray cluster: give --ray ADDRESS, too")
    if not 0 < arguments.patience <= 3600:
        raise UsageError(f"--patience {arguments.patience:g}: give more than 0 and up to 3600 seconds")
    explanation = _explain(arguments)
    from rl_safe_workers.diagnostics import explain_output

    print("\n".join(explain_output.lines(explanation)))
    for path, write in (
        (arguments.json, explain_output.write_json),
        (arguments.trace, explain_output.write_trace),
        (arguments.html, explain_output.write_html),
    ):
        if path is not None:
            write(explanation, path)
    return 0 if explanation.is_known else 1


def _explain(arguments: argparse.Namespace) -> Explanation:
    if arguments.folder is not None:
        from rl_safe_workers.diagnostics.remains import explain_folder

        return explain_folder(arguments.folder)
    from rl_safe_workers.diagnostics.holdup import explain_sightings
    from rl_safe_workers.diagnostics.onlooker import find_ranks, observe

    if arguments.pid is not None:
        import psutil

        if not any(map(psutil.pid_exists, arguments.pid)):
            raise UsageError(f"--pid: there is no process {', '.join(map(str, arguments.pid))}")
        pids = find_ranks(arguments.pid)
        return explain_sightings(observe(pids, patience_s=arguments.patience))
    from rl_safe_workers.compat.ray_tables import actors_at
    from rl_safe_workers.diagnostics.ray_actors import choose

    chosen = choose(actors_at(arguments.ray), job=arguments.job)
    sightings = observe(list(chosen.classes), patience_s=arguments.patience, actors=chosen.classes)
    return explain_sightings(sightings, notes=chosen.notes)
