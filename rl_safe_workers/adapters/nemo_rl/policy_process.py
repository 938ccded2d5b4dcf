"""One policy worker of NeMo RL's: its place in the training world, from set-up to the end.

NeMo RL creates the default group, one for each worker group, so that it holds trainers alone (worker_groups.py:474);
the training world is taken as it is found. Megatron's groups are made by Megatron-Bridge, up to twice: for the import
of HF weights, and for training.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.adapters.hosting import HostedTrainer
from rl_safe_workers.adapters.nemo_rl.bridge_features import features_of
from rl_safe_workers.adapters.nemo_rl.conversion import convert, is_from_hf
from rl_safe_workers.adapters.nemo_rl.import_groups import end_groups_since, groups_now
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NemoRlSettings
from rl_safe_workers.adapters.nemo_rl.patches import replaced
from rl_safe_workers.adapters.nemo_rl.shards import ShardWriter
from rl_safe_workers.comms.bootstrap import HostGroups
from rl_safe_workers.comms.megatron_groups import nccl_config, sizes_of_groups
from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.control.bounded import within
from rl_safe_workers.errors import CommunicatorError, RlSafeError, in_one_line
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.groups import OpClass
from rl_safe_workers.workers.communicators import HostComms
from rl_safe_workers.worlds.training_world import set_group_timeouts

logger = logging.getLogger(__name__)


class NemoRlComms(HostComms):
    """The collectives that NeMo RL issues on groups besides Megatron's own."""

    missing_groups = "NeMo RL has not made Megatron's groups by initialize_model_parallel()"
    makes_groups = True

    def groups(self) -> HostGroups:
        """Returns the groups that NeMo RL itself issues collectives on, with what Megatron does not issue there."""
        return [
            # Counts of tokens and metrics: megatron_policy_worker.py:788, 1571; models/megatron/train.py:856.
            (parallel_state.get_data_parallel_group(), "dp", (OpClass.REDUCE,)),
            # Was an update successful, and its largest gradient norm: megatron_policy_worker.py:965, 1645.
            (parallel_state.get_model_parallel_group(), "mp", (OpClass.REDUCE,)),
            # all_gather_object of who has an object: models/megatron/pipeline_parallel.py:55.
            (parallel_state.get_pipeline_model_parallel_group(), "pp", (OpClass.GATHER_SCATTER,)),
        ]


class PolicyProcess(HostedTrainer):
    """The trainer behind our worker: the world, groups, bootstrap, phases with deadlines, saves, the teardown.

    Attributes:
        import_groups: How many groups an import has made, which were ended.
    """

    def __init__(self, settings: NemoRlSettings) -> None:
        """Records the settings. Touches nothing."""
        self.settings = settings
        self.import_groups = 0
        self._importing = False
        self._distributed_optimizer = True
        self._writer: ShardWriter | None = None

    @contextmanager
    def setting_up(self, host: Any, config: Mapping[str, Any], *, workers: int | None) -> Iterator[None]:
        """Has the host's constructor make its groups and its conversion through us, in the body.

        Args:
            host: The module whose names the constructor looks up.
            config: NeMo RL's ``policy``.
            workers: How many policy workers there are; None if not known.
        """
        with ExitStack() as stack:
            stack.enter_context(replaced(host, "setup_distributed", lambda f: self._setting_up_world(f, workers)))
            stack.enter_context(replaced(host, "handle_model_import", lambda f: self._importing_model(f)))
            stack.enter_context(replaced(host, "setup_model_and_optimizer", lambda f: self._building(f)))
            stack.enter_context(replaced(parallel_state, "initialize_model_parallel", self._creating_groups))
            try:
                yield
                self.trainer.comms.require("the end of set-up")
            except Exception as error:
                # Else the others would wait for this rank in their next collective.
                self.end(in_one_line(error))
                raise
        # A warning, because NeMo RL shows nothing less of other packages.
        logger.warning("rl_safe active: training rank %d of %d", self.trainer.training_rank, self.trainer.training_size)

    def _setting_up_world(self, original: Callable[[], None], workers: int | None) -> Callable[[], None]:
        timeout = timedelta(seconds=self.settings.timeouts.world)

        def setup_distributed() -> None:
            # NeMo RL passes no timeout (models/megatron/setup.py:321), and Bridge's own is not asked where there is a
            # group (training/initialize.py:704).
            def with_timeout(init: Callable[..., None]) -> Callable[..., None]:
                return lambda *args, **kwargs: init(*args, **{**kwargs, "timeout": timeout})

            with replaced(dist, "init_process_group", with_timeout):
                original()
            self._take_world(workers)

        return setup_distributed

    def _take_world(self, workers: int | None) -> None:
        size = dist.get_world_size()
        if workers is not None and size != workers:
            raise CommunicatorError(
                f"the default group has {size} ranks and the policy {workers} workers: others are in it, for whom "
                "saves and Megatron's groups would wait; this adapter supports NeMo RL's separate worlds alone"
            )
        self.take_world(self.settings.rl_safe(), comms=NemoRlComms(), outside_timeout=self._outside_timeout)
        self._writer = ShardWriter(self.trainer.control)

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

        No phase of the lifecycle: it comes before the groups of training, with groups of its own.
        """
        self.trainer.meet(Phase.CONVERT)
        before, self._importing = groups_now(), True
        try:
            with self._written("conversion", optimizer_replicated=True):
                yield
            self.import_groups = end_groups_since(before, timeout=self.trainer.remaining())
        finally:
            self._importing = False
        set_group_timeouts(self._outside_timeout)

    def _building(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def setup_model_and_optimizer(policy_cfg: Any, megatron_cfg: Any, *args: Any, **kwargs: Any) -> Any:
            if self.trainer.features is None:
                self.trainer.features = features_of(megatron_cfg)
                self._distributed_optimizer = self.trainer.features.distributed_optimizer
            # So that its logs say what is done; what is done, `ShardWriter` decides.
            megatron_cfg.checkpoint.fully_parallel_save = False
            _refuse_stale_saves(megatron_cfg.checkpoint)
            return original(policy_cfg, megatron_cfg, *args, **kwargs)

        return setup_model_and_optimizer

    def _creating_groups(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wraps Megatron's ``initialize_model_parallel``, which Bridge calls through its module."""

        @functools.wraps(original)  # Bridge looks at its signature (training/initialize.py:794)
        def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
            if self._importing or self.trainer.lifecycle.has_completed(Phase.BOOTSTRAP):
                kwargs["distributed_timeout_minutes"] = self._minutes()
                original(*args, **kwargs)
                return
            self._create_groups(original, *args, **kwargs)

        return initialize_model_parallel

    def _create_groups(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Creates the groups of training and connects them: the device holds no model yet."""
        trainer, comms = self.trainer, self.trainer.comms
        with trainer.phase(Phase.GROUPS):
            trainer.megatron = _asked(kwargs)
            given = kwargs.get("nccl_communicator_config_path")
            comms.limits = comms.wanted_limits() if comms.has_nccl and given is None else {}
            with nccl_config(comms.limits) if comms.limits else nullcontext() as path:
                if path is not None:
                    kwargs["nccl_communicator_config_path"] = path
                kwargs["distributed_timeout_minutes"] = self._minutes()
                original(*args, **kwargs)
            trainer.megatron = sizes_of_groups()
            comms.check_memory()
        comms.plan().check_backend(dist.get_backend_config())
        comms.bootstrap()

    @property
    def _outside_timeout(self) -> timedelta:
        """Longest wait of one collective outside of phases."""
        return timedelta(seconds=self.settings.timeouts.world)

    def _minutes(self) -> float:
        # Annotated as an int; Megatron makes a timedelta of it, which takes a fraction.
        inside = self._importing or self.trainer.lifecycle.current is not None
        return (self.trainer.remaining() if inside else self._outside_timeout).total_seconds() / 60

    @contextmanager
    def outermost(self, phase: Phase) -> Iterator[None]:
        """As `phase`, for a method that the host also calls inside of another phase: nothing there."""
        with nullcontext() if self.trainer.lifecycle.current is not None else self.trainer.phase(phase):
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Phase ``save``, with what megatron-core would write written by us. Collective over: the training world."""
        replicated = not self._distributed_optimizer
        with self.trainer.phase(Phase.SAVE), self._written("training", optimizer_replicated=replicated):
            try:
                yield
            except RlSafeError:
                raise  # every rank's
            except Exception as error:
                self.fail(Phase.SAVE, error)

    @contextmanager
    def _written(self, kind: str, *, optimizer_replicated: bool) -> Iterator[None]:
        assert self._writer is not None, "made with the world"
        with self._writer.saving(kind, remaining=self.trainer.remaining, optimizer_replicated=optimizer_replicated):
            yield

    def join_host(self, join: Callable[[], object]) -> None:
        """Joins the host's communicator with the rollout ranks, which waits for them without end, in time.

        A group that torch lists since then stays the host's: to end it in the teardown would wait for rollout ranks.

        Raises:
            LifecycleError: If the bootstrap has not run.
            CommunicatorError: If it has not ended after ``timeouts.joint``.
        """
        self.trainer.comms.require("weight sync")
        with self.trainer.lifecycle.enter(Phase.JOINT):
            patience, before = timedelta(seconds=self.settings.timeouts.joint), groups_now()
            try:
                within(join, patience, what="joining the rollout ranks (rl_safe.timeouts.joint)")
            finally:
                joint = groups_now() - before
                world = self.trainer.world
                self.trainer.world = replace(world, host_groups=world.host_groups | joint)

    def tell_failure(self, error: Exception) -> None:
        """As `HostedTrainer.tell_failure`: the ranks that save wait for this rank's shards."""
        if self._writer is not None:
            self._writer.fail(error, self.trainer.remaining())

    def end(self, failure: str | None = None) -> dict[int, str]:
        """As `SafeTrainer.teardown`; nothing where there is no world yet."""
        return self.trainer.teardown(failure) if self.has_world else {}


def _asked(kwargs: Mapping[str, Any]) -> MegatronConfig:
    """The sizes that Bridge asks Megatron for."""
    tensor = kwargs.get("tensor_model_parallel_size") or 1
    return MegatronConfig(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=kwargs.get("pipeline_model_parallel_size") or 1,
        virtual_pipeline_model_parallel_size=kwargs.get("virtual_pipeline_model_parallel_size"),
        expert_model_parallel_size=kwargs.get("expert_model_parallel_size") or 1,
        expert_tensor_parallel_size=kwargs.get("expert_tensor_parallel_size") or tensor,
        context_parallel_size=kwargs.get("context_parallel_size") or 1,
        num_distributed_optimizer_instances=kwargs.get("num_distributed_optimizer_instances") or 1,
    )


def _refuse_stale_saves(checkpoint: Any) -> None:
    """Turns ``ckpt_assume_constant_structure`` off if saves are asynchronous, and says so.

    With both on, saves after the first one may repeat it, or hold old optimizer state (NeMo RL issue 3312). Both are on
    in NeMo RL's recipe for GRPO since July 2026.
    """
    if getattr(checkpoint, "async_save", False) and getattr(checkpoint, "ckpt_assume_constant_structure", False):
        checkpoint.ckpt_assume_constant_structure = False
        logger.warning(
            "async_save with ckpt_assume_constant_structure can write stale weights (NeMo RL issue 3312): the second "
            "is turned off; rl-safe audit STEP LATER_STEP compares two saves"
        )
