"""One rank of an ms-swift job, with its place in the training world, from the default group to the exit."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.adapters.given_comms import GivenComms, world_backend
from rl_safe_workers.adapters.host_contract import package_root
from rl_safe_workers.adapters.hosting import HostedTrainer
from rl_safe_workers.adapters.patches import replaced
from rl_safe_workers.adapters.rank_answers import leave_early
from rl_safe_workers.adapters.shards import PendingShards, ShardWriter
from rl_safe_workers.adapters.swift.args_features import features_of
from rl_safe_workers.adapters.swift.bridge_groups import create_ep_pp_groups, create_rollout_groups
from rl_safe_workers.adapters.swift.export import exported
from rl_safe_workers.adapters.swift.swift_contract import check_grpo, check_proved
from rl_safe_workers.adapters.swift.swift_settings import SwiftSettings
from rl_safe_workers.checkpoint.folders.step_tracker import TRACKER, write_tracker
from rl_safe_workers.comms.bootstrap import HostGroups
from rl_safe_workers.compat import torch_groups
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import (
    OUTSIDE,
    ConfigError,
    in_one_line,
)
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.groups import OpClass
from rl_safe_workers.workers.communicators import HostComms

logger = logging.getLogger(__name__)

_FOLDERS = 1
"""Number of folders that ms-swift makes above the folder of the shards: ``checkpoint-4/iter_0000004``."""
_HEARD = timedelta(seconds=2)
"""How much earlier than the phase's deadline a rank stops waiting for an engine, so that other ranks learn of it."""
_UNSUPPORTED_RLHF_TYPE = "gkd"
_WITH_ENGINE = (Phase.ROLLOUT, Phase.SYNC)


class SwiftComms(HostComms):
    """The collectives that ms-swift issues in addition to Megatron's."""

    missing_groups = "ms-swift has not made Megatron's groups by initialize_model_parallel()"
    makes_groups = True

    def __init__(self) -> None:
        self.generates = False
        """True if ms-swift's own trainer also generates."""

    def groups(self) -> HostGroups:
        """Returns the groups on which ms-swift issues collectives, with the op classes that it adds to Megatron's."""
        return [
            # Metrics: megatron/trainers/base.py:600.
            (parallel_state.get_data_parallel_group(), "dp", (OpClass.REDUCE,)),
            # Success of an update, and its gradient norm: megatron/utils/parallel_utils.py:14, 24.
            # Generation gathers samples and advantages: megatron/trainers/grpo_trainer.py:270, 317.
            (
                parallel_state.get_model_parallel_group(),
                "mp",
                (OpClass.REDUCE, OpClass.GATHER_SCATTER) if self.generates else (OpClass.REDUCE,),
            ),
            # An export broadcasts weights over it, and first their shapes: mcore_bridge/bridge/gpt_bridge.py:328, 443.
            (parallel_state.get_pipeline_model_parallel_group(), "pp", (OpClass.REDUCE,)),
        ]


class SwiftJob(HostedTrainer):
    """The trainer behind ms-swift's pipelines. It has the world, groups, bootstrap, phases, saves and the exit."""

    def __init__(self, settings: SwiftSettings, *, is_actor: bool = False) -> None:
        """Records the settings, and does nothing else.

        Args:
            settings: The adapter's settings.
            is_actor: Whether this process is a worker of Ray mode.
        """
        self.settings, self._is_actor = settings, is_actor
        self.rollout_group: Any = None
        """The group of ranks with the same samples. None without context parallelism: then ms-swift uses Megatron's."""
        self._given: GivenComms | None = None
        self._comms = SwiftComms()
        self.saves: PendingShards | None = None
        self._step = ExitStack()
        """Holds the phase that a callback has entered."""
        self._optimizer_replicated = False
        self._stage: Phase | None = None
        """The phase that this rank prepares for: before its first phase, or after training. Else None."""

    def creating_world(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wraps ``init_process_group``, to which ms-swift gives a timeout of 208 days."""

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            given = inspect.signature(original).bind(*args, **kwargs)
            given.arguments["timeout"] = timedelta(seconds=self.settings.timeouts.world)
            if self.settings.release_comms and not self.has_world:
                is_cpu = not torch.cuda.is_available()
                # It is not known yet whether pipeline stages will send unbatched.
                backend = world_backend(is_cpu=is_cpu, sends_unbatched=True)
                given.arguments["backend"] = backend or given.arguments.get("backend")
            original(*given.args, **given.kwargs)
            if not self.has_world:
                outside = timedelta(seconds=self.settings.timeouts.outside)
                self.take_world(
                    self.settings.rl_safe(),
                    comms=self._comms,
                    outside_timeout=outside,
                    releases_comms=self.settings.release_comms,
                )
                self._given = GivenComms(
                    self.trainer, taken_back_by="the end of a generation", remedy="leave release_comms out"
                )
                self.trainer.add_part(self._given)
                if not self._is_actor:
                    self.meet_neighbours(stop_limit_s=self.settings.timeouts.stopped)
                self._come_to(Phase.START)
                if self.neighbours is not None:
                    self.neighbours.speak_before_sigterm()
                self.saves = PendingShards(self.trainer)
                self.trainer.add_part(self.saves)
                self._writer = ShardWriter(self.trainer.control, folders=_FOLDERS, pending=self.saves)
                # A warning, because ms-swift shows no lower log level of other packages.
                logger.warning("rl_safe active: training rank %d of %d", dist.get_rank(), dist.get_world_size())

        return init_process_group

    def waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``barrier``. A barrier over the default group runs over the store instead, and names missing ranks."""

        @functools.wraps(original)
        def barrier(group: Any = None, async_op: bool = False, *args: Any, **kwargs: Any) -> Any:
            is_worlds = group is None or group is dist.group.WORLD
            if not is_worlds or async_op or not self.has_world or self._has_ended:
                return original(group, async_op, *args, **kwargs)
            trainer = self.trainer
            if trainer.device.type == "cuda":
                torch.cuda.current_stream(trainer.device).synchronize()  # as NCCL's barrier does
            self.wait_for_all()
            return None

        return barrier

    def creating_groups(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wraps ms-swift's ``_initialize_mpu``, which creates Megatron's groups."""

        @functools.wraps(original)
        def _initialize_mpu(args: Any) -> None:
            if getattr(args, "rlhf_type", None) == _UNSUPPORTED_RLHF_TYPE:
                raise ConfigError(
                    f"--rlhf_type {args.rlhf_type} is not supported yet: remove our plugin from --external_plugins"
                )
            self._comms.generates = getattr(args, "rlhf_type", None) == "grpo" and not self._is_actor
            if self._comms.generates:
                from rl_safe_workers.adapters.swift.proved_syncs import check_proof
                from rl_safe_workers.adapters.swift.rollout_phases import install_rollout

                check_grpo(package_root("swift"))
                if self.settings.prove_sync_freq >= 0:
                    check_proved(package_root("swift"))
                    check_proof(args, every=self.settings.prove_sync_freq)
                install_rollout(self)
            if reason := why_no_async_save(args):
                raise ConfigError(reason)
            self._optimizer_replicated = not args.use_distributed_optimizer

            def initialize(create: Callable[..., None]) -> Callable[..., None]:
                def initialize_model_parallel(*sizes: Any, **more: Any) -> None:
                    self.trainer.features = features_of(args)
                    self._stage = None
                    self.create_groups(create, *sizes, **more)
                    assert self._given is not None, "made with the world"
                    self._given.check()

                return initialize_model_parallel

            with replaced(parallel_state, "initialize_model_parallel", initialize):
                original(args)

        return _initialize_mpu

    def create_own_groups(self) -> None:
        """Creates now the groups that mcore-bridge and ms-swift would create with a model or during generation."""
        from mcore_bridge.bridge import gpt_bridge

        create_ep_pp_groups(gpt_bridge, timeout=self.trainer.remaining())
        if self._comms.generates:
            self.rollout_group = create_rollout_groups(timeout=self.trainer.remaining())

    def building(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wraps the constructor of ms-swift's trainer, which builds the model and reads its weights."""

        @functools.wraps(original)
        def build(trainer: Any, *args: Any, **kwargs: Any) -> None:
            with self.outermost(Phase.CONVERT):
                original(trainer, *args, **kwargs)
                self.wait_for_all()

        return build

    def begin(self, phase: Phase) -> None:
        """Enters a phase that `finish_phase` leaves. Collective over: the training world."""
        self._step.enter_context(self.trainer.phase(phase))

    def finish_phase(self) -> None:
        """Leaves the phase that `begin` has entered."""
        self._step.close()

    def turn(self, phase: Phase) -> None:
        """Leaves the current phase of a step and enters another one. Collective over: the training world.

        Does nothing if the rank is already in ``phase``. In phases ``rollout`` and ``sync`` a rank may work or wait
        alone. So before the rank leaves them, it waits for all ranks, within the deadline of that phase.
        """
        current = self.trainer.lifecycle.current
        if current is phase:
            return
        if current in _WITH_ENGINE:
            self.wait_for_all()
        self.finish_phase()
        self.begin(phase)

    @contextmanager
    def aside(self, phase: Phase) -> Iterator[None]:
        """Enters another phase for the body, then the previous phase again. Collective over: the training world.

        If the body fails, the rank stays in the body's phase, so that `fail_with` reports that phase.
        """
        before = self.trainer.lifecycle.current
        self.turn(phase)
        yield
        if before is not None:
            self.turn(before)

    def wait_for_all(self) -> None:
        """Waits for all ranks, until the phase's deadline or, outside of phases, for ``timeouts.outside``.

        Collective over: the training world, by the store.

        Raises:
            PhaseTimeoutError: If a rank does not come in time; names it.
        """
        in_phase = self.trainer.lifecycle.current is not None
        self.trainer.control.barrier(self.phase_name(), self.trainer.deadline if in_phase else self._outside())

    def _outside(self) -> Deadline:
        """Returns the deadline of a wait outside of phases that begins now."""
        return Deadline.after(timedelta(seconds=self.settings.timeouts.outside))

    def phase_name(self) -> str:
        """Returns the name of the phase that this rank is in."""
        return str(self.trainer.lifecycle.current or OUTSIDE)

    def engine_deadline(self) -> Deadline:
        """Returns the deadline for an engine. It is shortly before the other ranks stop waiting for this rank."""
        if self.trainer.lifecycle.current is None:
            return self._outside()
        return Deadline(time.monotonic(), self.trainer.deadline.plus(-_HEARD).at_s)

    @contextmanager
    def engines_groups(self) -> Iterator[None]:
        """Marks the process groups that the body creates as groups of a vLLM engine in this process.

        No bootstrap connects them, and no release touches them.
        """
        before = set(torch_groups.registered_groups())
        yield
        world = self.trainer.world
        self.trainer.world = replace(world, host_groups=frozenset(torch_groups.registered_groups()) - before)

    def give_comms(self) -> None:
        """Gives the communicators' memory to an engine, if the settings say so. Collective over: the training world."""
        assert self._given is not None, "made with the world"
        with self.outermost(Phase.ROLLOUT):
            self._given.give(Phase.ROLLOUT)

    @property
    def given_bytes(self) -> int:
        """Bytes of device memory that this rank's communicators have last given to the engine."""
        return 0 if self._given is None else self._given.freed_bytes

    def take_back_comms(self) -> None:
        """Takes the communicators' memory back. Collective over: the training world. Idempotent."""
        assert self._given is not None, "made with the world"
        self._given.take_back()

    def end(self, failure: str | None = None) -> dict[int, str]:
        """Ends the groups as `HostedTrainer.end`, including an engine's groups."""
        if self.has_world:
            self.trainer.world = replace(self.trainer.world, host_groups=frozenset())
        return super().end(failure)

    def saving_checkpoint(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wraps the trainer's ``save_checkpoint``."""

        @functools.wraps(original)
        def save_checkpoint(trainer: Any) -> None:
            # With merged weights, ms-swift copies the tracker before the save ends.
            at_once = _merges_adapters(trainer.args)
            with (
                self.saving(optimizer_replicated=self._optimizer_replicated),
                self.tracker_last(at_once=at_once),
            ):
                original(trainer)

        return save_checkpoint

    @contextmanager
    def tracker_last(self, *, at_once: bool = False) -> Iterator[None]:
        """Writes the tracker of a save durably, and only once the save is complete.

        ms-swift writes it as soon as the save has begun (megatron_lm_utils.py:378-384).

        Args:
            at_once: Whether to write the tracker as soon as the shards are complete. Otherwise it is written after the
                body, which may also write HF weights. A save in the background ignores this argument.
        """
        from megatron.core import msc_utils

        held: list[Callable[[], None]] = []

        def write(folder: Path, step: int) -> None:
            writing = functools.partial(write_tracker, folder, step)
            pending = None if self.saves is None else self.saves.current
            if pending is not None:
                pending.add_finalize_fn(writing)
            elif at_once:
                writing()
            else:
                held.append(writing)

        def deferring(original: Callable[..., Any]) -> Callable[..., Any]:
            def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
                if Path(path).name != TRACKER or mode != "w":
                    return original(path, mode, *args, **kwargs)
                return _Tracker(functools.partial(write, Path(path).parent))

            return open_file

        # megatron-core 0.19 lacks the name. ms-swift then uses Python's ``open``.
        with replaced(msc_utils, "open_file", deferring, absent=open):
            yield
        for writing in held:
            writing()

    def exporting(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wraps ``MegatronExport.run``: makes it phase ``convert``, makes the export atomic, and ends the job."""

        @functools.wraps(original)
        def run(pipeline: Any) -> None:
            with (
                self.trainer.phase(Phase.CONVERT),
                # An export to HF writes no shards, so no rank waits in our saver.
                self.written("export", optimizer_replicated=True) if pipeline.args.to_mcore else nullcontext(),
                self.tracker_last(at_once=True),  # the whole export is published at its end
                exported(self, pipeline.args),
            ):
                original(pipeline)
            self.leave()

        return run

    def training(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wraps ``MegatronSft.run``, to end the groups in agreement. ms-swift would destroy them without one."""

        @functools.wraps(original)
        def run(pipeline: Any) -> Any:
            with replaced(dist, "destroy_process_group", _leaving_the_world):
                result = original(pipeline)
            self.leave()
            return result

        return run

    def looping(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wraps the trainer's ``train``, to report a failure at once, before ms-swift draws its plots."""

        @functools.wraps(original)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(trainer, *args, **kwargs)
            except BaseException as error:
                self.fail_with(error)
                raise
            self._come_to(Phase.TEARDOWN)

        return train

    def _come_to(self, stage: Phase) -> None:
        self._stage = stage
        self.notes.note(stage)

    def fail_with(self, error: BaseException) -> None:
        """Ends this rank's part of the job after a failure: tells the other ranks, and logs where the failure began.

        Not collective. `HostedTrainer.end_failed` says how long it takes. It logs its own errors. In Ray mode the
        driver ends the other ranks, and says where the failure began.
        """
        if self._has_ended:
            return
        self._has_ended = True
        with self.speaking():
            if self.has_world:
                self._fail_with(error)
            elif isinstance(error, Exception):
                leave_early(error, Phase.START)

    def _fail_with(self, error: BaseException) -> None:
        trainer = self.trainer
        phase = trainer.lifecycle.current or trainer.lifecycle.last_failed or self._stage or OUTSIDE
        try:
            self._step.__exit__(type(error), error, error.__traceback__)
        except Exception as lost:
            logger.warning("training rank %d: leaving phase %s: %s", trainer.training_rank, phase, in_one_line(lost))
        if self._is_actor:
            if isinstance(error, Exception):
                self.notes.failed(phase, error)
            return
        self.end_failed(error, phase)


def why_no_async_save(args: Any) -> str:
    """Returns the reason why a job cannot save in the background; empty if it can, or if it does not ask for it.

    Args:
        args: ms-swift's ``MegatronArguments``.
    """
    if not (getattr(args, "async_save", False) and _merges_adapters(args)):
        return ""
    return (
        "--async_save with --merge_lora is not supported: ms-swift copies the tracker file before the save is complete "
        "(megatron/trainers/base.py:881); leave out --async_save, or set --merge_lora false"
    )


def _merges_adapters(args: Any) -> bool:
    """Returns True if a save also writes weights into which the adapters are merged."""
    return getattr(args, "tuner_type", "full") != "full" and bool(getattr(args, "merge_lora", None))


def _leaving_the_world(original: Callable[..., None]) -> Callable[..., None]:
    """Returns a ``destroy_process_group`` that skips the default group, because `HostedTrainer.leave` ends it."""

    def destroy_process_group(group: Any = None) -> None:
        if group is not None:
            original(group)

    return destroy_process_group


class _Tracker(io.StringIO):
    """Replaces the tracker file, to which ms-swift writes the number of a step."""

    def __init__(self, write: Callable[[int], None]) -> None:
        """Holds the number until the file is closed. A file that is closed empty is not written.

        Args:
            write: Takes the step and writes the tracker file, at once or later.
        """
        super().__init__()
        self._write = write

    def close(self) -> None:
        if not self.closed and (step := self.getvalue()):
            self._write(int(step))
        super().close()
