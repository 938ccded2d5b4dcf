"""Reads a checkout of NeMo RL or of Megatron-Bridge and says what of the contract it lacks. Imports nothing of it."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rl_safe_workers.adapters.nemo_rl.contract import NAMES, SINCE, UNTIL, HostName, HostText
from rl_safe_workers.errors import ConfigError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def find(root: Path, file: str, name: str) -> ast.Module | Definition | None:
    """Returns a definition by its dotted name, the module for an empty name, None if it or its file is not there."""
    path = root / file
    found: ast.Module | Definition | None = _parse(path) if path.is_file() else None
    for part in filter(None, name.split(".")):
        inside = [] if found is None else [n for n in found.body if isinstance(n, Definition) and n.name == part]
        found = inside[-1] if inside else None
    return found


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def parameters(node: ast.AST | None) -> list[str]:
    """The names of a function's parameters; none for anything else."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def lacks_name(root: Path, expected: HostName) -> str | None:
    """Says what a checkout lacks of a name; None if it has it, or need not have it."""
    node = find(root, expected.file, expected.name)
    if node is None:
        return None if expected.optional else f"{expected.name} ({expected.file})"
    given = iter(parameters(node))
    # In this order, whatever stands between them.
    if all(name in given for name in expected.parameters):
        return None
    return f"{expected.name}({', '.join(expected.parameters)}) ({expected.file})"


def lacks_text(root: Path, expected: HostText) -> str | None:
    """Says what a checkout lacks of an expression; None if it has it."""
    node = find(root, expected.file, expected.within)
    if node is not None and expected.text in ast.unparse(node):
        return None
    return f"{expected.text!r} in {expected.within or 'the module'} ({expected.file})"


def check_host(root: Path, names: Iterable[HostName] = NAMES, texts: Iterable[HostText] = ()) -> None:
    """Refuses a NeMo RL that this adapter does not fit.

    Args:
        root: Its checkout, or the folder that holds its package.
        names: What it must have.
        texts: What it must do.

    Raises:
        ConfigError: Naming what it lacks.
    """
    lacking = [lack for expected in names if (lack := lacks_name(root, expected)) is not None]
    lacking = lacking or [lack for expected in texts if (lack := lacks_text(root, expected)) is not None]
    if lacking:
        more = f" and {len(lacking) - 1} other names" if len(lacking) > 1 else ""
        raise ConfigError(
            f"the NeMo RL in {root} lacks {lacking[0]}{more}, which rl_safe_workers needs: use one from commit "
            f"{SINCE} to {UNTIL}, such as v0.6.0 or v0.7.0 (docs/nemo_rl.md), or run its own examples/run_grpo.py"
        )
