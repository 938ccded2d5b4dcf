"""Implements ``rl-safe plan``: shows the layout, communicators, memory and hazards of a run before it starts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rl_safe_workers.cli.terminal import to_path
from rl_safe_workers.errors import ConfigError

if TYPE_CHECKING:
    from rl_safe_workers.plan.fields import Field
    from rl_safe_workers.plan.plan import Plan
    from rl_safe_workers.plan.request import Request

DESCRIPTION = """
Shows a run before it exists: ranks by node and role, Megatron's communicators, their memory, the writes of a save,
and hazards. It starts nothing, and needs neither torch nor a GPU. Describe the run by a recipe with overrides, by
options, or by the settings of another framework. Options win.
Exit code 0: the plan is made; 1: a hazard stops the run (with --check); 2: the input is wrong.
"""
EPILOG = """
rl-safe plan --world 512 --trainers 256 --tp 4 --pp 2 --ep 8 --etp 1 --vllm-tp 4 --model DIR |
rl-safe plan recipes/quickstart.yaml --html plan.html |
rl-safe plan --json --from verl actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 trainer.nnodes=4 |
rl-safe plan --from nemo-rl grpo.yaml cluster.num_nodes=4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    from rl_safe_workers.plan.fields import FIELDS

    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("overrides", metavar="RECIPE key=value", nargs="*", help="a recipe of ours, and overrides")
    parser.add_argument(
        "--from",
        dest="other",
        nargs=argparse.REMAINDER,
        metavar="verl ARGS | nemo-rl FILE",
        help="comes last: the arguments of verl's main_ppo, or a NeMo RL YAML with key=value",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--svg", metavar="FILE", type=to_path, help="write a picture of the ranks, with a choice of groups"
    )
    parser.add_argument("--html", metavar="FILE", type=to_path, help="write a page with the picture and the tables")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a hazard stops the run")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more than warnings")
    facts = parser.add_argument_group("facts")
    for field in FIELDS:
        target, text = f"fact_{field.name}", _help(field)
        if field.kind is bool:
            facts.add_argument(field.option, dest=target, action="store_const", const="true", help=text)
            facts.add_argument(
                f"--no-{field.option[2:]}", dest=target, action="store_const", const="false", help=argparse.SUPPRESS
            )
        else:
            facts.add_argument(field.option, dest=target, metavar="X", help=text)
    parser.set_defaults(execute=run_plan)


def _help(field: Field) -> str:
    listed = f": {', '.join(field.choices)}" if field.choices else ""
    default = f" (default {field.default})" if field.default is not None else ""
    negated = f"; or --no-{field.option[2:]}" if field.kind is bool else ""
    return f"{field.help}{listed}{default}{negated}"


def run_plan(arguments: argparse.Namespace) -> int:
    """Plans a run, prints the plan, and returns the exit code.

    Raises:
        UsageError: If the input is wrong.
    """
    from rl_safe_workers.findings import stops
    from rl_safe_workers.plan.hazards import find
    from rl_safe_workers.plan.plan import make_plan

    plan = make_plan(_request(arguments))
    findings = find(plan)
    if arguments.svg is not None or arguments.html is not None:
        _draw(plan, arguments)
    if arguments.json:
        import sys

        from rl_safe_workers.plan.as_json import write_json

        write_json(plan, findings, sys.stdout)
    else:
        from rl_safe_workers.plan.tables import print_plan

        print_plan(plan, findings)
    return int(arguments.check and stops(findings))


def _request(arguments: argparse.Namespace) -> Request:
    from rl_safe_workers.plan.request import Source, make_request, options_source

    given = {name[5:]: value for name, value in vars(arguments).items() if name.startswith("fact_")}
    options = options_source(given)
    base = Source(name="options")
    if arguments.other is not None and arguments.overrides:
        raise ConfigError(f"plan: {arguments.overrides[0]!r} before --from: give a recipe or --from, not both")
    if arguments.other is not None:
        from rl_safe_workers.plan.sources import FROM, read_source

        if not arguments.other:
            raise ConfigError(f"--from is empty: it takes one of {', '.join(FROM)}, and what belongs to it")
        base = read_source(arguments.other[0], arguments.other[1:])
    elif arguments.overrides:
        from rl_safe_workers.plan.sources import recipe_source

        base = recipe_source(arguments.overrides[0], arguments.overrides[1:])
    return make_request(base.overlaid(options))


def _draw(plan: Plan, arguments: argparse.Namespace) -> None:
    from rl_safe_workers.plan.hazards import find
    from rl_safe_workers.plan.picture import write_html, write_svg

    if arguments.svg is not None:
        write_svg(plan, arguments.svg)
    if arguments.html is not None:
        write_html(plan, find(plan), arguments.html)
