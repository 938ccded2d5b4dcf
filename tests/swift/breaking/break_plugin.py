"""Breaks training rank 1 of a job at one place, in one way: a plugin for --external_plugins, the last one.

In the driver of Ray mode it only has the driver tell where it waits, on SIGUSR1.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from swift.megatron.pipelines.train.sft import MegatronSft
from swift.megatron.trainers.base import BaseMegatronTrainer
from swift.megatron.utils import megatron_lm_utils

WHERE, HOW = os.environ["BREAK"].split(":")
STEP = 2
RANK = 1


def strike() -> None:
    Path(os.environ.get("STRUCK", "struck")).write_text(str(time.time()))
    if HOW == "raise":
        raise RuntimeError("broken on purpose")
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "stop":
        time.sleep(1.5)  # so that it has noted where it is
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(float(os.environ.get("BREAK_S", "3600")))


def breaking(original: Any, *, at: int = 1) -> Any:
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            strike()
        return original(*args, **kwargs)

    return call


if os.environ.get("RANK") == str(RANK):
    if WHERE == "before":
        MegatronSft.prepare_trainer = breaking(MegatronSft.prepare_trainer)
    elif WHERE == "setup":
        from swift.ray.megatron import megatron_worker

        # Not a method: Ray has taken those of the driver.
        megatron_worker._make_lifecycle_trainer = breaking(megatron_worker._make_lifecycle_trainer)
    elif WHERE == "export_weights":
        from mcore_bridge.bridge.gpt_bridge import GPTBridge

        GPTBridge.export_weights = breaking(GPTBridge.export_weights, at=STEP)
    elif WHERE == "generation":
        from tests.swift.engine_double import ColocatedEngine

        ColocatedEngine.infer = breaking(ColocatedEngine.infer, at=STEP)
    elif WHERE == "step":
        BaseMegatronTrainer.train_step = breaking(BaseMegatronTrainer.train_step, at=STEP)
    else:
        # What a save and an export to shards both call before they write.
        megatron_lm_utils._generate_state_dict = breaking(megatron_lm_utils._generate_state_dict)

if "RANK" not in os.environ and "swift.ray.megatron" in sys.modules:
    Path("driver").write_text(str(os.getpid()))
    faulthandler.register(signal.SIGUSR1, file=Path("stack").open("w"), all_threads=False)  # noqa: SIM115
