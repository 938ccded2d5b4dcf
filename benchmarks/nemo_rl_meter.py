"""Connects `host_meter` to NeMo RL: chooses the calls to meter, in stock runs and in ours.

Metering changes no file of a job. ``nemo_rl_start/sitecustomize.py`` calls `meter`, which waits until the modules with
the methods are imported. It imports nothing itself, because Ray starts many processes that do not need these modules.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FIRST_VLLM_PORT = "RL_SAFE_METER_VLLM_PORT"
"""Environment variable: the first port of a job's engines."""
SIDE = "RL_SAFE_METER_SIDE"
"""Environment variable: `STOCK` or `OURS`. Without it nothing is metered."""
STOCK, OURS = "stock", "ours"
JOB = "RL_SAFE_METER_JOB"
"""Environment variable: the name of the job, unique among the jobs that run at the same time on the machine."""
WORLD, TRAIN, LOGPROB, SAVE, SEND, GENERATE, REFIT = "world", "train", "logprob", "save", "send", "generate", "refit"
RECEIVE, PROVED_REFIT = "receive", "proved refit"
PATHS, IMPORT, STATE = "paths", "import", "state"
"""Names of the calls: making the default group, an update, ..., sending weights in a trainer, ..., a whole refit in the
driver, receiving weights in an engine, a refit with its proof if it is proved. In the conversion of HF weights: the
call before it, the conversion, and the middle of its save."""
DIGESTS = "digests"
"""Prefix of files beside the records, which hold a digest of each parameter after a save, by the parameter's name."""
_VISIBLE, _KEEPS_VISIBLE = "CUDA_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Environment variables. NeMo RL sets the second one for its policy workers, and for engines of several GPUs, which
these jobs do not have."""
HOST_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
_POLICY = {
    "train": TRAIN,
    "get_logprobs": LOGPROB,
    "save_checkpoint": SAVE,
    "broadcast_weights_for_collective": SEND,
    "stream_weights_via_ipc_zmq": SEND,
}


def inside(name: str) -> str:
    """Returns the name under which the host's own method is metered that a call of ours runs."""
    return f"{name} inside"


def meter() -> None:
    """Begins to meter the calls of a job, and separates the job from others on the same machine."""
    watches: dict[str, Callable[[Any], None]] = {
        HOST_WORKER: _watch_host_worker,
        "nemo_rl.models.policy.workers.base_policy_worker": lambda m: _own_socket(m.AbstractPolicyWorker),
        "nemo_rl.models.generation.vllm.vllm_backend": lambda m: _own_socket(m.VllmInternalWorkerExtension),
        "nemo_rl.algorithms.grpo": _watch_driver,
        "megatron.bridge.training.checkpointing": _watch_saves,
        "nemo_rl.distributed.virtual_cluster": _own_ports,
        "ray._private.services": _own_ray,
        "ray.actor": _watch_actors,
        "rl_safe_workers.adapters.sync_prover": _watch_prover,
    }
    if SIDE in os.environ:
        sys.meta_path.insert(0, _AfterImport(watches))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once that module is imported, for each of some modules."""

    def __init__(self, functions: dict[str, Callable[[Any], None]]) -> None:
        self._functions = functions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        function = self._functions.pop(name, None)
        spec = None if function is None else importlib.util.find_spec(name)
        if function is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _watch_host_worker(module: Any) -> None:
    from benchmarks.host_meter import watch

    see_earlier_gpus(os.environ)
    watch(module, "setup_distributed", WORLD)
    watch(module, "validate_model_paths", PATHS)
    watch(module, "handle_model_import", IMPORT)


def see_earlier_gpus(environ: MutableMapping[str, str]) -> None:
    """Shows a policy worker the GPUs before the job's own, too, which must be numbers in `_VISIBLE`.

    NeMo RL takes Ray's number of a GPU for CUDA's (megatron_policy_worker.py:441). In a job that has only GPUs 2 and 3
    the two numbers differ. Ray reads the variable before this, and CUDA after it.
    """
    visible = environ.get(_VISIBLE, "").split(",")
    if _KEEPS_VISIBLE in environ and all(map(str.isdecimal, visible)):
        environ[_VISIBLE] = ",".join(map(str, range(1 + max(map(int, visible)))))


def _watch_saves(module: Any) -> None:
    from benchmarks.host_meter import watch

    # This call comes after the folder is made and before a shard is written.
    watch(module, "_clean_metadata_for_serialization", STATE)


def _watch_actors(module: Any) -> None:
    """Watches the methods of actors before Ray makes an actor class, which keeps the methods as they are then."""
    make = module._make_actor

    @functools.wraps(make)
    def make_actor(cls: type, options: Any) -> Any:
        if cls.__name__ in _ACTORS:
            _ACTORS[cls.__name__](cls)
        return make(cls, options)

    module._make_actor = make_actor


def _watch_policy(worker: type) -> None:
    from benchmarks.host_meter import watch

    _write_digests(worker)
    for method, name in _POLICY.items():
        watch(worker, method, name)


def _watch_safe_policy(worker: type) -> None:
    """Watches our methods, and the host's methods that they run. The latter adds some 0.1 ms to a call of ours."""
    from benchmarks.host_meter import watch

    for method, name in _POLICY.items():
        # Our class inherits from the host's. So if ours overrides the method, the second class with it is the host's.
        for host in [each for each in worker.__mro__ if method in vars(each)][1:2]:
            watch(host, method, inside(name), memory=False)
    _watch_policy(worker)


def _write_digests(worker: Any) -> None:
    """Writes digests of a save's contents once it has copied them. Before, a rank may have old values in shards."""
    save = worker.save_checkpoint
    number = iter(range(10**9))

    @functools.wraps(save)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        from benchmarks.host_meter import FOLDER

        done = save(self, *args, **kwargs)
        found = {name: digest(parameter) for name, parameter in self.model.named_parameters()}
        path = Path(os.environ[FOLDER]) / f"{DIGESTS}-{next(number)}-{os.environ['RANK']}.json"
        path.write_text(json.dumps(found))
        return done

    worker.save_checkpoint = save_checkpoint


def digest(tensor: Any) -> str:
    """Returns a digest of the bytes of a tensor."""
    import torch

    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()


def _watch_generation(worker: type) -> None:
    from benchmarks.host_meter import watch

    watch(worker, "generate", GENERATE)
    for method in ("update_weights_via_ipc_zmq", "update_weights_from_collective"):
        watch(worker, method, RECEIVE)


_ACTORS: dict[str, Callable[[type], None]] = {
    "MegatronPolicyWorker": _watch_policy,
    "SafeMegatronPolicyWorker": _watch_safe_policy,
    "VllmGenerationWorker": _watch_generation,
}


def _watch_driver(module: Any) -> None:
    from benchmarks.host_meter import take_turns, watch

    watch(module, "refit_policy_generation", REFIT)

    class Step:
        """Begins a step with a refit, its first GPU work, and ends it with the update, its last."""

        refit = staticmethod(module.refit_policy_generation)
        train = module.Policy.train

    take_turns(Step, "refit", "train")
    module.refit_policy_generation = Step.refit
    module.Policy.train = Step.train


def _watch_prover(module: Any) -> None:
    from benchmarks.host_meter import watch

    watch(module.SyncProver, "sync", PROVED_REFIT, memory=False)


def _own_ray(module: Any) -> None:
    """Makes the job start its own Ray and find no other. NeMo RL would join the Ray of another job."""

    def find_gcs_addresses(*_args: Any) -> list[str]:
        import ray

        return [ray.get_runtime_context().gcs_address] if ray.is_initialized() else []

    find_gcs_addresses.cache_clear = lambda: None  # type: ignore[attr-defined]  # of Ray's own, called at its end
    module.find_gcs_addresses = find_gcs_addresses


def _own_ports(module: Any) -> None:
    """Gives the job's engines their own ports. NeMo RL uses the same ports in every job."""
    module.DEFAULT_VLLM_PORT_RANGE_LOW = int(os.environ[FIRST_VLLM_PORT])


def _own_socket(owner: Any) -> None:
    """Adds the job to the name of the socket between trainer and engine. NeMo RL names it only by the GPU."""
    address = owner.get_zmq_address

    def get_zmq_address(self: Any) -> str:
        return f"{address(self)}.{os.environ.get(JOB, '')}"

    owner.get_zmq_address = get_zmq_address
