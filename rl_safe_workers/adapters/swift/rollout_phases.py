"""Adds phases and deadlines to generation in ms-swift's own trainer, with vLLM in the same process or as a server.

A step that generates goes through these phases, within ms-swift's ``train_step``::

    rollout     prompts
    sync        weights go to the engine
    rollout     generation and rewards; with vLLM in this process and release_comms, communicators give their memory
    logprob     log-probabilities under the current and the reference weights; advantages
    train       forward, backward, optimizer step
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rl_safe_workers.adapters.patches import PassThrough
from rl_safe_workers.adapters.swift.job import SwiftJob
from rl_safe_workers.adapters.swift.proved_syncs import ColocatedSyncs
from rl_safe_workers.adapters.swift.silent_engine import silent_engine
from rl_safe_workers.compat.param_gathers import complete_param_gathers
from rl_safe_workers.control.bounded import in_background
from rl_safe_workers.control.deadline import Deadline, DeadlineExceededError
from rl_safe_workers.errors import Awaited, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.setting_names import timeout_setting

logger = logging.getLogger(__name__)

_HARD_EXIT = 1


def install_rollout(job: SwiftJob) -> None:
    """Replaces functions that ms-swift's GRPO trainer calls. Call it before the trainer exists.

    Args:
        job: The job of this rank.
    """
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF
    from swift.megatron.trainers import rollout_mixin
    from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer

    phases, mixin = RolloutPhases(job), rollout_mixin.MegatronRolloutMixin
    rollout_mixin.create_rollout_group = phases.choosing_group(rollout_mixin.create_rollout_group)
    mixin._prepare_vllm_engine = phases.starting_engine(mixin._prepare_vllm_engine)
    mixin._move_model_to_vllm = phases.sending(mixin._move_model_to_vllm)
    mixin.offload_context = phases.offloading(mixin.offload_context)
    MegatronGRPOTrainer._init_rollout_engine = phases.starting(MegatronGRPOTrainer._init_rollout_engine)
    MegatronGRPOTrainer._generate_and_score_completions = phases.generating(
        MegatronGRPOTrainer._generate_and_score_completions
    )
    MegatronGRPOTrainer._maybe_compute_logps = phases.scoring(MegatronGRPOTrainer._maybe_compute_logps)
    MegatronRLHF._prepare_vllm_client = phases.connecting(MegatronRLHF._prepare_vllm_client)


class RolloutPhases:
    """The replacements for methods of ms-swift, on one rank."""

    def __init__(self, job: SwiftJob) -> None:
        """Holds this rank's job."""
        self._job, self._syncs = job, ColocatedSyncs(job)

    def choosing_group(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wraps ``create_rollout_group``, which would create groups during generation with context parallelism."""

        @functools.wraps(original)
        def create_rollout_group(trainer: Any) -> Any:
            if self._job.rollout_group is not None:
                trainer._rollout_group = self._job.rollout_group
            return original(trainer)

        return create_rollout_group

    def starting(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wraps ``_init_rollout_engine``: makes it phase ``start``, and refuses it before the bootstrap."""

        @functools.wraps(original)
        def init_rollout_engine(trainer: Any) -> None:
            self._job.trainer.comms.require("rollout")
            with self._job.trainer.phase(Phase.START), self._job.engines_groups():
                original(trainer)
                self._job.wait_for_all()

        return init_rollout_engine

    def starting_engine(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wraps ``_prepare_vllm_engine`` and the engine's generation, to end this process if the engine hangs."""

        @functools.wraps(original)
        def prepare_vllm_engine(trainer: Any) -> Any:
            with EngineWatch(self._job, "starting", is_shared=True):
                engine = original(trainer)
            self._syncs.add_engine(engine)
            infer, is_shared = engine.infer, trainer.vllm_tensor_parallel_size > 1

            @functools.wraps(infer)
            def watched(*args: Any, **kwargs: Any) -> Any:
                with EngineWatch(self._job, "generation", is_shared=is_shared):
                    return infer(*args, **kwargs)

            engine.infer = watched
            return engine

        return prepare_vllm_engine

    def connecting(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wraps ``_prepare_vllm_client``. The last rank reaches a vLLM server by this client."""

        @functools.wraps(original)
        def prepare_vllm_client(pipeline: Any) -> Any:
            client = original(pipeline)
            return None if client is None else PatientClient(client, self._job)

        return prepare_vllm_client

    def generating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``_generate_and_score_completions``: makes it phase ``rollout`` within a step or an evaluation."""

        @functools.wraps(original)
        def generate_and_score_completions(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            with self._job.aside(Phase.ROLLOUT):
                return original(trainer, *args, **kwargs)

        return generate_and_score_completions

    def sending(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wraps ``_move_model_to_vllm``: makes it phase ``sync``, and proves the sync if a proof is due."""

        @functools.wraps(original)
        def move_model_to_vllm(trainer: Any) -> None:
            with self._job.aside(Phase.SYNC):
                complete_param_gathers(trainer.wrapped_models)
                self._syncs.sync(trainer, lambda: original(trainer))

        return move_model_to_vllm

    def scoring(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``_maybe_compute_logps``, which runs for each micro-batch: begins phase ``logprob`` and stays in it."""

        @functools.wraps(original)
        def maybe_compute_logps(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._job.turn(Phase.LOGPROB)
            return original(trainer, *args, **kwargs)

        return maybe_compute_logps

    def offloading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``offload_context``: refuses it before the bootstrap. Generation gets the communicators' memory."""

        @contextmanager
        @functools.wraps(original)
        def offload_context(trainer: Any) -> Iterator[None]:
            job = self._job
            job.trainer.comms.require("offload")
            # If generation has several turns, ms-swift gathers over the trainers' groups between the turns.
            gives = job.trainer.lifecycle.current is Phase.ROLLOUT and not getattr(
                trainer, "multi_turn_scheduler", None
            )
            with original(trainer):
                if gives:
                    job.give_comms()
                yield
                job.take_back_comms()

        return offload_context


class EngineWatch:
    """Ends this process if its vLLM engine has not answered by the phase's deadline. Nothing can interrupt the call."""

    def __init__(self, job: SwiftJob, what: str, *, is_shared: bool) -> None:
        """Stores its arguments.

        Args:
            job: The job of this rank.
            what: The work of the engine, for the error.
            is_shared: Whether the engine has parts on other ranks. If so, one of those parts may be the one that hangs.
        """
        self._job, self._what, self._is_shared = job, what, is_shared

    def __enter__(self) -> None:
        """Begins to watch."""
        self._is_over, self._thread = threading.Event(), threading.get_ident()
        deadline, phase = self._job.engine_deadline(), self._job.phase_name()
        in_background(lambda: self._wait(deadline, phase), name="watching a vLLM engine")

    def __exit__(self, *error: object) -> None:
        """Stops watching."""
        self._is_over.set()

    def _wait(self, deadline: Deadline, phase: str) -> None:
        if self._is_over.wait(min(max(0.0, deadline.left_s), threading.TIMEOUT_MAX)):
            return
        rank = self._job.trainer.training_rank
        stack = "".join(traceback.format_stack(sys._current_frames().get(self._thread)))
        logger.error("training rank %d waits for its vLLM engine here:\n%s", rank, stack)
        name = f"the vLLM engine of training rank {rank} ({self._what})"
        waited = PhaseTimeoutError(
            phase=phase,
            awaited=Awaited(name),
            waited_s=deadline.waited_s,
            setting=timeout_setting(phase),
        )
        self._job.fail_with(waited if self._is_shared else silent_engine(name, phase, deadline))
        logging.shutdown()
        os._exit(_HARD_EXIT)


class PatientClient(PassThrough):
    """Wraps ms-swift's client of vLLM servers. Ends its calls at the phase's deadline. Passes all else through."""

    def __init__(self, client: Any, job: SwiftJob) -> None:
        """Wraps the client.

        Args:
            client: ms-swift's ``VLLMClient``.
            job: The job of this rank.
        """
        super().__init__(client)
        self._job = job

    def _passed(self, name: str, value: Any) -> Any:
        if not callable(value):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            deadline = self._job.engine_deadline()
            try:
                return in_background(lambda: value(*args, **kwargs), name=f"the vLLM server's {name}").wait(deadline)
            except DeadlineExceededError:
                urls = ", ".join(getattr(self._stock, "base_urls", ()))
                raise silent_engine(f"the vLLM server {urls} ({name})", self._job.phase_name(), deadline) from None

        return call
