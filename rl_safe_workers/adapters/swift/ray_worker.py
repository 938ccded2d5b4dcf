"""ms-swift's training worker of Ray mode with our phases, a Ray actor. Importing this imports ms-swift."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import ray
from swift.ray.megatron.megatron_worker import MegatronWorker
from swift.ray.megatron.worker_group import dispatch_collect

from rl_safe_workers import env
from rl_safe_workers.adapters.patches import replaced
from rl_safe_workers.adapters.rank_answers import listen
from rl_safe_workers.adapters.swift import install
from rl_safe_workers.adapters.swift.proved_syncs import exporting
from rl_safe_workers.adapters.swift.ray_waits import RayStandIn
from rl_safe_workers.adapters.swift.silent_engine import silent_engine
from rl_safe_workers.adapters.swift.swift_settings import VARIABLE
from rl_safe_workers.compat.param_gathers import complete_param_gathers
from rl_safe_workers.errors import RolloutError, in_one_line
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.reaping.processes import private_socket_folder
from rl_safe_workers.rollout.sync_proof import SentWeights

WORK: dict[str, Phase | None] = {
    "setup": None,
    "train_step": None,  # ms-swift's callbacks enter its phases
    "compute_logps": Phase.LOGPROB,
    "compute_ref_logps": Phase.LOGPROB,
    "compute_teacher_logps": Phase.LOGPROB,
    "compute_teacher_logits": Phase.LOGPROB,
    "init_teacher_model": Phase.CONVERT,
    "update_weights": Phase.SYNC,
    "send_checkpoint_weights": Phase.SYNC,
    "prepare_checkpoint_engine": None,
    "init_checkpoint_process_group": None,
    "finalize_checkpoint_engine": None,
    "merge_lora": None,
    "unmerge_lora": None,
    "finalize_generation": None,
    "offload_to_cpu": None,
    "reload_to_gpu": None,
}
"""The phase of each method that ms-swift's driver calls; None if it enters no phase, or enters phases by itself. These
methods report a failure to the other ranks at once."""


class SafeMegatronWorker(MegatronWorker):
    """ms-swift's worker. Its methods enter phases, and tell the other ranks of a failure."""

    def init_actor(self, *args: Any, rl_safe: str, **kwargs: Any) -> None:
        """Builds the model as ms-swift does. On every rank, ms-swift's arguments import our plugin.

        Args:
            *args: ms-swift's arguments.
            rl_safe: Our settings as JSON, because an actor on another node does not have the driver's environment.
            **kwargs: ms-swift's keyword arguments.
        """
        os.environ[VARIABLE] = rl_safe
        listen()
        install.in_actor()
        _mend_transfers()
        with _told():
            super().init_actor(*args, **kwargs)

    def _init_trainable(self) -> None:
        """Builds the trainer and its parts, in phase ``convert``."""
        with install.job().outermost(Phase.CONVERT):
            super()._init_trainable()

    @dispatch_collect(dispatch="broadcast", collect="first")
    def give_comms(self) -> None:
        """Gives the communicators' memory to an engine that is about to need it, if the settings say so."""
        with _told():
            install.job().give_comms()

    def rl_safe_prove(self) -> None:
        """Begins to take digests of the weights in the next sync."""
        install.job().prove_sync()

    def rl_safe_sent(self) -> SentWeights:
        """Returns the digests taken since `rl_safe_prove`, and stops taking them."""
        found: SentWeights = install.job().sent_weights()
        return found

    @dispatch_collect(dispatch="broadcast", collect="first")
    def finalize(self) -> Any:
        """Ends the training as ms-swift does, then ends the groups in agreement with all ranks."""
        with _told():
            found = super().finalize()
            install.job().leave()
        return found


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if (job := install.job()) is not None:
            job.fail_with(error)
        raise


def _safe(name: str, phase: Phase | None) -> Callable[..., Any]:
    original = getattr(MegatronWorker, name)

    def call(worker: Any, *args: Any, **kwargs: Any) -> Any:
        job = install.job()
        with _told():
            if name == "offload_to_cpu":
                job.trainer.comms.require("offload")
            elif name == "reload_to_gpu":
                job.take_back_comms()
            with nullcontext() if phase is None else job.trainer.phase(phase), _parameters(worker, name), _sent(worker):
                return original(worker, *args, **kwargs)

    # Keep ms-swift's attributes, which say how to call the method. Keep its name, because Ray finds the method by it.
    call.__dict__.update(vars(original))
    call.__name__, call.__qualname__, call.__doc__ = name, f"{SafeMegatronWorker.__name__}.{name}", original.__doc__
    return call


for _name, _phase in WORK.items():
    if hasattr(MegatronWorker, _name):
        setattr(SafeMegatronWorker, _name, _safe(_name, _phase))


@contextmanager
def _parameters(worker: Any, method: str) -> Iterator[None]:
    """Loads the parameters back to the device for an export of weights, and completes their gathers.

    ms-swift 4.6.0 offloads the parameters first (checkpoint_engine/manager.py:79), then exports from the freed memory.
    """
    from swift.megatron.trainers import utils

    models = worker._megatron.wrapped_models if method == "update_weights" else []
    if all(buffer.param_data.untyped_storage().size() for buffer in _parameter_buffers(models)):
        complete_param_gathers(models)
        yield
        return
    utils.load_megatron_model_to_gpu(models, load_grad=False)
    complete_param_gathers(models)
    yield
    utils.offload_megatron_model_to_cpu(models)


def _sent(worker: Any) -> AbstractContextManager[None]:
    """Takes digests of the weights that the body exports, if a proof of them has been announced."""
    job = install.job()
    if job.digests is None:
        return nullcontext()
    return replaced(worker._megatron.bridge, "export_weights", exporting(job))


def _parameter_buffers(models: list[Any]) -> Iterator[Any]:
    """Yields the buffers of Megatron's distributed optimizer, which hold the parameters."""
    for model in models:
        for name in ("buffers", "expert_parallel_buffers"):
            found = getattr(model, name, None)
            yield from (one for one in found if one.param_data is not None) if isinstance(found, list) else ()


def _mend_transfers() -> None:
    """Puts deadlines on this process's waits for an engine, and gives each transfer a socket with a unique name.

    ms-swift has no deadline, or one of ten minutes. Its sockets have the same names in all jobs on a machine
    (rollout/adapter.py:34). So two jobs on a machine hang, or an engine gets the other job's weights. Our sockets are
    in a folder that is removed with the job.
    """
    from swift.ray.megatron.rollout import adapter
    from swift.ray.megatron.rollout.weight_transfer import BucketedWeightSender

    run_id = env.run_id()
    assert run_id is not None, "the driver marks its actors"
    make = adapter.RolloutAdapter.__init__

    @functools.wraps(make)
    def make_own(one: Any, *args: Any, **kwargs: Any) -> None:
        make(one, *args, **kwargs)
        # Each transfer tells the engine the name.
        one.zmq_handle = f"ipc://{private_socket_folder(run_id) / uuid.uuid4().hex}"

    original = BucketedWeightSender.__init__

    @functools.wraps(original)
    def init(sender: Any, *args: Any, **kwargs: Any) -> None:
        original(sender, *args, **kwargs)
        sender.timeout_ms = min(
            sender.timeout_ms, int(1e3 * install.job().engine_deadline().remaining().total_seconds())
        )

    update = adapter.RolloutAdapter.update_weights

    @functools.wraps(update)
    def update_weights(one: Any, *args: Any, **kwargs: Any) -> None:
        import zmq

        patience = install.job().engine_deadline()
        try:
            update(one, *args, **kwargs)
        except zmq.Again:
            engine = f"the vLLM engine of rollout replica {one.replica_rank}"
            rank_id = RankId(Role.ROLLOUT, one.replica_rank)
            raise silent_engine(engine, install.job().phase_name(), patience, rank_id) from None

    adapter.RolloutAdapter.__init__ = make_own
    BucketedWeightSender.__init__ = init
    adapter.RolloutAdapter.update_weights = update_weights
    adapter.ray = _PatientRay()


class _PatientRay(RayStandIn):
    """Puts deadlines on a worker's waits for its engine."""

    def get(self, reference: Any) -> Any:
        """Calls ``ray.get`` within the time left in the phase. The error's first line quotes the engine's error."""
        patience = install.job().engine_deadline()
        try:
            return ray.get(reference, timeout=patience.remaining().total_seconds())
        except ray.exceptions.GetTimeoutError:
            raise silent_engine("the vLLM engine of this rank", install.job().phase_name(), patience) from None
        except ray.exceptions.RayTaskError as error:
            raise RolloutError(f"the vLLM engine of this rank failed: {in_one_line(error.cause)}") from error
