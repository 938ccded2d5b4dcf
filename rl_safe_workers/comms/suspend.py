"""Suspends all communicators of a training rank before a rollout, and resumes them after it.

It is used instead of a release, where NCCL can suspend communicators (`nccl_suspend`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from rl_safe_workers.comms import nccl_suspend
from rl_safe_workers.comms.live_groups import LiveGroup, live_groups
from rl_safe_workers.control.bounded import failure_of, in_background, within
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.supervision import Supervision
from rl_safe_workers.errors import CommunicatorError, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase

logger = logging.getLogger(__name__)

_DRAIN_SHARE = 0.8
"""Share of the timeout for draining the GPU's queue. A rank that needs longer tells the others before they give up."""
_PROOF_ELEMENTS = 4096


class Suspension:
    """Suspends the communicators of one training rank, and resumes the same ones."""

    def __init__(self, control: ControlPlane, *, device: torch.device) -> None:
        """Suspends nothing yet.

        Args:
            control: This rank's place in the training world.
            device: The communicators' device.
        """
        self._control, self._device = control, device
        self._planned: list[LiveGroup] = []
        self._suspended: set[str] = set()

    def prove(self, *, timeout: timedelta, phase: Phase = Phase.OFFLOAD) -> bool:
        """Tests suspension on the default group alone. Collective over: the training world.

        It computes a sum, suspends, resumes, and computes the sum again.

        Args:
            timeout: Longest time for all of it.
            phase: The phase that this is part of, for errors.

        Returns:
            False if NCCL refused on some rank. Then the communicators are as before.

        Raises:
            CommunicatorError: On every rank, if a sum or the resume fails, or the second sum differs on any rank.
            PhaseTimeoutError: On every rank, if one does not come in time; names it.
        """
        world = live_groups()[0]
        before = self._sum(world, "sum before suspend", timeout, phase)
        try:
            self.suspend(lambda group: group.group is world.group, timeout=timeout, phase=phase)
            refusal = None
        except PhaseTimeoutError:
            raise
        except CommunicatorError as error:
            refusal = error
        self.resume(timeout=timeout, phase=phase)
        self._sum(world, "sum after resume", timeout, phase, expected=before)
        if refusal is not None:
            logger.warning("communicators keep their memory: NCCL does not suspend them: %s", refusal)
        return refusal is None

    def _sum(
        self, world: LiveGroup, name: str, timeout: timedelta, phase: Phase, expected: torch.Tensor | None = None
    ) -> torch.Tensor:
        values = torch.arange(_PROOF_ELEMENTS, dtype=torch.float32, device=self._device) / (1 + self._control.rank)

        def reduce() -> torch.Tensor:
            dist.all_reduce(values, group=world.group)
            found = values.cpu()
            if expected is not None and not torch.equal(found, expected):
                raise CommunicatorError("an all_reduce after suspend and resume gave another sum")
            return found

        work = Supervision(self._control, name, phase=phase, timeout=timeout)
        found: torch.Tensor = work.part(f"{world} {name}", world.ranks, reduce)
        work.finish()
        return found

    def suspend(
        self, connected: Callable[[LiveGroup], bool], *, timeout: timedelta, phase: Phase = Phase.OFFLOAD
    ) -> float:
        """Suspends groups. Collective over: the training world. Idempotent.

        Args:
            connected: Returns True if a group has a communicator, since NCCL can suspend no other.
            timeout: Longest time for all of them.
            phase: The phase that this is part of, for errors.

        Returns:
            Seconds.

        Raises:
            PhaseTimeoutError: On every rank, if one does not come to a group in time; names it.
            CommunicatorError: On every rank, if one fails, or its GPU does not finish its queue; names it.
        """
        if self._planned:
            return 0.0
        self._planned = [group for group in live_groups() if connected(group)]
        return self._do("suspend", phase, timeout)

    def resume(self, *, timeout: timedelta, phase: Phase = Phase.ONLOAD) -> float:
        """Resumes the suspended groups, even if only some ranks have suspended them. Returns the seconds that it took.

        Collective over: the training world. ``timeout``, ``phase`` and the errors are as in `suspend`.
        """
        seconds = self._do("resume", phase, timeout)
        self._planned = []
        return seconds

    def _do(self, method: str, phase: Phase, timeout: timedelta) -> float:
        started_s = time.monotonic()
        work = Supervision(self._control, method, phase=phase, timeout=timeout)
        if method == "suspend" and self._device.type == "cuda":
            work.alone("the wait for its GPU", partial(self._drain, timeout * _DRAIN_SHARE))
        # All members go through all groups. After a failure, a group may be suspended on some of its members only.
        everyone = range(self._control.size)
        work.part(f"the {method} of communicators", everyone, partial(self._change_all, method))
        work.finish()
        logger.info("%s of %d communicators in %.3f s", method, len(self._planned), time.monotonic() - started_s)
        return time.monotonic() - started_s

    def _change_all(self, method: str) -> None:
        """Suspends or resumes all groups at once: NCCL waits for a group's other members. Raises the first failure."""
        ended: SimpleQueue[Exception | None] = SimpleQueue()
        for group in self._planned:
            in_background(partial(self._report_change, group, method, ended), name=f"{method} of a communicator")
        for _ in self._planned:
            if (failure := ended.get()) is not None:
                raise failure

    def _report_change(self, group: LiveGroup, method: str, ended: SimpleQueue[Exception | None]) -> None:
        failure = failure_of(partial(self._change, group, method))
        if failure is not None:
            failure = CommunicatorError(f"{group}: {failure}")
        ended.put(failure)

    def _drain(self, patience: timedelta) -> None:
        """Waits for the GPU within ``patience``, because NCCL cannot suspend a communicator that is in use."""
        wait = partial(torch.cuda.synchronize, self._device)
        within(wait, patience, what="what is queued on the GPU")

    def _change(self, group: LiveGroup, method: str) -> None:
        name, backend = str(group), _backend(group.group, self._device)
        if method == "suspend":
            nccl_suspend.suspend(backend)
            self._suspended.add(name)
        elif name in self._suspended:
            nccl_suspend.resume(backend)
            self._suspended.remove(name)


def _backend(group: Any, device: torch.device) -> Any:
    return group._get_backend(device)
