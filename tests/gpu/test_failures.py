"""A rank that fails on GPUs: the others are gone soon, the error names it, and neither processes nor memory are left.

    python -m pytest tests/gpu/test_failures.py

takes some four minutes on two GPUs, on which trainers and vLLM take turns, and ends with the table of seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch

from benchmarks import gpu
from benchmarks.table import Row, at_most
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role
from tests.chaos.cases import SLACK_S, Case
from tests.chaos.plan import VARIABLE, Kind, to_json
from tests.integration.runs import Outcome, running

pytestmark = pytest.mark.timeout(400)
CASES = (
    Case(kind=Kind.KILL, phase=Phase.BOOTSTRAP, role=Role.TRAINER, rank=1),
    Case(kind=Kind.KILL, phase=Phase.TRAIN, role=Role.TRAINER, rank=1),
    Case(kind=Kind.KILL, phase=Phase.SYNC, role=Role.ROLLOUT, rank=0),
)
STALLS = Case(kind=Kind.STALL, phase=Phase.TRAIN, role=Role.TRAINER, rank=1)
AGAIN = Case(kind=Kind.KILL, phase=Phase.TRAIN, role=Role.TRAINER, rank=0, restarts=True)
STEPS = 2
TIMEOUT_S = 40.0
"""Timeout of the phase. A first step compiles kernels."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """How a run with a fault has ended."""

    outcome: Outcome
    seconds: float
    """From the fault to the end."""
    gpu_mib: int
    """Memory of the GPUs that was not in use before."""


def run_case(case: Case, model: Path, folder: Path) -> Found:
    """Runs two steps with a fault in the last of them, or before both."""
    folder.mkdir(parents=True)
    # Two steps from the beginning, with a sync before each and a save after each.
    occurrence = STEPS if case.phase in (Phase.TRAIN, Phase.SYNC) else 1
    fault = replace(case.fault(folder), occurrence=occurrence)
    command = [
        *(sys.executable, "-m", "tests.chaos.command", "run", str(gpu.RECIPE), f"model.path={model}"),
        *gpu.PLACEMENTS["2_GPUs_colocated"],
        *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", f"rl_safe.restarts={int(case.restarts)}"),
        f"rl_safe.timeouts.{case.phase}={TIMEOUT_S}",
    ]
    before_mib = gpu.gpu_memory_mib()
    with mock.patch.dict(os.environ, {VARIABLE: to_json(fault)}), running(command, folder) as run:
        run.process.wait(240)
        ended_at = time.time()
        outcome = run.finish()
    seconds = ended_at - float(fault.struck.read_text())
    return Found(outcome=outcome, seconds=seconds, gpu_mib=gpu.gpu_memory_mib() - before_mib)


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; there are {torch.cuda.device_count()}")
    with TemporaryDirectory(prefix="rl_safe_gpu_") as folder:
        gpu.make_model(Path(folder) / "model", SeededModelConfig())
        yield Path(folder) / "model"


def assert_ended_soon(found: Found, case: Case, rows: list[Row]) -> None:
    soon = at_most(TIMEOUT_S + SLACK_S)
    rows.append(gpu.gpu_row(f"{case}: from the fault to the end", "s", found.seconds, soon))
    assert found.outcome.code == 1, found.outcome.err
    assert case.is_named_by(found.outcome.last_error), found.outcome.err
    assert soon.is_met_by(found.seconds)
    assert found.outcome.left == []
    assert found.gpu_mib <= 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_others_are_gone_soon_and_leave_nothing(case: Case, model: Path, rows: list[Row], tmp_path: Path) -> None:
    assert_ended_soon(run_case(case, model, tmp_path / "run"), case, rows)


def test_a_rank_that_never_comes_is_found_in_nccls_flight_recorder(
    model: Path, rows: list[Row], tmp_path: Path
) -> None:
    found = run_case(STALLS, model, tmp_path / "run")
    assert_ended_soon(found, STALLS, rows)
    hang = found.outcome.run_dir / "hang"
    assert {"flight_nccl_0", "flight_nccl_1"} <= {file.name for file in hang.iterdir()}, found.outcome.err
    verdict = json.loads((hang / "verdict.json").read_text())["verdict"]
    assert "training rank 1 is at tests/chaos/striker.py" in verdict
    assert "GROUP: 0 arrived, 1 did not" in verdict


def test_a_run_that_may_start_again_completes(model: Path, rows: list[Row], tmp_path: Path) -> None:
    found = run_case(AGAIN, model, tmp_path / "run")
    assert found.outcome.code == 0, found.outcome.err
    assert [record["step"] for record in found.outcome.records] == [1, 2]
    assert found.outcome.left == []
    assert found.gpu_mib <= 0
    rows.append(gpu.gpu_row(f"{AGAIN}: from the fault to the end of the run", "s", found.seconds, at_most(120)))
