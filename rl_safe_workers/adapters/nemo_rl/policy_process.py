"""One policy worker of NeMo RL's, with its place in the training world, from set-up to the end.

NeMo RL creates one default group for each worker group. So the policy's default group contains only trainers
(worker_groups.py:474), and this module adopts it as the training world. Megatron-Bridge makes Megatron's groups, up to
twice: for the import of HF weights, and for training.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.adapters.hosting import HostedTrainer, limited_world
from rl_safe_workers.adapters.nemo_rl.bridge_features import features_of
from rl_safe_workers.adapters.nemo_rl.bridge_saves import BridgeSaves
from rl_safe_workers.adapters.nemo_rl.conversion import convert, is_from_hf
from rl_safe_workers.adapters.nemo_rl.import_groups import end_groups_since, groups_now
from rl_safe_workers.adapters.nemo_rl.joint_refit import JointRefit
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NemoRlSettings
from rl_safe_workers.adapters.nemo_rl.refit_places import awaited_rollout
from rl_safe_workers.adapters.patches import replaced
from rl_safe_workers.adapters.rank_answers import leave_early
from rl_safe_workers.adapters.save_queue import SaveQueue
from rl_safe_workers.adapters.shards import ShardWriter
from rl_safe_workers.adapters.weight_update import WeightUpdate
from rl_safe_workers.comms.bootstrap import HostGroups
from rl_safe_workers.compat.param_gathers import complete_param_gathers
from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.control.bounded import within
from rl_safe_workers.errors import CommunicatorError, in_one_line
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.setting_names import timeout_setting
from rl_safe_workers.topology.groups import OpClass
from rl_safe_workers.workers.communicators import HostComms
from rl_safe_workers.worlds.training_world import set_group_timeouts

logger = logging.getLogger(__name__)

_STARTS_QUEUE = "initialize_async_checkpoint_worker"
"""Method of Bridge's ``GlobalState``. ``setup_model_and_optimizer`` calls it if NeMo RL has ``async_save``."""


class NemoRlComms(HostComms):
    """The collectives that NeMo RL issues in addition to Megatron's."""

    missing_groups = "NeMo RL has not made Megatron's groups by initialize_model_parallel()"
    makes_groups = True

    def groups(self) -> HostGroups:
        """Returns the groups on which NeMo RL issues collectives, with the op classes that it adds to Megatron's."""
        return [
            # Counts of tokens and metrics: megatron_policy_worker.py:788, 1571; models/megatron/train.py:856.
            (parallel_state.get_data_parallel_group(), "dp", (OpClass.REDUCE,)),
            # Success of an update, and the largest gradient norm: megatron_policy_worker.py:965, 1645.
            (parallel_state.get_model_parallel_group(), "mp", (OpClass.REDUCE,)),
            # all_gather_object, to learn which rank has an object: models/megatron/pipeline_parallel.py:55.
            (parallel_state.get_pipeline_model_parallel_group(), "pp", (OpClass.GATHER_SCATTER,)),
        ]

    def unlimited(self, megatron: MegatronConfig) -> Collection[str]:
        """Returns the pipeline group if there are stages: an export broadcasts each weight over it.

        Bridge does so in models/conversion/param_mapping.py:431, at each refit.
        """
        return ("pp",) if megatron.pipeline_model_parallel_size > 1 else ()


class PolicyProcess(HostedTrainer):
    """The trainer behind our worker. It has the world, groups, bootstrap, phases with deadlines, saves and teardown.

    Attributes:
        import_groups: Number of groups of the import that this rank has ended.
        distributed_optimizer: Whether the optimizer's state is sharded over data-parallel ranks.
        saves: The save in the background; None until the world exists.
        joint_refit: Sends refits over our joint group; None if they go NeMo RL's way.
    """

    def __init__(self, settings: NemoRlSettings) -> None:
        """Records the settings, and does nothing else."""
        self.settings = settings
        self.import_groups = 0
        self._importing = False
        self._offloading = False
        self._stage = Phase.START
        """The phase to report if the constructor fails outside of the lifecycle's phases."""
        self.distributed_optimizer = True
        self.saves: BridgeSaves | None = None
        self.joint_refit: JointRefit | None = None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Enters phase ``train``, then records the memory. Does nothing inside another phase."""
        with self.outermost(Phase.TRAIN):
            yield
        if self.trainer.lifecycle.current is None:
            self.trainer.memory.step()

    @contextmanager
    def setting_up(self, host: Any, config: Mapping[str, Any], *, workers: int | None) -> Iterator[None]:
        """Replaces functions while the body runs the host's constructor, so that it makes groups and converts our way.

        Args:
            host: The module in which the constructor looks up names.
            config: NeMo RL's node ``policy``.
            workers: Number of policy workers; None if unknown.
        """
        with ExitStack() as stack:
            stages = config["megatron_cfg"].get("pipeline_model_parallel_size", 1)
            world = functools.partial(self._setting_up_world, workers=workers, stages=stages)
            stack.enter_context(replaced(host, "setup_distributed", world))
            stack.enter_context(replaced(host, "handle_model_import", lambda f: self._importing_model(f)))
            stack.enter_context(replaced(host, "setup_model_and_optimizer", lambda f: self._building(f)))
            stack.enter_context(replaced(parallel_state, "initialize_model_parallel", self._creating_groups))
            try:
                yield
                self.trainer.comms.require("the end of set-up")
            except Exception as error:
                # For an error in a constructor, NeMo RL passes on only the error's text.
                leave_early(error, self._stage)
                # Without this, the other ranks would wait for this rank in their next collective.
                self.end(in_one_line(error))
                raise
        # A warning, because NeMo RL shows no lower log level of other packages.
        logger.warning("rl_safe active: training rank %d of %d", self.trainer.training_rank, self.trainer.training_size)

    def _setting_up_world(
        self, original: Callable[[], None], *, workers: int | None, stages: int
    ) -> Callable[[], None]:
        timeout = timedelta(seconds=self.settings.timeouts.world)

        def setup_distributed() -> None:
            # NeMo RL passes no timeout (models/megatron/setup.py:321), and Bridge does not use its own if a group
            # exists (training/initialize.py:704).
            def with_timeout(init: Callable[..., None]) -> Callable[..., None]:
                return lambda *args, **kwargs: init(*args, **{**kwargs, "timeout": timeout})

            with (
                limited_world(self.settings.bootstrap, stages=stages),
                replaced(dist, "init_process_group", with_timeout),
            ):
                original()
            self._take_world(workers)

        return setup_distributed

    def _take_world(self, workers: int | None) -> None:
        size = dist.get_world_size()
        if workers is not None and size != workers:
            raise CommunicatorError(
                f"the default group has {size} ranks, but the policy has {workers} workers: saves and Megatron's "
                "groups would wait for the other ranks; this adapter needs a default group of policy workers only"
            )
        self.take_world(self.settings.rl_safe(), comms=NemoRlComms(), outside_timeout=self._outside_timeout)
        self.saves = BridgeSaves(self.trainer)
        self.trainer.add_part(self.saves)
        self._writer = ShardWriter(self.trainer.control, folders=3, pending=self.saves)

    def _importing_model(self, original: Callable[..., None]) -> Callable[..., None]:
        def handle_model_import(
            config: Mapping[str, Any],
            hf_model_name: str,
            pretrained_path: str,
            pt_checkpoint_exists: bool,
            **hooks: Any,
        ) -> None:
            if not is_from_hf(config):
                original(config, hf_model_name, pretrained_path, pt_checkpoint_exists, **hooks)
                return

            def run_import(path: str, exists: bool) -> None:
                original(config, hf_model_name, path, exists, **hooks)

            force = bool(config["megatron_cfg"].get("force_reconvert_from_hf", False))
            with self._in_import():
                convert(self, run_import, pretrained_path, force=force)

        return handle_model_import

    @contextmanager
    def _in_import(self) -> Iterator[None]:
        """Gives the body the deadline of phase ``convert``. Collective over: the training world.

        This is not a phase of the lifecycle: it runs before the groups of training exist, with its own groups.
        """
        self._stage = Phase.CONVERT
        self.trainer.meet(Phase.CONVERT)
        before, self._importing = groups_now(), True
        try:
            with self.written("conversion", optimizer_replicated=True):
                yield
            self.import_groups = end_groups_since(before, timeout=self.trainer.remaining())
        finally:
            self._importing = False
        set_group_timeouts(self._outside_timeout)
        self._stage = Phase.START

    def _building(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def setup_model_and_optimizer(policy_cfg: Any, megatron_cfg: Any, *args: Any, **kwargs: Any) -> Any:
            if self.trainer.features is None:
                self.trainer.features = features_of(megatron_cfg)
                self.distributed_optimizer = self.trainer.features.distributed_optimizer
            # This only corrects NeMo RL's logs. `ShardWriter` decides how a save is done.
            megatron_cfg.checkpoint.fully_parallel_save = False
            state = getattr(sys.modules[original.__module__], "GlobalState", None)
            with nullcontext() if state is None else replaced(state, _STARTS_QUEUE, self._starting_queue):
                return original(policy_cfg, megatron_cfg, *args, **kwargs)

        return setup_model_and_optimizer

    def _starting_queue(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Replaces the method that would start a process to write saves in the background."""

        def initialize_async_checkpoint_worker(state: Any) -> None:
            state._async_calls_queue = SaveQueue(lambda: self.saves)

        return initialize_async_checkpoint_worker

    def _creating_groups(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wraps Megatron's ``initialize_model_parallel``, which Bridge calls through its module."""

        @functools.wraps(original)  # Bridge inspects its signature (training/initialize.py:794)
        def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
            if self._importing or self.trainer.lifecycle.has_completed(Phase.BOOTSTRAP):
                kwargs["distributed_timeout_minutes"] = self.timeout_minutes(in_phase=self._importing)
                original(*args, **kwargs)
                return
            self.create_groups(original, *args, **kwargs)

        return initialize_model_parallel

    @contextmanager
    def offloading(self) -> Iterator[None]:
        """Runs the host's offload in the body, without a wait for the save in the background. Not collective.

        In its offload, the host waits for its own saver (megatron_policy_worker.py:3080, 3177), which still reads the
        parameters. Our saver has copied them to host memory.

        Raises:
            LifecycleError: If the bootstrap has not run.
        """
        self.trainer.comms.require("offload")
        outer, self._offloading = self._offloading, True  # one of the host's offloads calls the other
        try:
            yield
        finally:
            self._offloading = outer

    def finish_saves(self, finish: Callable[[], object]) -> None:
        """Waits for the save in the background, as phase ``save``. Does nothing in the body of `offloading`.

        Collective over: the training world, by the store.

        Args:
            finish: The host's own wait, which then has nothing left to do.

        Raises:
            CheckpointError: On every rank, if a rank has failed.
            PhaseTimeoutError: If ranks have not written or did not come in time; names them.
        """
        if self._offloading:
            return
        with self.trainer.phase(Phase.SAVE) if self.saves else nullcontext():
            finish()

    @property
    def _outside_timeout(self) -> timedelta:
        """Longest wait of one collective outside of phases."""
        return timedelta(seconds=self.settings.timeouts.world)

    def sync(self, send: Callable[[], Any], *, reads: Any = None) -> Any:
        """Runs a step of a refit in which all ranks take part, as phase ``sync``; returns its value.

        Collective over: the training world. A step that sends weights also waits for the rollout.

        Args:
            send: The host's step.
            reads: The model whose parameters are sent; None if the step reads no parameters. NeMo RL before PR 4086
                sends them without completing the parameter gathers that DDP has deferred.

        Raises:
            LifecycleError: If the bootstrap has not run.
            PhaseTimeoutError: If the step does not end in time. Names the ranks that did not come, or says that the
                rollout did not come.
            RunError: If another rank has failed; names it.
        """
        if self.trainer.lifecycle.current is not None:
            return send()  # the host calls one step inside another
        self.trainer.comms.require("weight sync")

        def send_whole() -> Any:
            complete_param_gathers([reads])
            return send()

        update = WeightUpdate(self.trainer, send_whole, awaited=awaited_rollout)
        with self.trainer.phase(Phase.SYNC):
            update.begin()
            return update.finish()

    def join_host(self, join: Callable[[], object]) -> None:
        """Joins the host's communicator with the rollout ranks within ``timeouts.joint``. The host has no timeout.

        Collective over: trainers and rollout ranks. The groups that torch registers meanwhile belong to the host. The
        teardown does not end them, because that would wait for rollout ranks.

        Raises:
            LifecycleError: If the bootstrap has not run.
            CommunicatorError: If joining has not ended after ``timeouts.joint``.
        """
        self.trainer.comms.require("weight sync")
        with self.trainer.lifecycle.enter(Phase.JOINT):
            patience, before = timedelta(seconds=self.settings.timeouts.joint), groups_now()
            try:
                within(join, patience, what=f"joining the rollout ranks ({timeout_setting(Phase.JOINT)})")
            finally:
                joint = groups_now() - before
                world = self.trainer.world
                self.trainer.world = replace(world, host_groups=world.host_groups | joint)
