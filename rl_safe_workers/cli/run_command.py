"""Implements ``rl-safe run``: trains with the settings of a recipe."""

from __future__ import annotations

import argparse
import math
import os
from functools import partial

from rl_safe_workers.config import ClusterConfig
from rl_safe_workers.driver.inputs.preflight import preflight
from rl_safe_workers.own_process import end_within
from rl_safe_workers.recipe import LOCAL_RAY, load_recipe, ray_address

EXIT_S = 30.0
"""Longest time from the end of a failed run's processes to the end of this one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="dotted key, YAML value: trainer.seed=1")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the run does, not only warnings")
    parser.set_defaults(execute=run_recipe)


def run_recipe(arguments: argparse.Namespace) -> int:
    """Checks the recipe against this machine, trains and returns the exit code."""
    config = load_recipe(arguments.recipe, arguments.overrides)
    preflight(config, cpus=_usable_cpus(config.cluster))
    # Ray and torch are imported only after all checks of the input.
    from rl_safe_workers.driver.run import run

    run(config, when_failed=partial(end_within, EXIT_S))
    return 0


def _usable_cpus(cluster: ClusterConfig) -> float:
    """Returns this process's CPUs; infinite for a running cluster, whose CPUs are known only once it is joined."""
    if ray_address(cluster) != LOCAL_RAY:
        return math.inf
    return len(os.sched_getaffinity(0))
