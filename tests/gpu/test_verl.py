"""verl's own ``main_ppo`` with our engines, on two GPUs on which trainers and vLLM take turns.

    python -m pytest tests/gpu/test_verl.py --log-cli-level=INFO

takes some nine minutes, most of them imports, in an environment that has verl 0.9 and its vLLM; logs verl's metrics.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from benchmarks.verl_jobs import metrics_of
from tests.integration.runs import REPOSITORY, Running, running

logger = logging.getLogger(__name__)

HAS_VERL = all(importlib.util.find_spec(name) is not None for name in ("verl", "vllm"))
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(not HAS_VERL, reason="needs verl and vLLM"),
]
RECIPE = REPOSITORY / "recipes" / "verl" / "quickstart.sh"
STEPS = 5
SETTLE_S = 20.0
"""How long Ray may take to end its agents, once the driver has ended."""
STOP_S = 30.0


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="verl_") as name:
        yield Path(name)


def start(folder: Path, name: str, *overrides: str) -> list[str]:
    command = ["bash", str(RECIPE), f"trainer.default_local_dir={folder / 'checkpoints'}", *overrides]
    return ["env", f"PYTHON={sys.executable}", "DEVICE=cuda", "HYDRA_FULL_ERROR=1", *command]


def show(name: str, seconds: float, metrics: dict[int, dict[str, float]]) -> None:
    logger.info("%s: %.0f s", name, seconds)
    wanted = ("rl_safe", "timing_s/step", "timing_s/save", "timing_s/update_weights", "rollout_probs_diff_max", "grad")
    for step, values in metrics.items():
        logger.info("%d %s", step, {key: value for key, value in values.items() if any(part in key for part in wanted)})


def left_after(run: Running) -> list[str]:
    deadline = time.monotonic() + SETTLE_S
    while (found := run.processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [" ".join(process.cmdline())[:100] for process in found]


def run_to_the_end(folder: Path, name: str, *overrides: str) -> dict[int, dict[str, float]]:
    started_s = time.monotonic()
    with running(start(folder, name, *overrides), folder / name) as run:
        outcome = run.finish(timeout_s=380)
        seconds = time.monotonic() - started_s
        assert outcome.code == 0, outcome.err[-3000:]
        assert left_after(run) == []
    metrics = metrics_of(outcome.out)
    show(name, seconds, metrics)
    for values in metrics.values():
        assert values["rl_safe/active"] == 1
        assert values["rl_safe/late_allocations"] == 0
        assert values["training/rollout_probs_diff_max"] < 0.01
    return metrics


def test_it_trains_and_saves(folder: Path) -> None:
    assert list(run_to_the_end(folder, "trains")) == list(range(1, STEPS + 1))
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)


def test_it_goes_on_from_the_save(folder: Path) -> None:
    assert list(run_to_the_end(folder, "goes_on", f"trainer.total_training_steps={STEPS + 2}")) == [6, 7]


def test_verl_s_own_entry_trains_with_our_engines_alone(folder: Path) -> None:
    command = start(folder, "own_entry", "trainer.total_training_steps=2", "trainer.save_freq=2")
    command.insert(1, "ENTRY=verl")
    checkpoints = folder / "own_entry_checkpoints"
    with running([*command, f"trainer.default_local_dir={checkpoints}"], folder / "own_entry") as run:
        outcome = run.finish(timeout_s=380)
    logger.info("own entry: exit %d, %d processes and files left", outcome.code, len(outcome.left))
    show("own_entry", 0.0, metrics_of(outcome.out))
    assert outcome.code == 0, outcome.err[-3000:]
    assert list(metrics_of(outcome.out)) == [1, 2]
    active = re.findall(r"rl_safe active: SafeMegatronEngine on training rank (\d) of 2", outcome.out + outcome.err)
    assert set(active) == {"0", "1"}
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_a_run_that_is_stopped_ends(folder: Path) -> None:
    with running(start(folder, "stopped", "trainer.total_training_steps=1000"), folder / "stopped") as run:
        run.wait_until(lambda: len(metrics_of(run.out)) > 0, timeout_s=350)
        run.process.send_signal(signal.SIGTERM)
        stopped_s = time.monotonic()
        outcome = run.finish(timeout_s=60)
        seconds = time.monotonic() - stopped_s
        left = left_after(run)
        logger.info(
            "stopped: exit %d %.1f s after SIGTERM, left: %s; %s", outcome.code, seconds, left, outcome.err[-300:]
        )
    assert outcome.code == 128 + signal.SIGTERM
    assert seconds < STOP_S
    assert left == []
