"""The ``rl-safe`` command.

Imports neither torch nor ray until a run starts, so that bad input is refused at once.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence

from rl_safe_workers import __version__
from rl_safe_workers.cli import terminal
from rl_safe_workers.cli.audit import add_audit_parser
from rl_safe_workers.cli.bench import add_bench_parser
from rl_safe_workers.cli.convert import add_convert_parser
from rl_safe_workers.cli.doctor import add_doctor_parser
from rl_safe_workers.cli.plan import add_plan_parser
from rl_safe_workers.cli.slices import add_slices_parser
from rl_safe_workers.config import ClusterConfig
from rl_safe_workers.driver.preflight import preflight
from rl_safe_workers.errors import RlSafeError
from rl_safe_workers.recipe import LOCAL_RAY, load_recipe, ray_address


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The arguments after the program's name; None: those of this process.

    Returns:
        The exit code: 0; 1 if the run failed; 2 if the input is wrong; 3 if a benchmark missed a goal; 128 + the
        signal's number if interrupted.

    Raises:
        SystemExit: After ``--help`` and ``--version``, and with code 2 for arguments that are not understood.
    """
    try:
        arguments = _parse(argv)
        terminal.set_up(verbose=arguments.verbose)
        code: int = arguments.execute(arguments)
    except RlSafeError as error:
        terminal.report(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("rl-safe: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return code


def _run(arguments: argparse.Namespace) -> int:
    config = load_recipe(arguments.recipe, arguments.overrides)
    preflight(config, cpus=_usable_cpus(config.cluster))
    from rl_safe_workers.driver.run import run

    run(config)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = terminal.Parser(prog="rl-safe", description="Megatron trainers that are safe beside vLLM.")
    parser.add_argument("--version", action="version", version=f"rl-safe {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="train, as a recipe says")
    run.add_argument("recipe", metavar="RECIPE", help="YAML file")
    run.add_argument("overrides", metavar="key=value", nargs="*", help="dotted key, YAML value: trainer.seed=1")
    run.add_argument("-v", "--verbose", action="store_true", help="log what the run does, not only warnings")
    run.set_defaults(execute=_run)
    add_bench_parser(commands)
    add_convert_parser(commands)
    add_audit_parser(commands)
    add_plan_parser(commands)
    add_doctor_parser(commands)
    add_slices_parser(commands)
    # argparse takes no positional after an option that follows one (`run RECIPE -v key=value`): they come back as rest.
    arguments, rest = parser.parse_known_args(argv)
    takes_rest = hasattr(arguments, "overrides")
    if unknown := [text for text in rest if text.startswith("-") or not takes_rest]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_rest:
        arguments.overrides += rest
    return arguments


def _usable_cpus(cluster: ClusterConfig) -> float:
    """Returns this process's CPUs; infinite for a running cluster, whose CPUs are known only once it is joined."""
    if ray_address(cluster) != LOCAL_RAY:
        return math.inf
    return len(os.sched_getaffinity(0))
