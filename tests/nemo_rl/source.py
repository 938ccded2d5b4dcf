"""The checkouts of NeMo RL that these tests read, named by NEMO_RL_SRC; all but the contract reads the first alone."""

from __future__ import annotations
import __future__

import ast
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.adapters.host_contract import HostName, find
from rl_safe_workers.adapters.nemo_rl.contract import NAMES

SOURCES = [path for path in os.environ.get("NEMO_RL_SRC", "").split(os.pathsep) if path]
SOURCE = SOURCES[0] if SOURCES else ""
needs_source = pytest.mark.skipif(
    not SOURCES, reason="NEMO_RL_SRC names no checkout of NeMo RL; PyPI's nemo-rl is a placeholder"
)
each_source = pytest.mark.parametrize("root", SOURCES or [""], ids=lambda path: Path(path).name)


def write_source(root: Path, *, without: str = "", names: Sequence[HostName] = NAMES) -> Path:
    """Writes a checkout that has a contract's names, and nothing else.

    Args:
        root: Where.
        without: A name that is left out, with what is inside of it.
        names: The contract's.
    """
    files: dict[str, list[HostName]] = {}
    for expected in names:
        if expected.name != without and not expected.name.startswith(f"{without}."):
            files.setdefault(expected.file, []).append(expected)
    for file, names in files.items():
        text, owners = "", []
        for expected in sorted(names, key=lambda e: e.name):
            owner, _, name = expected.name.rpartition(".")
            if owner and owner not in owners:
                owners.append(owner)
                text += f"class {owner}:\n    pass\n"
            if expected.parameters or owner or "Impl" not in name:
                text += f"{'    ' * bool(owner)}def {name}({', '.join(expected.parameters)}): ...\n"
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


def host_code(file: str, name: str, *, methods: Sequence[str] = (), names: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a definition of NeMo RL's own, out of a module that does not import here; returns its globals.

    Args:
        file: Path in the checkout.
        name: A function, or a class, which then has no bases.
        methods: Of the class, those that it is to have.
        names: What it looks up in its module.
    """
    definition = find(Path(SOURCE), file, name)
    assert isinstance(definition, ast.FunctionDef | ast.ClassDef)
    if isinstance(definition, ast.ClassDef):
        body = [each for each in definition.body if isinstance(each, ast.FunctionDef) and each.name in methods]
        assert {each.name for each in body} == set(methods)
        definition = ast.ClassDef(name, bases=[], keywords=[], body=body, decorator_list=[])
    module = ast.fix_missing_locations(ast.Module([definition], []))
    found = dict(names)
    # So that annotations stay unread.
    exec(compile(module, file, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True), found)
    return found


RELEASE = "_requires_nvrx_cuda_cache_release"
"""Method of NeMo RL's worker since e4b8f3e5e (2026-07-30). A finished save then drops the writer's cache."""


def releases_cache() -> bool:
    """Returns True if this NeMo RL drops the cache because of which later saves repeated the first (3312)."""
    file = "nemo_rl/models/policy/workers/megatron_policy_worker.py"
    return find(Path(SOURCE), file, f"MegatronPolicyWorkerImpl.{RELEASE}") is not None
