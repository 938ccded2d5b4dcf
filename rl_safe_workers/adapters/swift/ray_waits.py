"""The waits of ms-swift's driver in Ray mode, each with a deadline, and the verdict on the first that fails.

ms-swift calls ``ray.get`` without a timeout. After a failure of one rank it goes on to call the others, which still are
in a collective (ray/megatron/base_trainer.py:253). Here the first failure ends every actor of the job, and each later
call raises it once more.
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
"""The phases that each method of a worker may go through, the one that it is for first. The driver waits for all of
them; other methods are outside."""


class RayWaits:
    """Bounds the driver's waits. After the first failure it gives the verdict, and ends the job's actors.

    Attributes:
        failure: The failure that the job ends with; None while all is well.
        parties: The job's actors that exist by now.
        evidence: The folder for the evidence of a failure.
        driver: Bounds the waits.
    """

    def __init__(self, timeouts: SwiftTimeouts, evidence: Path) -> None:
        """Knows of no actor yet.

        Args:
            timeouts: The deadlines, by phase.
            evidence: The folder, as long as nobody knows better.
        """
        self.failure: BaseException | None = None
        self.parties: list[Party] = []
        self.evidence = evidence
        self._timeouts = timeouts
        self.driver = DriverWaits(timeouts, lambda: self.parties)
        self._waiting: tuple[str, tuple[str, ...]] | None = None

    @contextmanager
    def waiting(self, what: str, phases: tuple[str, ...] | None = None) -> Iterator[None]:
        """Says what the waits of the body are for.

        Args:
            what: A method of a worker, or another name for errors.
            phases: The phases whose timeouts count; None: those of the method.

        Raises:
            RunError: The failure that the job ends with, if there has been one.
        """
        if self.failure is not None:
            raise self.failure
        before, self._waiting = self._waiting, (what, phases or PHASES.get(what, (OUTSIDE,)))
        try:
            yield
        finally:
            self._waiting = before

    def get(self, references: Any, what: str, phases: tuple[str, ...]) -> Any:
        """As ``ray.get``, with a deadline.

        Args:
            references: One reference, or a list.
            what: What is waited for, unless `waiting` says so.
            phases: Likewise.

        Raises:
            JobError: If an actor fails or does not answer in time; names it. Every actor is ended then.
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
        """Gives the verdict on a failure of the body, and ends every actor.

        Raises:
            RunError: The failure that the job ends with, also if there has been one.
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
        """Ends every actor at once. ms-swift asks them to end, and gives each 30 s."""
        for party in self.parties:
            try:
                ray.kill(party.actor, no_restart=True)
            except Exception as error:  # the job's own failure goes on
                logger.warning("ending %s: %s: %s", party.name, type(error).__name__, error)


class RayStandIn:
    """Stands in for ``ray`` in one of ms-swift's modules. Everything that a subclass does not replace is Ray's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def __reduce__(self) -> Any:
        # A function that ms-swift sends to another process takes the names of its module along.
        return importlib.import_module, ("ray",)


class BoundedRay(RayStandIn):
    """Bounds ``get`` without a timeout."""

    def __init__(self, waits: RayWaits, what: str, *phases: str) -> None:
        """Bounds the module's waits.

        Args:
            waits: The driver's.
            what: What the module waits for.
            *phases: The phases whose timeouts count.
        """
        self._waits, self._what, self._phases = waits, what, phases

    def get(self, references: Any, *, timeout: float | None = None) -> Any:
        """As ``ray.get``."""
        if timeout is not None:
            return ray.get(references, timeout=timeout)
        return self._waits.get(references, self._what, self._phases)


def calling(waits: RayWaits, settings: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns what wraps ``WorkerGroup.execute``.

    Args:
        waits: The driver's.
        settings: Ours as JSON, for the workers.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(group: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
            if method_name == "init_actor":
                kwargs["rl_safe"] = settings
            with waits.waiting(method_name):
                return original(group, method_name, *args, **kwargs)

        return execute

    return wrap
