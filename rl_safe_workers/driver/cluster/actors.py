"""Defines the Ray actors of a run: thin shells that import their worker inside the actor's own process.

The driver imports neither torch, Megatron nor vLLM, and all actors import in parallel.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import ray

from rl_safe_workers import env
from rl_safe_workers.config import RunConfig
from rl_safe_workers.diagnostics.answering import answer_when_asked
from rl_safe_workers.diagnostics.stacks import CallFrame
from rl_safe_workers.errors import RunError
from rl_safe_workers.lifecycle import PhaseEvent
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.root_cause import report_of

NODE_IP = "node_ip"
"""Name of a method of the shell itself. It returns the address of the actor's node in the cluster."""

CALL_FRAME = CallFrame("rl_safe_workers/driver/cluster/actors.py", "call")
"""The frame of `ActorShell.call`, in which an actor runs the driver's calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The result of a call: a value or an error, and in both cases the phase events."""

    value: Any = None
    error: RunError | None = None
    events: list[PhaseEvent] = field(default_factory=list)
    """Phases completed or failed since the last reply."""


class ActorShell:
    """Runs one worker and converts its exceptions to our errors."""

    role: ClassVar[Role]
    target: ClassVar[str]
    """``module:class`` of the worker, whose constructor takes the configuration and the rank."""
    rank_argument: ClassVar[str]

    def __init__(self, config: RunConfig, rank: int) -> None:
        self._config, self._rank = config, rank
        self._worker: Any = None
        if (folder := env.hang_dir()) is not None:
            answer_when_asked(folder, RankId(self.role, rank), CALL_FRAME)

    def call(self, phase: str, method: str, args: tuple[Any, ...]) -> Reply:
        """Calls a method of the worker.

        Args:
            phase: Phase to name in errors.
            method: Name of the method.
            args: Its arguments.

        Returns:
            The method's value. If the method raised: a RankError with this actor's id, or a PhaseTimeoutError
            unchanged, because it already names the missing ranks.
        """
        value: Any = None
        error: RunError | None = None
        try:
            if self._worker is None:
                self._worker = self._build()
            value = self._node_ip() if method == NODE_IP else getattr(self._worker, method)(*args)
        except Exception as exception:
            error = report_of(exception, RankId(self.role, self._rank), phase)
        events = [] if self._worker is None else self._worker.lifecycle.drain_events()
        return Reply(value=value, error=error, events=events)

    @staticmethod
    def _node_ip() -> str:
        return str(ray.util.get_node_ip_address())

    def _build(self) -> Any:
        module, _, name = self.target.partition(":")
        worker_class = getattr(importlib.import_module(module), name)
        return worker_class(self._config, **{self.rank_argument: self._rank})


class TrainerActor(ActorShell):
    """A training rank."""

    role = Role.TRAINER
    target = "rl_safe_workers.trainer.trainer_worker:TrainerWorker"
    rank_argument = "training_rank"


class RolloutActor(ActorShell):
    """A rollout rank."""

    role = Role.ROLLOUT
    target = "rl_safe_workers.rollout.vllm:VllmRollout"
    rank_argument = "rollout_rank"
