"""Implements ``rl-safe doctor``: checks before a run if a machine is fit for it."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from rl_safe_workers.cli.terminal import to_path
from rl_safe_workers.driver.inputs.preflight import preflight
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.recipe import load_recipe

if TYPE_CHECKING:
    from rl_safe_workers.doctor.check import Subject
    from rl_safe_workers.doctor.live import Live

DESCRIPTION = """
Checks the machine that it runs on: versions, GPUs and their links, harmful environment variables, memory and limits,
the folder of checkpoints, spawned processes, Ray. With a recipe, it compares them with the needs of that run.
--live also starts the recipe's trainers, connects every communicator without a model, and ends them.
It writes one file of 64 MiB to the folder of checkpoints, and removes it at once.
Exit code 0: nothing stops the run; 1: something does; 2: the input is wrong.
"""
EPILOG = """
rl-safe doctor |
rl-safe doctor recipes/quickstart.yaml cluster.num_trainers=8 |
rl-safe doctor recipes/quickstart_gpu.yaml cluster.ray_address=auto --live
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("overrides", metavar="RECIPE key=value", nargs="*", help="a recipe, and overrides")
    parser.add_argument("--live", action="store_true", help="bootstrap the recipe's layout, without a model")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--checkpoint-path", metavar="DIR", type=to_path, help="folder of checkpoints (default: the recipe's)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more than warnings")
    parser.set_defaults(execute=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Examines the machine, prints the findings, and returns the exit code.

    Raises:
        UsageError: If the input is wrong.
    """
    subject = _subject(arguments)
    from rl_safe_workers.doctor.examine import examine

    examination = examine(subject, _live if arguments.live else None)
    if arguments.json:
        import sys

        from rl_safe_workers.doctor.output import write_json

        write_json(examination, sys.stdout)
    else:
        from rl_safe_workers.doctor.output import print_examination

        print_examination(examination)
    return int(examination.stops)


def _subject(arguments: argparse.Namespace) -> Subject:
    from rl_safe_workers.doctor.check import Subject

    if not arguments.overrides:
        if arguments.live:
            raise ConfigError("doctor: --live takes a recipe: its layout is what is connected")
        return Subject(checkpoint_path=arguments.checkpoint_path)
    recipe, *overrides = arguments.overrides
    config = load_recipe(recipe, overrides)
    # CPUs are a finding here, beside all others.
    preflight(config, cpus=math.inf)
    return Subject(recipe=recipe, overrides=tuple(overrides), config=config, checkpoint_path=arguments.checkpoint_path)


def _live(subject: Subject) -> Live:
    import sys
    from contextlib import redirect_stdout

    from rl_safe_workers.doctor.live import try_live
    from rl_safe_workers.driver.outputs.console import RunConsole
    from rl_safe_workers.plain_console import PlainConsole

    # Stdout is for what was found; Ray writes there when a worker dies.
    with redirect_stdout(sys.stderr):
        return try_live(subject, RunConsole(PlainConsole(stderr=True)))
