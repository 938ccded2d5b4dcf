"""`rl-safe explain FOLDER` on what real runs leave that fail in one process, without this package in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_safe_workers.diagnostics.explanation import Explanation
from rl_safe_workers.diagnostics.log_lines import Fault
from rl_safe_workers.diagnostics.remains import explain_folder

RUN = Path(__file__).parent / "failing_run.py"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, for Ray's sockets, and a full file system in it where mounts are allowed."""
    made = Path(tempfile.mkdtemp(prefix="e"))
    (made / "full").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(made / "full")]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    yield made
    if mounted:
        subprocess.run(["umount", str(made / "full")], check=True)
    shutil.rmtree(made, ignore_errors=True)


def left_by(command: list[str], folder: Path) -> Explanation:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "job.log").open("w") as log:
        subprocess.run(command, env=variables, cwd=folder, stdout=log, stderr=log, timeout=180, check=False)
    return explain_folder(folder)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("killed", Fault.SILENT_END),  # Ray does not tell SIGKILL from an exit
        ("crashes", Fault.SIGNAL),
        pytest.param("import", Fault.IMPORT, marks=pytest.mark.every_case),
        ("raises", Fault.RAISED),
        pytest.param("full", Fault.NO_SPACE, marks=pytest.mark.every_case),
    ],
)
def test_the_actor_that_ended_a_ray_job_is_named(how: str, cause: Fault, folder: Path) -> None:
    if how == "full" and not (folder / "full").is_mount():
        pytest.skip("mounts are not allowed here")
    found = left_by([sys.executable, str(RUN), "ray", how, str(folder)], folder)
    assert found.cause == cause, found.verdict
    (culprit,) = found.culprits
    assert f"process {(folder / 'pid').read_text()}" in culprit


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("killed", Fault.SIGNAL),
        ("raises", Fault.RAISED),
        pytest.param("import", Fault.IMPORT, marks=pytest.mark.every_case),
    ],
)
def test_the_rank_that_ended_a_torchrun_job_is_named(how: str, cause: Fault, folder: Path) -> None:
    options = ["--nproc-per-node", "3", "--standalone", "--log-dir", str(folder / "logs"), "--redirects", "3"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(RUN), "torchrun", how, str(folder)]
    found = left_by(command, folder)
    assert found.cause == cause, found.verdict
    assert [name.partition(" (")[0] for name in found.culprits] == ["rank 1"]


def test_the_rank_that_did_not_come_is_named_by_flight_records_of_gloo(folder: Path) -> None:
    options = ["--nproc-per-node", "3", "--standalone"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(RUN), "torchrun", "late", str(folder)]
    found = left_by(command, folder)
    assert list(found.culprits) == ["rank 1"]
    assert found.verdict.startswith("rank 1 did not come: rank 0, 2 wait")
