"""Owns the phases of a run and the order in which a process may enter them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rl_safe_workers.errors import LifecycleError
from rl_safe_workers.ranks import Role

logger = logging.getLogger(__name__)

_MONOTONIC_TO_UNIX_S = time.time() - time.monotonic()


def unix_now() -> float:
    """Returns the Unix time in seconds. The offset to the monotonic clock is taken once, when this module loads.

    Unlike ``time.time``, it does not jump when the machine's clock is set during a run. Durations and the order of
    failures stay right.
    """
    return _MONOTONIC_TO_UNIX_S + time.monotonic()


class Phase(StrEnum):
    """A stretch of a run with its own timeout; see `setting_names.timeout_setting`."""

    START = "start"
    """Ray, placement and imports. At the end every process of the run is up."""
    WORLD = "world"
    """The training world: the default process group of each trainer."""
    GROUPS = "groups"
    """Megatron's process groups."""
    BOOTSTRAP = "bootstrap"
    """Connecting every communicator while memory is free."""
    CONVERT = "convert"
    """Building the model and optimizer, and converting HF weights to Megatron's layout."""
    LOAD = "load"
    """Loading a checkpoint of an earlier run."""
    JOINT = "joint"
    """Building the joint group of trainers and rollout ranks."""
    OFFLOAD = "offload"
    """Moving trainer state to host memory, to free device memory for the rollout."""
    ROLLOUT = "rollout"
    """Generation."""
    REWARD = "reward"
    """Rewards of the generated samples, in the driver."""
    ONLOAD = "onload"
    """Moving trainer state back to the device."""
    LOGPROB = "logprob"
    """Log-probabilities of the sampled tokens under the current (or reference) weights."""
    TRAIN = "train"
    """Policy loss and optimizer step."""
    SYNC = "sync"
    """Sending weights to the rollout ranks: over the joint group, or in a host framework's way."""
    SAVE = "save"
    """Saving a checkpoint, on the training world alone."""
    TEARDOWN = "teardown"
    """Verdict exchange and ordered destruction of every group."""


SAVE_ENDS_BEFORE = frozenset({Phase.OFFLOAD, Phase.SAVE, Phase.LOAD, Phase.CONVERT, Phase.TEARDOWN})
"""Phases that begin by finishing a save in the background."""

REQUIRES: Mapping[Role, Mapping[Phase, frozenset[Phase]]] = {
    Role.TRAINER: {
        Phase.START: frozenset(),
        Phase.WORLD: frozenset(),
        Phase.GROUPS: frozenset({Phase.WORLD}),
        Phase.BOOTSTRAP: frozenset({Phase.GROUPS}),
        Phase.CONVERT: frozenset({Phase.BOOTSTRAP}),
        Phase.LOAD: frozenset({Phase.BOOTSTRAP}),
        Phase.JOINT: frozenset({Phase.BOOTSTRAP}),
        Phase.OFFLOAD: frozenset({Phase.BOOTSTRAP}),
        Phase.ROLLOUT: frozenset({Phase.BOOTSTRAP}),
        Phase.ONLOAD: frozenset({Phase.OFFLOAD}),
        Phase.LOGPROB: frozenset({Phase.BOOTSTRAP}),
        Phase.TRAIN: frozenset({Phase.BOOTSTRAP}),
        Phase.SYNC: frozenset({Phase.BOOTSTRAP}),
        Phase.SAVE: frozenset({Phase.BOOTSTRAP}),
        Phase.TEARDOWN: frozenset(),
    },
    Role.ROLLOUT: {
        Phase.START: frozenset(),
        Phase.JOINT: frozenset({Phase.START}),
        Phase.ROLLOUT: frozenset({Phase.JOINT}),
        Phase.SYNC: frozenset({Phase.JOINT}),
        Phase.TEARDOWN: frozenset(),
    },
}
"""The transition table: a phase may be entered once every phase that it requires has completed at least once.

No phase requires CONVERT, and no phase of a trainer requires JOINT: a host framework may build its model, and send its
weights, in its own way.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEvent:
    """The record of one pass through a phase.

    Example: ``PhaseEvent(phase="bootstrap", role="trainer", rank=2, start_s=1763.2, end_s=1763.4, ok=True)``
    """

    phase: Phase
    role: Role
    rank: int
    start_s: float
    """Unix time in seconds."""
    end_s: float
    """Unix time in seconds."""
    ok: bool
    """True if the phase completed without an exception."""
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of accelerator memory at the end of the phase, by owner; empty without an accelerator."""


FREE_BYTES = "free"
"""Key in an event's ``device_bytes`` for memory that no process holds."""


class Observer(Protocol):
    """Observes a process at the beginning and the end of each phase.

    The interface is this narrow so that this module does not depend on devices. Its exceptions are logged and have no
    other effect.
    """

    def begin(self, phase: Phase) -> None:
        """Is called before the body of a phase."""
        ...

    def end(self, phase: Phase) -> Mapping[str, int]:
        """Is called after the body, even if the body raised; returns the event's ``device_bytes``."""
        ...


class Lifecycle:
    """Tracks the phases of one process and refuses moves that the transition table does not allow.

    Not thread-safe: one process runs one phase at a time, on one thread.

    Attributes:
        observer: Called at the beginning and the end of each phase that is entered after it is set; None for none.
    """

    def __init__(self, *, role: Role, rank: int) -> None:
        self.role, self.rank = role, rank
        self.observer: Observer | None = None
        self._current: Phase | None = None
        self._completed: set[Phase] = set()
        self._events: list[PhaseEvent] = []

    @property
    def current(self) -> Phase | None:
        """The phase being run, or None between phases."""
        return self._current

    @property
    def last_failed(self) -> Phase | None:
        """The phase that was run last, if it raised; None if it completed, or there was none since `drain_events`."""
        last = self._events[-1] if self._events else None
        return None if last is None or last.ok else last.phase

    def has_completed(self, phase: Phase) -> bool:
        """Returns True if the phase has completed at least once."""
        return phase in self._completed

    def check(self, phase: Phase) -> None:
        """Raises LifecycleError unless ``phase`` may be entered now."""
        table = REQUIRES[self.role]
        who = f"{self.role.noun} {self.rank}"
        if phase not in table:
            raise LifecycleError(f"{who} cannot enter phase {phase}: it is not a phase of a {self.role}")
        if self._current is not None:
            raise LifecycleError(f"{who} cannot enter phase {phase} while phase {self._current} is running")
        if Phase.TEARDOWN in self._completed and phase is not Phase.TEARDOWN:
            raise LifecycleError(f"{who} cannot enter phase {phase} after teardown; start a new process")
        missing = [p for p in Phase if p in table[phase] - self._completed]
        if missing:
            names = ", ".join(missing)
            raise LifecycleError(f"{who} cannot enter phase {phase} before phase {names} has completed")

    @contextmanager
    def enter(self, phase: Phase, *, since_s: float | None = None) -> Iterator[None]:
        """Runs the body as a phase. An event is always recorded; the phase completes only if the body does not raise.

        Args:
            phase: The phase to enter.
            since_s: Unix time in seconds at which the phase began, if it began before this call. The start phase, for
                example, includes imports.

        Raises:
            LifecycleError: If the phase may not be entered now.
        """
        self.check(phase)
        self._current = phase
        start_s, ok = since_s or unix_now(), False
        try:
            self._observe_begin(phase)
            yield
            ok = True
        finally:
            end_s = unix_now()
            self._current = None
            if ok:
                self._completed.add(phase)
            self._events.append(
                PhaseEvent(
                    phase=phase,
                    role=self.role,
                    rank=self.rank,
                    start_s=start_s,
                    end_s=end_s,
                    ok=ok,
                    device_bytes=self._observe_end(phase),
                )
            )
            logger.info(
                "%s %d: phase %s %s in %.2f s",
                self.role.noun,
                self.rank,
                phase,
                "done" if ok else "failed",
                end_s - start_s,
            )

    def _observe_begin(self, phase: Phase) -> None:
        try:
            if self.observer is not None:
                self.observer.begin(phase)
        except Exception:
            self._warn_unobserved("beginning", phase)

    def _observe_end(self, phase: Phase) -> dict[str, int]:
        try:
            return {} if self.observer is None else dict(self.observer.end(phase))
        except Exception:
            self._warn_unobserved("end", phase)
            return {}

    def _warn_unobserved(self, which: str, phase: Phase) -> None:
        logger.warning(
            "%s %d: the %s of phase %s could not be observed", self.role.noun, self.rank, which, phase, exc_info=True
        )

    def invalidate(self, phase: Phase) -> None:
        """Marks a phase as not completed, e.g. the bootstrap after a group was rebuilt."""
        self._completed.discard(phase)

    def drain_events(self) -> list[PhaseEvent]:
        """Returns the events recorded since the last call."""
        events, self._events = self._events, []
        return events
