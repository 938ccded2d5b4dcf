"""Puts the places for a fault into stock ms-swift: a plugin for --external_plugins. Alone in its folder."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from swift.megatron.pipelines.train import sft
from swift.megatron.trainers.base import BaseMegatronTrainer
from swift.megatron.utils import megatron_lm_utils

from tests.diagnosis.misdeeds import here


def before(owner: Any, name: str, phase: str) -> None:
    stock = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        here("trainer", int(os.environ["RANK"]), phase)
        return stock(*args, **kwargs)

    setattr(owner, name, call)


if multiprocessing.parent_process() is None and "RANK" in os.environ:  # no worker of a data loader
    before(megatron_lm_utils, "_initialize_mpu", "bootstrap")
    before(BaseMegatronTrainer, "__init__", "convert")
    before(BaseMegatronTrainer, "train_step", "train")
    before(megatron_lm_utils, "_generate_state_dict", "save")
    before(sft, "plot_images", "teardown")
