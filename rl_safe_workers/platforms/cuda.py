"""NVIDIA GPUs: one device for each process. Nothing of Megatron is changed here."""

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
"""Backends of the training world: objects travel as CPU tensors, everything else on the device."""


def observer(owned: Callable[[], Mapping[str, int]], **options: Any) -> DeviceMemory:
    """Returns what accounts for this process's memory; before `start`, so that the CUDA context is in the account.

    Args:
        owned: Bytes of torch's memory by owner, called at the end of each phase.
        **options: As for `DeviceMemory`.

    Raises:
        ResourceError: As `start`.
    """
    memory = DeviceMemory(_own_device(), owned, **options)
    memory.begin(Phase.START)
    return memory


def start() -> torch.device:
    """Binds this process to its GPU: the only one it sees, as under Ray, or that of its local rank.

    Idempotent. No communicator is bound to the device: a default group that is turns every later one into a split of
    it (see `init_training_world`).

    Returns:
        The device, which is the current one from now on.

    Raises:
        ResourceError: If no GPU is visible, or more than one and the local rank names none of them.
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
    """How many GPUs the machine has, those that this process does not see included; None if the driver does not say."""
    found = len(list(_GPUS_OF_THE_DRIVER.glob("*")))
    return found or None


def make_deterministic() -> None:
    """Has every operation of this process take its deterministic form, for tests that compare bits.

    Needs ``CUBLAS_WORKSPACE_CONFIG`` in the environment (see ``env.DETERMINISTIC``) before the first matrix product.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
