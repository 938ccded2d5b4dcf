"""Our mixin for NeMo RL's Megatron policy worker. NeMo RL calls its methods. The module does not import NeMo RL."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl_safe_workers.adapters.host_settings import name_host_settings
from rl_safe_workers.adapters.nemo_rl.joint_refit import JointRefit, Plan
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import SETTING, worker_settings
from rl_safe_workers.adapters.nemo_rl.policy_process import PolicyProcess
from rl_safe_workers.adapters.rank_answers import listen
from rl_safe_workers.errors import CommunicatorError, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.models.own_weights import Announced
from rl_safe_workers.rollout.sync_proof import SentWeights
from rl_safe_workers.worlds.address import StoreAddress

logger = logging.getLogger(__name__)


class SafePolicyMixin:
    """Mixin for ``MegatronPolicyWorkerImpl``. List it before that class among the bases."""

    host_module: ClassVar[str] = "nemo_rl.models.policy.workers.megatron_policy_worker"
    """The module in which the host's constructor looks up names. The module of the derived class imports it."""
    safe: PolicyProcess
    model: Any
    _announced: Announced
    """The result of the last `prepare_refit_info`."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Sets up as the host does, but with our groups, bootstrap and conversion.

        Collective over: the training world.

        Raises:
            CommunicatorError: If the default group contains other processes than the policy's workers, or if groups
                cannot be connected.
            CheckpointError: On every rank, if the conversion failed on a rank.
            PhaseTimeoutError: If a rank does not come in time; names it.
        """
        listen()
        name_host_settings(SETTING)
        self.safe = PolicyProcess(worker_settings())
        annotations = kwargs.get("worker_sharding_annotations")
        workers = None if annotations is None else int(annotations.size)
        with self.safe.setting_up(sys.modules[self.host_module], config, workers=workers):
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one update as phase ``train``. Collective over: the training world.

        Raises:
            CommunicatorError: If a collective takes memory after the bootstrap, and ``bootstrap.on_late`` is ``raise``.
            LifecycleError: If the bootstrap has not run.
            PhaseTimeoutError: If a rank does not come in time; names it.
        """
        with self.safe.updating():
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def finish_train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the optimizer step of an update that the host runs in parts, as phase ``train``; see `train`."""
        with self.safe.updating():
            return super().finish_train_step(*args, **kwargs)  # type: ignore[misc]

    def get_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one forward batch as phase ``logprob``. Collective over: the training world. Raises as `train`."""
        with self.safe.outermost(Phase.LOGPROB):
            return super().get_logprobs(*args, **kwargs)  # type: ignore[misc]

    def get_reference_policy_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one forward batch of the reference policy as phase ``logprob``, with its swaps; see `get_logprobs`."""
        with self.safe.outermost(Phase.LOGPROB):
            return super().get_reference_policy_logprobs(*args, **kwargs)  # type: ignore[misc]

    def get_topk_logits(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one forward batch for the largest logits as phase ``logprob``; see `get_logprobs`."""
        with self.safe.outermost(Phase.LOGPROB):
            return super().get_topk_logits(*args, **kwargs)  # type: ignore[misc]

    def calibrate_qkv_fp8_scales(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one forward batch for the scales of an fp8 KV cache as phase ``logprob``; see `get_logprobs`."""
        with self.safe.outermost(Phase.LOGPROB):
            return super().calibrate_qkv_fp8_scales(*args, **kwargs)  # type: ignore[misc]

    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> Any:
        """Offloads gradients and optimizer. Raises LifecycleError if the bootstrap has not run."""
        self.safe.trainer.comms.require("offload")
        return super().prepare_for_lp_inference(*args, **kwargs)  # type: ignore[misc]

    def offload_before_refit(self, *args: Any, **kwargs: Any) -> Any:
        """Offloads before a refit, without a wait for a background save. Raises LifecycleError before the bootstrap."""
        with self.safe.offloading():
            return super().offload_before_refit(*args, **kwargs)  # type: ignore[misc]

    def offload_after_refit(self, *args: Any, **kwargs: Any) -> Any:
        """Offloads after a refit, without a wait for a background save. Raises LifecycleError before the bootstrap."""
        with self.safe.offloading():
            return super().offload_after_refit(*args, **kwargs)  # type: ignore[misc]

    def init_collective(self, *args: Any, **kwargs: Any) -> None:
        """Joins the communicator within ``timeouts.joint``. Collective over: trainers and rollout ranks.

        Raises:
            LifecycleError: If the bootstrap has not run.
            CommunicatorError: If joining has not ended in time.
        """
        join = super().init_collective  # type: ignore[misc]
        self.safe.join_host(lambda: join(*args, **kwargs))

    def init_nccl_reshard_comm_group(self, *args: Any, **kwargs: Any) -> None:
        """Joins this pipeline stage's communicator with the rollout ranks; see `init_collective`."""
        join = super().init_nccl_reshard_comm_group  # type: ignore[misc]
        self.safe.join_host(lambda: join(*args, **kwargs))

    def init_collective_mcore_generation(self, *args: Any, **kwargs: Any) -> None:
        """Joins the group with Megatron's rollout ranks; see `init_collective`. The teardown leaves it to the host."""
        join = super().init_collective_mcore_generation  # type: ignore[misc]
        self.safe.join_host(lambda: join(*args, **kwargs))

    def prepare_refit_info(self, *args: Any, **kwargs: Any) -> Any:
        """Describes the weights of a refit, as phase ``sync``; see `PolicyProcess.sync`."""
        send = super().prepare_refit_info  # type: ignore[misc]
        self._announced = self.safe.sync(lambda: send(*args, **kwargs))
        return self._announced

    def rl_safe_plan_refits(self) -> Plan | None:
        """Finds out which rank sends which weight; see `JointRefit.plan`. Collective over: the training world."""
        self.safe.joint_refit = JointRefit(self.safe.trainer, self.safe.settings)
        return self.safe.joint_refit.plan(self, self._announced)

    def rl_safe_join(self, address: StoreAddress, rollout_ranks: Sequence[int], engine: Mapping[str, Any]) -> None:
        """Joins our joint group; see `JointRefit.join`. Collective over: trainers and rollout ranks."""
        assert self.safe.joint_refit is not None, "the driver has asked for the plan"
        self.safe.joint_refit.join(address, rollout_ranks=rollout_ranks, engine=engine)

    def broadcast_weights_for_collective(self, *args: Any, **kwargs: Any) -> Any:
        """Sends weights over the communicator with the rollout ranks, or over our joint group, as phase ``sync``.

        See `PolicyProcess.sync` and `JointRefit.send`.
        """
        if self.safe.joint_refit is not None:
            return self.safe.joint_refit.send()
        send = super().broadcast_weights_for_collective  # type: ignore[misc]
        return self.safe.sync(lambda: send(*args, **kwargs), reads=self.model)

    def stream_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> Any:
        """Sends weights to the rollout engine on this GPU, as phase ``sync``; see `PolicyProcess.sync`."""
        send = super().stream_weights_via_ipc_zmq  # type: ignore[misc]
        return self.safe.sync(lambda: send(*args, **kwargs), reads=self.model)

    def _iter_params_with_optional_kv_scales(self, *args: Any, **kwargs: Any) -> Any:
        weights = super()._iter_params_with_optional_kv_scales(*args, **kwargs)  # type: ignore[misc]
        digests = self.safe.digests
        return weights if digests is None else digests.passing_on_their_streams(weights)

    def prepare_nccl_reshard_refit_info(self, *args: Any, **kwargs: Any) -> Any:
        """Plans the transfer of weight shards to the rollout ranks, as phase ``sync``; see `PolicyProcess.sync`."""
        send = super().prepare_nccl_reshard_refit_info  # type: ignore[misc]
        return self.safe.sync(lambda: send(*args, **kwargs))

    def nccl_reshard_refit(self, *args: Any, **kwargs: Any) -> Any:
        """Sends weight shards to the rollout ranks, as phase ``sync``; see `PolicyProcess.sync`."""
        send = super().nccl_reshard_refit  # type: ignore[misc]
        return self.safe.sync(lambda: send(*args, **kwargs), reads=self.model)

    def init_remote_sparse_delta_baseline(self, *args: Any, **kwargs: Any) -> Any:
        """Records the baseline weights for later changes, as phase ``sync``; see `PolicyProcess.sync`."""
        send = super().init_remote_sparse_delta_baseline  # type: ignore[misc]
        return self.safe.sync(lambda: send(*args, **kwargs), reads=self.model)

    def stream_remote_sparse_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Sends changes of weights to the rollout, as phase ``sync``; see `PolicyProcess.sync`."""
        send = super().stream_remote_sparse_weights  # type: ignore[misc]
        return self.safe.sync(lambda: send(*args, **kwargs), reads=self.model)

    def swap_weights_via_reshard(self, *args: Any, **kwargs: Any) -> Any:
        """Sends weights to Megatron's rollout ranks, as phase ``sync``; see `PolicyProcess.sync`."""
        send = super().swap_weights_via_reshard  # type: ignore[misc]
        return self.safe.sync(lambda: send(*args, **kwargs), reads=self.model)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Saves as the host does, but `ShardWriter` writes the shards.

        Collective over: the training world, within ``timeouts.save``. NeMo RL's driver names the step once all workers
        have saved.

        Raises:
            CheckpointError: On every rank, if a rank cannot write.
            PhaseTimeoutError: If a rank does not arrive or write in time; names it.
        """
        with self.safe.saving(optimizer_replicated=not self.safe.distributed_optimizer):
            super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def finalize_async_save(self) -> None:
        """Waits until the save in the background is complete, on every rank. Does nothing within an offload.

        Collective over: the training world, by the store.

        Raises:
            CheckpointError: On every rank, if a rank has failed.
            PhaseTimeoutError: If a rank does not arrive or write in time; names it.
        """
        self.safe.finish_saves(super().finalize_async_save)  # type: ignore[misc]

    def rl_safe_end_groups(self) -> dict[int, str]:
        """Ends the groups, in agreement with all ranks. Idempotent. Collective over: the training world.

        Returns:
            Failures by training rank; empty if no rank has failed.
        """
        return dict(self.safe.end(None))

    def shutdown(self, failure: str | None = None) -> bool:
        """Ends the groups, in agreement with all ranks, then shuts down as the host does. Idempotent.

        Collective over: the training world. NeMo RL kills the worker `HOST_SHUTDOWN_S` after the call.

        Args:
            failure: One line about a failure here or in the driver; None if nothing has failed.

        Returns:
            True if no rank has failed and the host's shutdown succeeded.
        """
        try:
            failed = self.safe.end(failure)
        except (CommunicatorError, PhaseTimeoutError) as error:
            # The groups were aborted, so the process can end. NeMo RL kills it anyway, and would print only this error.
            logger.warning("shutdown: %s", error)
            failed = {self.safe.trainer.training_rank: str(error)}
        return bool(super().shutdown()) and not failed  # type: ignore[misc]

    def rl_safe_prove(self) -> None:
        """Begins to take digests of the weights in the next refit."""
        if self.safe.joint_refit is not None:
            self.safe.joint_refit.prove()
        else:
            self.safe.prove_sync()

    def rl_safe_sent(self) -> SentWeights:
        """Returns the digests taken since `rl_safe_prove`, and stops taking them."""
        refit = self.safe.joint_refit
        return self.safe.sent_weights() if refit is None else refit.sent

    def rl_safe_report(self) -> dict[str, float]:
        """Returns this rank's metrics of the adapter, by name. Not collective."""
        comms = self.safe.trainer.comms
        report = comms.report
        found = {"import_groups": float(self.safe.import_groups), "late": float(len(comms.late_allocations()))}
        if report is not None:
            found |= {
                "bootstrap_groups": float(report.groups),
                "bootstrap_s": report.seconds,
                "bootstrap_mib": (report.bytes or 0) / 2**20,
            }
        return found
