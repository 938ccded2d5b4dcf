"""Where NCCL can give a communicator's memory back and keep its connections, that is used instead of a release.

``backend.suspend()`` and ``resume()`` of torch since 2.12 (pytorch 176300) call ``ncclCommSuspend``, of NCCL since
2.29.7, which needs memory that NCCL has mapped itself (cuMem). Both are collective over the communicator.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Backend

from rl_safe_workers import env
from rl_safe_workers.comms.live_groups import LiveGroup, live_groups
from rl_safe_workers.control.bounded import within
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.supervision import Supervision
from rl_safe_workers.lifecycle import Phase

logger = logging.getLogger(__name__)

NEEDED_NCCL = (2, 29, 7)
_DRAIN_SHARE = 0.8
"""Share of the timeout, to drain the GPU's queue. A rank that needs longer tells the others before they give up."""


def can_suspend(device: torch.device) -> bool:
    """Returns True if communicators of a device can be suspended by this torch and NCCL, as this process is set up."""
    if device.type != "cuda" or not hasattr(Backend, "suspend") or env.nccl_cumem_is_off():
        return False
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return tuple(version) >= NEEDED_NCCL


class Suspension:
    """Suspends and resumes the communicators of one training rank, always the same ones in the same order."""

    def __init__(self, control: ControlPlane, *, device: torch.device) -> None:
        """Suspends nothing yet.

        Args:
            control: This rank's place in the training world.
            device: The communicators' device.
        """
        self._control, self._device = control, device
        self._planned: list[LiveGroup] = []
        self._suspended: set[str] = set()

    def suspend(self, connected: Callable[[LiveGroup], bool], *, timeout: timedelta) -> float:
        """Suspends groups. Collective over: the training world. Idempotent.

        Args:
            connected: Whether a group has a communicator: NCCL knows no other.
            timeout: Longest time for all of them.

        Returns:
            Seconds.

        Raises:
            PhaseTimeoutError: On every rank, if one does not come to a group in time; names it.
            CommunicatorError: On every rank, if one fails, or its GPU does not finish what is queued; names it.
        """
        if self._planned:
            return 0.0
        self._planned = [group for group in live_groups() if connected(group)]
        return self._do("suspend", Phase.OFFLOAD, timeout)

    def resume(self, *, timeout: timedelta) -> float:
        """Resumes what was suspended, be it on some ranks only; returns seconds. As `suspend`."""
        seconds = self._do("resume", Phase.ONLOAD, timeout)
        self._planned = []
        return seconds

    def _do(self, method: str, phase: Phase, timeout: timedelta) -> float:
        started_s = time.monotonic()
        work = Supervision(self._control, method, phase=phase, timeout=timeout)
        if method == "suspend" and self._device.type == "cuda":
            work.alone("the wait for its GPU", partial(self._drain, timeout * _DRAIN_SHARE))
        # All members go through all groups, also those of which only some were suspended when one failed.
        for group in self._planned:
            work.part(f"{group} {method}", group.ranks, partial(self._change, group, method))
        work.finish()
        logger.info("%s of %d communicators in %.3f s", method, len(self._planned), time.monotonic() - started_s)
        return time.monotonic() - started_s

    def _drain(self, patience: timedelta) -> None:
        """Waits for the GPU, which nothing else bounds: NCCL suspends no communicator that is in use."""
        wait = partial(torch.cuda.synchronize, self._device)
        within(wait, patience, what="what is queued on the GPU")

    def _change(self, group: LiveGroup, method: str) -> None:
        name, backend = str(group), _backend(group.group, self._device)
        if method == "suspend":
            backend.suspend()
            self._suspended.add(name)
        elif name in self._suspended:
            backend.resume()
            self._suspended.remove(name)


def _backend(group: Any, device: torch.device) -> Any:
    return group._get_backend(device)
