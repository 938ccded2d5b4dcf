"""A Megatron script under torchrun that has never heard of this package, with a place for a fault in each phase."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tests.diagnosis.misdeeds import here

STEPS = 2


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    here("trainer", rank, "bootstrap")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)
    for phase in ("convert", "load", *["train"] * STEPS, "save"):
        dist.all_reduce(torch.ones(1))
        here("trainer", rank, phase)
        if rank == 0 and phase == "save":
            (folder / "checkpoint").write_text("saved")
        dist.all_reduce(torch.ones(1), group=parallel_state.get_data_parallel_group())
    dist.barrier()
    here("trainer", rank, "teardown")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
