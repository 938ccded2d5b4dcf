"""A rollout engine is killed on GPUs, in a weight sync and in a rollout: another takes its place, and the run goes on.

    python -m pytest tests/gpu/test_lost_engine.py

takes some two minutes on two GPUs, one for the trainer and one for the engine.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import gpu
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers.driver.outputs import metrics as names
from rl_safe_workers.driver.outputs.ledger import LATE, LATE_BYTES
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role
from tests.chaos.plan import VARIABLE, Fault, Kind, to_json
from tests.integration.runs import running

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.timeout(500)
STEPS, STRUCK_STEP = 5, 3
TIMEOUT_S = 60.0
SEVERAL_BUCKETS = ("rollout.update_weights_bucket_megabytes=1", "model.create.num_experts=32")
"""The fault in a sync strikes before the second bucket."""


@pytest.mark.parametrize("phase", [Phase.SYNC, Phase.ROLLOUT], ids=str)
def test_the_run_goes_on_with_another_engine(phase: Phase, rows: list[Row], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; there are {torch.cuda.device_count()}")
    fault = Fault(kind=Kind.KILL, role=Role.ROLLOUT, rank=0, phase=phase, occurrence=STRUCK_STEP, folder=str(tmp_path))
    command = [
        *(sys.executable, "-m", "tests.chaos.command", "run", str(gpu.RECIPE), "rollout.replace_lost_engines=1"),
        *SEVERAL_BUCKETS,
        *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1", f"rl_safe.bootstrap.watch_steps={STEPS}"),
        *(f"rl_safe.timeouts.{each}={TIMEOUT_S}" for each in (Phase.SYNC, Phase.ROLLOUT)),
    ]
    with mock.patch.dict(os.environ, {VARIABLE: to_json(fault)}), running(command, tmp_path / "run") as run:
        run.process.wait(400)
        ended_at = time.time()
        outcome = run.finish()
    assert outcome.code == 0, outcome.err
    seconds = ended_at - float(fault.struck.read_text())
    records = outcome.records
    for record in records:
        told = {key: value for key, value in record.items() if key.partition("/")[0] in ("engines", "sync", "timing_s")}
        logger.info("%s, step %d: %s", phase, record["step"], told)

    def most(key: str) -> float:
        return max(record.get(key, 0.0) for record in records)

    name = f"engine killed in {phase}"
    rows += [
        gpu.gpu_row(f"{name}: steps", "", len(records), at_least(STEPS)),
        gpu.gpu_row(f"{name}: back to full strength after", "s", most("timing_s/engine_back"), at_most(120)),
        gpu.gpu_row(f"{name}: weights proved in the new engine", "", most(names.PROVED), at_least(1)),
        gpu.gpu_row(f"{name}: weights not proved", "", most(names.NOT_PROVED), at_most(0)),
        gpu.gpu_row(f"{name}: late collectives", "", most(LATE), at_most(0)),
        gpu.gpu_row(f"{name}: late bytes", "MiB", most(LATE_BYTES) / 2**20, at_most(0)),
        gpu.gpu_row(f"{name}: largest gap", "nat", most(names.LOGPROB_GAP_MAX), at_most(0.25)),
        gpu.gpu_row(f"{name}: from the fault to the end of the run", "s", seconds, at_most(200)),
    ]
    assert sum(record["engines/lost"] for record in records) == 1
    assert outcome.left == []
