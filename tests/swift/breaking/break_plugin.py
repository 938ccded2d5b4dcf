"""Breaks training rank 1 of a job at one place, in one way: a plugin for --external_plugins, the last one."""

from __future__ import annotations

import os
import signal
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
    Path("struck").write_text(str(time.time()))
    if HOW == "raise":
        raise RuntimeError("broken on purpose")
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
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
    elif WHERE == "step":
        BaseMegatronTrainer.train_step = breaking(BaseMegatronTrainer.train_step, at=STEP)
    else:
        # What a save and an export to shards both call before they write.
        megatron_lm_utils._generate_state_dict = breaking(megatron_lm_utils._generate_state_dict)
