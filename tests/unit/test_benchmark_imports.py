"""Every benchmark names only what the package and the other benchmarks have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, pkgutil, sys
import benchmarks

for module in pkgutil.iter_modules(benchmarks.__path__, "benchmarks."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        # A host has an environment of its own.
        if error.name.partition(".")[0] in ("benchmarks", "rl_safe_workers", "tests"):
            raise
"""


def test_every_benchmark_can_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_ALL], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
