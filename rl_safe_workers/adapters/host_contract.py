"""Lists the names that an adapter needs in its host's source, and finds the missing ones. Does not import the host."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rl_safe_workers.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostName:
    """One function, method or class of the host.

    Example: ``HostName(file="nemo_rl/a.py", name="Worker.shutdown", parameters=("self",), why="overridden")``
    """

    file: str
    """Path in the host's repository."""
    name: str
    """Dotted from the module, e.g. ``"Worker.shutdown"``."""
    parameters: tuple[str, ...]
    """Required parameters, in this order. Others may stand between or after them. Empty for a class."""
    why: str
    """How it is used."""
    optional: bool = False
    """True if older commits lack the name. Those commits do not call it, either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostText:
    """An expression that must be in the source of a host's function.

    Example: ``HostText(file="nemo_rl/a.py", within="setup", text="setup_distributed()", why="patched")``
    """

    file: str
    within: str
    """Dotted name of the function or class; empty for the module."""
    text: str
    """Code as ``ast.unparse`` writes it."""
    why: str


def package_root(name: str, *, advice: str = "") -> Path:
    """Returns the folder that holds an installed package, without importing it.

    Args:
        name: Name of the package.
        advice: How to install it, for the error.

    Raises:
        ConfigError: If it is not installed.
    """
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{name} is not installed" + (f": {advice}" if advice else ""))
    return Path(next(iter(spec.submodule_search_locations))).parent


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def find(root: Path, file: str, name: str) -> ast.Module | Definition | None:
    """Returns a definition by its dotted name; the module for an empty name; None if it or its file does not exist."""
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
    """Returns the names of a function's parameters; an empty list for anything else."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def lacks_name(root: Path, expected: HostName) -> str | None:
    """Describes the name or the parameters that a checkout lacks; None if it has them, or if the name is optional."""
    node = find(root, expected.file, expected.name)
    if node is None:
        return None if expected.optional else f"{expected.name} ({expected.file})"
    given = iter(parameters(node))
    # ``in`` advances the iterator, so this checks the order and allows other parameters in between.
    if all(name in given for name in expected.parameters):
        return None
    return f"{expected.name}({', '.join(expected.parameters)}) ({expected.file})"


def lacks_text(root: Path, expected: HostText) -> str | None:
    """Describes an expression that a checkout lacks; None if the checkout has it."""
    node = find(root, expected.file, expected.within)
    if node is not None and expected.text in ast.unparse(node):
        return None
    return f"{expected.text!r} in {expected.within or 'the module'} ({expected.file})"


def lacking(root: Path, names: Iterable[HostName], texts: Iterable[HostText] = ()) -> str:
    """Describes what a copy of the source lacks: the first name or text, and how many others; empty if nothing.

    Args:
        root: The copy, a checkout or the folder that holds the host's package.
        names: The names that it must have.
        texts: The expressions that it must have. They are checked only if no name is missing.
    """
    found = [lack for expected in names if (lack := lacks_name(root, expected)) is not None]
    found = found or [lack for expected in texts if (lack := lacks_text(root, expected)) is not None]
    if not found:
        return ""
    return found[0] + (f" and {len(found) - 1} others" if len(found) > 1 else "")
