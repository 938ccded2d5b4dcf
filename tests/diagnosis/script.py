"""A Megatron script under torchrun with this package's functions, as the README has it, and a loop around them."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers import bootstrap, channel_limits, guard, teardown
from tests.diagnosis.host import TIMEOUT_S
from tests.diagnosis.misdeeds import here

STEPS = 2


def main(folder: Path) -> None:
    limits = channel_limits(expert_model_parallel_size=2)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", pg_options=limits.world, timeout=timeout)
    parallel_state.initialize_model_parallel(
        **limits.megatron, create_gloo_process_groups=False, distributed_timeout_minutes=TIMEOUT_S / 60
    )
    rank = dist.get_rank()
    try:
        bootstrap(timeout=timeout)
        for phase in ("convert", "load", *["train"] * STEPS, "save"):
            with guard(phase):
                dist.all_reduce(torch.ones(1))
                here("trainer", rank, phase)
                if rank == 0 and phase == "save":
                    (folder / "checkpoint").write_text("saved")
                dist.all_reduce(torch.ones(1), group=parallel_state.get_data_parallel_group())
    finally:
        teardown(timeout=timeout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
