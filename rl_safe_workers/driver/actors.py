"""The Ray actors of a run: thin shells that import their worker inside the actor's own process.

The driver imports neither torch, Megatron nor vLLM, and the imports of all processes go on side by side.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import ray

from rl_safe_workers import env
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import PhaseTimeoutError, RankError, RunError
from rl_safe_workers.lifecycle import PhaseEvent, unix_now
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.root_cause import cause_of

NODE_IP = "node_ip"
"""A method of the shell itself: the address of its node in the cluster."""

STACK_SIGNAL = signal.SIGUSR2
"""Makes an actor write its stacks. Ray's workers leave it alone; SIGUSR1 is taken by Ray Tune."""
GLOO_FLIGHTS, GLOO_REQUESTS = "flight_gloo_", "request_gloo_"
"""What begins the names of gloo's Flight Recorder files, and of the pipes that ask for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a call brings back: a value or an error, and in either case what happened."""

    value: Any = None
    error: RunError | None = None
    events: list[PhaseEvent] = field(default_factory=list)
    """Phases completed or failed since the last reply."""


class ActorShell:
    """Runs one worker and turns what it raises into an error of ours."""

    role: ClassVar[Role]
    target: ClassVar[str]
    """``module:class`` of the worker, whose constructor takes the configuration and the rank."""
    rank_argument: ClassVar[str]

    def __init__(self, config: RunConfig, rank: int) -> None:
        self._config, self._rank = config, rank
        self._worker: Any = None
        if (folder := env.hang_dir()) is not None:
            answer_when_hung(folder, RankId(self.role, rank))

    def call(self, phase: str, method: str, args: tuple[Any, ...]) -> Reply:
        """Calls a method of the worker.

        Args:
            phase: Phase to name in errors.
            method: Name of the method.
            args: Its arguments.

        Returns:
            The method's value; or, if it raised, a RankError with this actor's id, or the PhaseTimeoutError as it was,
            which names the ranks that are missing.
        """
        value: Any = None
        error: RunError | None = None
        try:
            if self._worker is None:
                self._worker = self._build()
            value = self._node_ip() if method == NODE_IP else getattr(self._worker, method)(*args)
        except PhaseTimeoutError as timeout:
            error = timeout
        except Exception as exception:
            error = self._as_rank_error(exception, phase)
        events = [] if self._worker is None else self._worker.lifecycle.drain_events()
        return Reply(value=value, error=error, events=events)

    @staticmethod
    def _node_ip() -> str:
        return str(ray.util.get_node_ip_address())

    def _as_rank_error(self, error: Exception, phase: str) -> RankError:
        raised_at = unix_now()  # before the trace, which takes a while
        rank_id = RankId(self.role, self._rank)
        return RankError(
            rank_id=rank_id,
            phase=phase,
            cause=cause_of(error, rank_id),
            text=f"{type(error).__name__}: {error}",
            trace="".join(traceback.format_exception(error)),
            raised_at=raised_at,
        )

    def _build(self) -> Any:
        module, _, name = self.target.partition(":")
        worker_class = getattr(importlib.import_module(module), name)
        return worker_class(self._config, **{self.rank_argument: self._rank})


class TrainerActor(ActorShell):
    """A training rank."""

    role = Role.TRAINER
    target = "rl_safe_workers.trainer.worker:TrainerWorker"
    rank_argument = "training_rank"


class RolloutActor(ActorShell):
    """A rollout rank."""

    role = Role.ROLLOUT
    target = "rl_safe_workers.rollout.vllm:VllmRollout"
    rank_argument = "rollout_rank"


def stack_file(rank_id: RankId) -> str:
    """Name of the file that an actor's stacks are in."""
    return f"stack_{rank_id.role}_{rank_id.rank}.txt"


def answer_when_hung(folder: Path, rank_id: RankId) -> None:
    """Lets the driver ask this process for evidence, whatever its main thread is doing.

    ``STACK_SIGNAL`` adds the stacks of all threads to `stack_file`; a trainer also writes what torch's Flight Recorder
    has of gloo's groups, once something is written to its pipe. (torch itself does the like for NCCL.)

    Args:
        folder: Where; the process keeps open what it makes there.
        rank_id: Of this actor.
    """
    # In C, without the lock that Python code needs; the file stays open as long as the process lives.
    faulthandler.register(
        STACK_SIGNAL, file=(folder / stack_file(rank_id)).open("w", encoding="utf-8"), all_threads=True, chain=False
    )
    if rank_id.role is Role.TRAINER:
        threading.Thread(
            target=_answer_flight_requests, args=(folder, rank_id.rank), name="flights", daemon=True
        ).start()


def _answer_flight_requests(folder: Path, rank: int) -> None:
    pipe = folder / f"{GLOO_REQUESTS}{rank}.pipe"
    os.mkfifo(pipe)
    # For writing as well, so that a reader without a writer waits.
    descriptor = os.open(pipe, os.O_RDWR)
    while os.read(descriptor, 1):
        # Not imported here: what the worker has not imported has recorded nothing.
        dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace", None)
        unfinished = folder / f"unfinished_gloo_{rank}"
        unfinished.write_bytes(b"" if dump is None else dump(True, False, False))
        unfinished.rename(folder / f"{GLOO_FLIGHTS}{rank}")
