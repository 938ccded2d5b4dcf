"""The ``rl-safe`` command.

Imports neither torch nor ray until a run starts, so that bad input is refused at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence

from rl_safe_workers import __version__
from rl_safe_workers.cli import terminal
from rl_safe_workers.errors import RlSafeError

COMMANDS: Mapping[str, str] = {
    "run": "train with a recipe",
    "bench": "measure and compare with goals; in a checkout only",
    "convert": "convert HF weights to Megatron's shards, or back",
    "audit": "check that a checkpoint is whole",
    "plan": "show groups, memory and hazards of a run, without a GPU",
    "explain": "say why a run stands still or has died",
    "doctor": "check this machine and cluster before a run",
    "slices": "list or copy the bytes of a checkpoint that one host needs",
}
"""Help line of each command, by its name. Its module is ``rl_safe_workers.cli.<name>_command``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The arguments after the program's name; None: those of this process.

    Returns:
        The exit code: 0; 1 if the run failed; 2 if the input is wrong; 3 if a benchmark missed a goal; 128 + the
        signal's number if interrupted, or if nobody reads the output any more.

    Raises:
        SystemExit: After ``--help`` and ``--version``. With code 2 if an argument is unknown or malformed.
    """
    try:
        arguments = _parse(argv)
        terminal.set_up(verbose=arguments.verbose)
        code: int = arguments.execute(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_no_reader():
            raise
        return 128 + signal.SIGPIPE
    except RlSafeError as error:
        terminal.report(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("rl-safe: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return code


def _has_no_reader() -> bool:
    """Returns True if the reader of stdout has ended, e.g. ``head``. Then it drops the rest of the output."""
    (poll := select.poll()).register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    # Otherwise Python reports an error when it closes stdout at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else argv
    parser = terminal.Parser(prog="rl-safe", description="Megatron trainers that are safe beside vLLM.")
    parser.add_argument("--version", action="version", version=f"rl-safe {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    # No option before the command takes a value. Only the named command is imported.
    named = next((argument for argument in argv if not argument.startswith("-")), None)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        if name == named:
            importlib.import_module(f"rl_safe_workers.cli.{name}_command").add_arguments(command)
    # argparse stops taking positionals after an option (`run RECIPE -v key=value`). It returns them in ``rest``.
    arguments, rest = parser.parse_known_args(argv)
    takes_rest = hasattr(arguments, "overrides")
    if unknown := [text for text in rest if text.startswith("-") or not takes_rest]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_rest:
        arguments.overrides += rest
    return arguments
