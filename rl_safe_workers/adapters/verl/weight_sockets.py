"""Moves the sockets over which verl sends weights to vLLM into a folder of the job's own.

verl names such a socket in ``/tmp`` by Ray's job id, the replica and the rank (vllm_rollout.py:141, utils.py:431). But
every Ray cluster counts its jobs from 1. So two jobs on one machine, each with a Ray cluster of its own, have the same
sockets. The trainers of one job then send weights to the engines of the other, or wait for engines that never read. And
any user of the machine could take such a name first.

The new folder has the job's random id in its name, and only the job's user can enter it. `MachineProcesses` removes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_safe_workers import env
from rl_safe_workers.reaping.processes import private_socket_folder

MODULE = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
"""verl's module with both ends of these sockets."""
_SCHEME = "ipc://"


def move(module: ModuleType) -> None:
    """Moves the sockets of both ends. Does nothing in jobs that our entry has not started.

    Args:
        module: The module `MODULE`.
    """
    for end in (module.BucketedWeightSender, module.BucketedWeightReceiver):
        end.__init__ = _moved(end.__init__)


def _moved(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def init(self: Any, zmq_handle: str, *args: Any, **kwargs: Any) -> None:
        run_id = env.run_id()
        if run_id is not None and zmq_handle.startswith(_SCHEME):
            zmq_handle = f"{_SCHEME}{private_socket_folder(run_id) / Path(zmq_handle.removeprefix(_SCHEME)).name}"
        stock(self, zmq_handle, *args, **kwargs)

    return init
