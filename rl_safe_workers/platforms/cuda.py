"""Implements the platform for NVIDIA GPUs: one device for each process. Does not patch Megatron."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rl_safe_workers import env
from rl_safe_workers.errors import ResourceError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.platforms.device_memory import DeviceMemory

logger = logging.getLogger(__name__)

_GPUS_OF_THE_DRIVER = Path("/proc/driver/nvidia/gpus")
BACKEND = "cpu:gloo,cuda:nccl"
"""torch's name of the training world's backend. Objects travel as CPU tensors, all other data on the device."""


def observer(owned: Callable[[], Mapping[str, int]], **options: Any) -> DeviceMemory:
    """Returns the object that accounts for this process's device memory.

    Call it before `start`, so that the CUDA context is counted.

    Args:
        owned: Returns bytes of torch's memory by owner. Called at the end of each phase.
        **options: As for `DeviceMemory`.

    Raises:
        ResourceError: As `start`.
    """
    memory = DeviceMemory(_own_device(), owned, **options)
    memory.begin(Phase.START)
    return memory


def start() -> torch.device:
    """Binds this process to its GPU: the only visible one, as under Ray, or the one of its local rank.

    Idempotent. It binds no communicator to the device: if the default group is bound to a device, torch makes every
    later group a split of it (see `init_training_world`).

    Returns:
        The device, which becomes the current device.

    Raises:
        ResourceError: If no GPU is visible, or if several are visible and the local rank selects none of them.
    """
    device = _own_device()
    torch.cuda.set_device(device)
    logger.info("CUDA platform: %s, %s", device, torch.cuda.get_device_name(device))
    return device


def _own_device() -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ResourceError(
            f"cluster.device=cuda, but torch {torch.__version__} sees no GPU in this process: "
            "check the driver, CUDA_VISIBLE_DEVICES, and that torch is a CUDA build"
        )
    index = 0 if count == 1 else env.local_rank()
    if index is None or index >= count:
        raise ResourceError(
            f"this process sees {count} GPUs and its local rank is {'not set' if index is None else index}: "
            "set LOCAL_RANK, or give it one GPU with CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", index)


def gpus_of_this_node() -> int | None:
    """Returns the number of GPUs of the machine, visible or not; None if NVIDIA's driver does not list any."""
    found = len(list(_GPUS_OF_THE_DRIVER.glob("*")))
    return found or None


def make_deterministic() -> None:
    """Makes every operation of this process use its deterministic form, for tests that compare results bitwise.

    ``CUBLAS_WORKSPACE_CONFIG`` must be in the environment before the first matrix product (see ``env.DETERMINISTIC``).
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
