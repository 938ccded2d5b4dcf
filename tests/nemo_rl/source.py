"""The checkouts of NeMo RL that these tests read, named by NEMO_RL_SRC; all but the contract reads the first alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rl_safe_workers.adapters.host_source import HostName
from rl_safe_workers.adapters.nemo_rl.contract import NAMES

SOURCES = [path for path in os.environ.get("NEMO_RL_SRC", "").split(os.pathsep) if path]
SOURCE = SOURCES[0] if SOURCES else ""
needs_source = pytest.mark.skipif(
    not SOURCES, reason="NEMO_RL_SRC names no checkout of NeMo RL; PyPI's nemo-rl is a placeholder"
)
each_source = pytest.mark.parametrize("root", SOURCES or [""], ids=lambda path: Path(path).name)


def write_source(root: Path, *, without: str = "") -> Path:
    """Writes a checkout that has the contract's names, and nothing else.

    Args:
        root: Where.
        without: A name that is left out, with what is inside of it.
    """
    files: dict[str, list[HostName]] = {}
    for expected in NAMES:
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
