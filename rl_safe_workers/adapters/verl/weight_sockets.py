"""Moves the sockets over which verl sends weights to vLLM into the job's own folder.

verl names such a socket in ``/tmp`` by Ray's job id, the replica and the rank (vllm_rollout.py:141, utils.py:431). But
every Ray cluster counts its jobs from 1. Two jobs on one machine, each with a Ray cluster of its own, then have the
same sockets: one's trainers send weights to the other's engines, or wait for engines that never read. Any user of the
machine could also take the name first.

The job's folder has a random name, and only this user may enter it. It is removed when the job ends.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_safe_workers import env

SENDER = "verl.workers.rollout.vllm_rollout.vllm_rollout"
"""verl's module with the trainer's end of a socket."""
RECEIVER = "verl.workers.rollout.vllm_rollout.utils"
"""verl's module with the vLLM worker's end of a socket."""
_SCHEME = "ipc://"
_LONGEST_PATH = 107
"""Most characters in the path of a Unix socket, by Linux."""


def in_job_folder(address: str) -> str:
    """Returns the address in the job's folder of a socket that verl has named. Both ends call it.

    verl's address stays if our entry did not start the job, if the folder is not there, or if the path is too long.

    Args:
        address: For example ``"ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"``.
    """
    folder = env.hang_dir()
    if folder is None or not address.startswith(_SCHEME):
        return address
    path = str(folder / Path(address.removeprefix(_SCHEME)).name)
    return address if len(path) > _LONGEST_PATH else f"{_SCHEME}{path}"


def move_senders(module: ModuleType) -> None:
    """Moves the trainers' ends. ``module`` is `SENDER`."""
    stock = module.ServerAdapter.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.zmq_handle = in_job_folder(self.zmq_handle)

    module.ServerAdapter.__init__ = init


def move_receivers(module: ModuleType) -> None:
    """Moves the vLLM workers' ends. ``module`` is `RECEIVER`."""
    stock = module.vLLMColocateWorkerExtension._get_zmq_handle

    @functools.wraps(stock)
    def get_zmq_handle(self: Any) -> str:
        return in_job_folder(stock(self))

    module.vLLMColocateWorkerExtension._get_zmq_handle = get_zmq_handle
