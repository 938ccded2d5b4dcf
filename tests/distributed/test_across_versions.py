"""Checkpoints of one version of megatron-core under another, where `scripts/matrix` has unpacked others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
VERSIONS = sorted(path.name for path in (REPOSITORY / ".matrix").glob("*") if (path / "megatron").is_dir())
INSTALLED = ""


def _run(version: str, action: str, model: Path, root: Path) -> None:
    path = f"{REPOSITORY / '.matrix' / version}:{REPOSITORY}" if version else str(REPOSITORY)
    command = [sys.executable, "-m", "tests.distributed.version_exchange", action, str(model), str(root)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not VERSIONS, reason="no other megatron-core: scripts/matrix downloads them")
@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_loads_what_the_other_saved(version: str, seeded_models, tmp_path: Path) -> None:
    for index, (saves, loads) in enumerate([(INSTALLED, version), (version, INSTALLED)]):
        root = tmp_path / str(index)
        root.mkdir()
        _run(saves, "save", seeded_models["moe"], root)
        _run(loads, "load", seeded_models["moe"], root)
