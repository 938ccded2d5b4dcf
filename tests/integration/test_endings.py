"""Why a trainer has ended under Ray, by the verdict of its job: each end is a real one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from rl_safe_workers.diagnostics.log_lines import ADVICE, Fault
from tests.integration.ended_actors import GREED_BYTES, LIMIT_S
from tests.integration.runs import REPOSITORY, json_once

pytestmark = pytest.mark.timeout(LIMIT_S + 60)
JOB = Path(__file__).with_name("ended_actors.py")
HEAD = r"training rank 1 on \S+ died in phase train(, last seen at \S+:\d+ \(\w+\))?"
WAYS = {
    "exit": (Fault.EXIT, rf"{HEAD}: exit code 3: Ray says: .*exit code 3\."),
    "asked": (Fault.ASKED, rf"{HEAD}: asked to end SIGTERM: Ray says: .*"),
    "crash": (Fault.SIGNAL, rf"{HEAD}: signal SIGSEGV: \*\*\* SIGSEGV received at .*"),
    "abort": (Fault.ABORTED, rf"{HEAD}: abort SIGABRT: \*\*\* SIGABRT received at .*"),
    "import": (Fault.IMPORT, r"training rank 1 on \S+ failed in phase train at .*: ModuleNotFoundError: .*no_such_.*"),
    "killed": (None, HEAD),
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a short path, for Ray's sockets."""
    made = Path(tempfile.mkdtemp(prefix="e"))
    yield made
    shutil.rmtree(made)


def verdicts(folder: Path, ways: list[str], variables: Mapping[str, str]) -> dict[str, tuple[str | None, list[str]]]:
    """Returns the kind and the lines of each verdict."""
    command = [sys.executable, str(JOB), str(folder), *ways]
    around = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    done = subprocess.run(command, env=around, capture_output=True, text=True, timeout=LIMIT_S + 30, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"way"')]
    return {one["way"]: (one["fault"], one["said"].splitlines()) for one in told}


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[str | None, list[str]]]:
    ways: Mapping[str, tuple[str | None, list[str]]] = json_once(
        tmp_path_factory, "endings", lambda _: verdicts(folder, list(WAYS), {})
    )
    return ways


@pytest.mark.parametrize("way", WAYS)
def test_the_verdict_tells_why_an_actor_has_ended(way: str, found: Mapping[str, tuple[str | None, list[str]]]) -> None:
    fault, (first, advice, _) = found[way]
    wanted, said = WAYS[way]
    assert (fault, bool(re.fullmatch(said, first))) == (wanted, True), first
    if wanted is None:
        assert advice.startswith("why is not known, because ")
        assert "its log ends without a word" in advice
    else:
        assert advice == ADVICE[wanted]


def test_an_actor_that_rays_memory_monitor_has_killed_is_told_apart(folder: Path) -> None:
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + GREED_BYTES / 2) / memory.total
    if threshold > 0.9:
        pytest.skip("this machine has too little memory left")
    variables = {"RAY_memory_usage_threshold": f"{threshold:.3f}", "RAY_memory_monitor_refresh_ms": "100"}
    fault, (first, advice, _) = verdicts(folder, ["greed"], variables)["greed"]
    assert fault == Fault.RAY_MEMORY, first
    assert "Ray says: " in first
    assert "running low on memory" in first
    assert advice == ADVICE[Fault.RAY_MEMORY]
