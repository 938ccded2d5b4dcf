"""Puts deadlines on the waits of ms-swift's driver in Ray mode, and gives the verdict on the first wait that fails.

ms-swift calls ``ray.get`` without a timeout. After a rank has failed, it goes on to call the other ranks, which are
still in a collective (ray/megatron/base_trainer.py:253). Here the first failure ends every actor of the job. Each later
call raises that failure again.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from rl_safe_workers.adapters.driver_waits import DriverWaits, Party
from rl_safe_workers.adapters.job_verdict import JobVerdict
from rl_safe_workers.adapters.patches import PassThrough
from rl_safe_workers.adapters.swift.swift_settings import SwiftTimeouts
from rl_safe_workers.errors import OUTSIDE, RunError, in_one_line
from rl_safe_workers.lifecycle import Phase

logger = logging.getLogger(__name__)

PHASES: Mapping[str, tuple[str, ...]] = {
    "init_actor": (Phase.CONVERT, Phase.START, Phase.WORLD, Phase.BOOTSTRAP, Phase.BOOTSTRAP),
    "init_teacher_model": (Phase.CONVERT,),
    "setup": (Phase.CONVERT,),
    "train_step": (Phase.TRAIN, Phase.LOGPROB, Phase.SAVE),
    "compute_logps": (Phase.LOGPROB,),
    "compute_ref_logps": (Phase.LOGPROB,),
    "compute_teacher_logps": (Phase.LOGPROB,),
    "compute_teacher_logits": (Phase.LOGPROB,),
    "update_weights": (Phase.SYNC,),
    "merge_lora": (Phase.SYNC,),
    "unmerge_lora": (Phase.SYNC,),
    "offload_to_cpu": (Phase.SYNC,),
    "reload_to_gpu": (Phase.SYNC,),
    "give_comms": (Phase.ROLLOUT,),
    "finalize_generation": (Phase.ROLLOUT,),
    "finalize": (Phase.TEARDOWN, Phase.SAVE),
}
"""The phases that each method of a worker may go through; its main phase comes first. The driver allows the sum of
their timeouts. Other methods are outside of phases."""


class RayWaits:
    """Puts deadlines on the driver's waits. After the first failure it gives the verdict and ends the job's actors.

    Attributes:
        failure: The error of the job; None as long as nothing has failed.
        parties: The job's actors that exist by now.
        evidence: The folder for the evidence of a failure.
        driver: Puts deadlines on the waits.
    """

    def __init__(self, timeouts: SwiftTimeouts, evidence: Path) -> None:
        """Stores its arguments. `parties` begins empty.

        Args:
            timeouts: The deadlines, by phase.
            evidence: The folder for evidence, until the folder of the checkpoints is known.
        """
        self.failure: BaseException | None = None
        self.parties: list[Party] = []
        self.evidence = evidence
        self._timeouts = timeouts
        self.driver = DriverWaits(timeouts, lambda: self.parties)
        self._waiting: tuple[str, tuple[str, ...]] | None = None

    @contextmanager
    def waiting(self, what: str, phases: tuple[str, ...] | None = None) -> Iterator[None]:
        """Names the work and the phases that the waits in the body are for.

        Args:
            what: A method of a worker, or another name for errors.
            phases: The phases whose timeouts apply; None: the phases of the method.

        Raises:
            RunError: The error of the job, if the job has already failed.
        """
        if self.failure is not None:
            raise self.failure
        before, self._waiting = self._waiting, (what, phases or PHASES.get(what, (OUTSIDE,)))
        try:
            yield
        finally:
            self._waiting = before

    def get(self, references: Any, what: str, phases: tuple[str, ...]) -> Any:
        """Calls ``ray.get`` with a deadline.

        Args:
            references: One reference, or a list.
            what: The work that is waited for, unless `waiting` names it.
            phases: The phases of that work, unless `waiting` names them.

        Raises:
            JobError: If an actor fails or does not answer in time; names it. By then, every actor has been ended.
        """
        with self.judged():
            what, phases = self._waiting or (what, phases)
            return self.driver.bounded(
                phases[0],
                what,
                lambda: ray.get(references),
                limit_s=sum(map(self.driver.timeout_s, phases)),
                calls=references if isinstance(references, list) else [references],
            )

    @contextmanager
    def judged(self) -> Iterator[None]:
        """If the body fails, gives the verdict and ends every actor.

        Raises:
            RunError: The error of the job: from this body, or from an earlier failure.
        """
        if self.failure is not None:
            raise self.failure
        try:
            yield
        except (RunError, ray.exceptions.RayError) as error:
            if error is self.failure:
                raise
            self.failure = JobVerdict(lambda: self.parties, self.evidence).on(error, self.driver.failed_in)
            self._end()
            if self.failure is error:
                logger.error("the job has failed: %s", in_one_line(error))
                raise
            raise self.failure from error

    def _end(self) -> None:
        """Kills every actor at once. ms-swift would ask them to end, and give each 30 s."""
        for party in self.parties:
            try:
                ray.kill(party.actor, no_restart=True)
            except Exception as error:  # the caller raises the job's own failure
                logger.warning("ending %s: %s: %s", party.name, type(error).__name__, error)


class RayStandIn(PassThrough):
    """Replaces ``ray`` in one of ms-swift's modules."""

    def __init__(self) -> None:
        """Replaces nothing of ``ray``; subclasses do."""
        super().__init__(ray)

    def __reduce__(self) -> Any:
        # A function that ms-swift sends to another process is pickled together with the names of its module.
        return importlib.import_module, ("ray",)


class BoundedRay(RayStandIn):
    """Gives a deadline to calls of ``get`` without a timeout."""

    def __init__(self, waits: RayWaits, what: str, *phases: str) -> None:
        """Sets the deadline of the module's waits.

        Args:
            waits: The driver's waits.
            what: The work that the module waits for.
            *phases: The phases whose timeouts apply.
        """
        super().__init__()
        self._waits, self._what, self._phases = waits, what, phases

    def get(self, references: Any, *, timeout: float | None = None) -> Any:
        """Calls ``ray.get``, with a deadline if there is no timeout."""
        if timeout is not None:
            return ray.get(references, timeout=timeout)
        return self._waits.get(references, self._what, self._phases)


def calling(waits: RayWaits, settings: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a wrapper for ``WorkerGroup.execute``. It names the waits and passes settings to the workers.

    Args:
        waits: The driver's waits.
        settings: The adapter's settings as JSON, for the workers.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(group: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
            if method_name == "init_actor":
                kwargs["rl_safe"] = settings
            with waits.waiting(method_name):
                return original(group, method_name, *args, **kwargs)

        return execute

    return wrap
