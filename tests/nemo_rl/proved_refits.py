"""NeMo RL's own refit, over our policy worker's digests and a real vLLM engine, in one process on CPU.

The driver's code, NeMo RL's and ours, runs as it is; a call of an actor is done at once. What carries weights between
GPUs is replaced: NCCL's broadcast, and the handles of CUDA memory that a socket of ZMQ passes on.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file

from rl_safe_workers.adapters import sync_prover
from rl_safe_workers.adapters.nemo_rl import guarded_driver
from rl_safe_workers.adapters.nemo_rl.guarded_driver import GuardedDriver
from rl_safe_workers.adapters.nemo_rl.mixin import SafePolicyMixin
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NemoRlSettings
from rl_safe_workers.adapters.nemo_rl.policy_process import PolicyProcess
from rl_safe_workers.adapters.sync_prover import SyncProver
from rl_safe_workers.errors import WeightSyncError
from tests.distributed.proved_engine import SMALL_ENGINE, Weights, stepped
from tests.nemo_rl.source import SOURCE, host_code

REFIT_FILE = "nemo_rl/algorithms/grpo.py"
AT_ONCE = 10
"""Weights that arrive together."""
FAULTS = {
    "a bit": ["model.layers.0.self_attn.o_proj.weight"],
    "experts": [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)],
    "stale": ["model.layers.1.mlp.gate.weight"],
    "wire": ["model.norm.weight"],
}
"""Weights that are wrong, by the fault of `faulty_extension`."""
CLEAN, TWICE = "", ["a bit", "a bit"]


def import_without_gpus() -> None:
    """Makes NeMo RL's modules for vLLM importable where there is neither a GPU nor all of their packages."""
    sys.path.append(SOURCE)  # last, because NeMo RL also has a package named tests
    for name in ("nemo_rl.models.policy", "nemo_rl.models.generation", "nemo_rl.models.generation.vllm"):
        package = ModuleType(name)  # without what its __init__ imports
        package.__path__ = [str(Path(SOURCE) / name.replace(".", "/"))]
        sys.modules[name] = package
    for name, names in (
        ("pynvml", {}),
        ("uvicorn", {}),
        ("fastapi", {"FastAPI": object}),
        ("nemo_rl.models.generation.vllm.quantization.fp8", {"is_fp8_model": lambda config: False}),
    ):
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(names)


def _waited_for(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: asyncio.run(method(*args))


def _at_once(method: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=method)


class _HostTrainer:
    """The sending side of NeMo RL's worker."""

    weights: Weights

    def _iter_params_with_optional_kv_scales(self, kv_scales: Any = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()


class Trainer(SafePolicyMixin, _HostTrainer):
    """Our worker, without its training world."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.safe = weights, PolicyProcess(NemoRlSettings())
        self.actor = SimpleNamespace(
            rl_safe_prove=_at_once(self.rl_safe_prove), rl_safe_sent=_at_once(self.rl_safe_sent)
        )

    def sent(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.clone()) for name, tensor in self._iter_params_with_optional_kv_scales()]


class _Socket:
    """The engine's end of NeMo RL's socket: batches of weights in one buffer each, then the end."""

    def __init__(self, sent: list[tuple[str, torch.Tensor]], aligned: Callable[[int], int], end: Any) -> None:
        self._payloads = [*(_packed(sent[at : at + AT_ONCE], aligned) for at in range(0, len(sent), AT_ONCE)), end]

    def recv_pyobj(self) -> Any:
        return self._payloads.pop(0)

    def send(self, answer: bytes) -> None: ...


def _packed(weights: list[tuple[str, torch.Tensor]], aligned: Callable[[int], int]) -> Any:
    parts = []
    for _, tensor in weights:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        parts.append(torch.nn.functional.pad(flat, (0, aligned(len(flat)) - len(flat))))
    buffer = torch.cat(parts)
    return buffer, [name for name, _ in weights], len(buffer)


class Policy:
    """NeMo RL's, of one trainer."""

    def __init__(self, weights: Weights, engine: Any, backend: Any) -> None:
        self.trainer, self._engine, self._backend = Trainer(weights), engine, backend
        self.worker_group = SimpleNamespace(workers=[self.trainer.actor])

    def offload_before_refit(self) -> None: ...

    def offload_after_refit(self) -> None: ...

    def broadcast_weights_for_collective(self, kv_scales: Any = None) -> list[Any]:
        return self._give("model_update_group", self.trainer.sent())

    def stream_weights_via_ipc_zmq(self, buffer_size_bytes: int, kv_scales: Any = None) -> list[Any]:
        aligned, end = self._backend.calculate_aligned_size, self._backend.IPCProtocol.COMPLETE
        return self._give("zmq_socket", _Socket(self.trainer.sent(), aligned, end))

    def _give(self, name: str, transport: Any) -> list[Any]:
        self._engine.llm.collective_rpc(lambda wrapper: setattr(wrapper.worker, name, transport))
        return []


class _AsyncEngine:
    """The calls of vLLM's asynchronous engine, which is in another process: answers come back as plain data."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        return json.loads(json.dumps(self._engine.collective_rpc(method, args=args)))


class Generation:
    """NeMo RL's, of one engine, behind its synchronous and its asynchronous worker."""

    def __init__(self, engine: Any, async_engine: Any) -> None:
        self._engine, self._async_engine = engine, async_engine
        self.cfg = {"colocated": {"enabled": False}}
        self.worker_group = SimpleNamespace(dp_size=1, get_dp_leader_worker_idx=lambda shard: shard)
        self.calls: list[str] = []

    def colocate(self, yes: bool) -> None:
        """Chooses the case: on the trainer's GPU by the asynchronous worker, or on another by the synchronous one."""
        self.cfg["colocated"]["enabled"] = yes
        names = ("rl_safe_engine", "rl_safe_join", "rl_safe_prove", "rl_safe_held")
        actor = {
            name: _at_once(_waited_for(getattr(self._async_engine, name)) if yes else getattr(self._engine, name))
            for name in names
        }
        self.worker_group.workers = [SimpleNamespace(**actor)]

    def prepare_for_generation(self, tags: list[str]) -> None:
        self.calls.append(f"wake up {tags[0]}")

    def init_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        raise AssertionError("NeMo RL's communicator is joined")

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        self._engine.prepare_refit_info(state_dict_info)

    def finish_generation(self) -> None:
        self.calls.append("sleep")

    def update_weights_from_collective(self) -> list[bool]:
        return [self._engine.update_weights_from_collective()]

    def update_weights_via_ipc_zmq(self) -> list[bool]:
        return [_waited_for(self._async_engine.update_weights_via_ipc_zmq_async)()]

    def shutdown(self) -> None:
        self._engine.llm.llm_engine.engine_core.shutdown()


def remove_conflicts() -> None:
    """Removes a method of NeMo RL for other refits. The vLLM of these tests has one of that name."""
    from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension as Stock

    if "synchronize_device" in vars(Stock):
        del Stock.synchronize_device


def made(path: Path, extension: str, **options: Any) -> tuple[Policy, Generation]:
    """Makes both over an engine with NeMo RL's own worker of generation, whose part of vLLM's worker is given.

    Args:
        path: The model's folder.
        extension: Our part of vLLM's worker.
        **options: Further options of the engine.
    """
    from nemo_rl.models.generation.vllm import vllm_backend

    from rl_safe_workers.adapters.nemo_rl import generation_workers

    generation_workers.EXTENSION = extension
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *name: None
    vllm_backend.rebuild_cuda_tensor_from_ipc = lambda handle, device: handle
    vllm_backend.packed_broadcast_consumer = _receive
    stock = vllm_backend.VllmInternalWorkerExtension
    remove_conflicts()
    engine = object.__new__(generation_workers.SafeGenerationWorkerImpl)
    engine.cfg = {"vllm_cfg": {"async_engine": False}}
    engine._create_engine(
        {
            **SMALL_ENGINE,
            **options,
            "model": str(path),
            "load_format": "dummy",
            "worker_extension_cls": f"{stock.__module__}.{stock.__name__}",
        }
    )
    weights = load_file(path / "model.safetensors")
    engine.prepare_refit_info({name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()})
    async_engine = object.__new__(generation_workers.SafeAsyncGenerationWorkerImpl)
    async_engine.cfg, async_engine.llm = {"vllm_cfg": {"async_engine": True}}, _AsyncEngine(engine.llm)
    return Policy(weights, engine, vllm_backend), Generation(engine, async_engine)


def _receive(iterator: Any, group: Any, src: int, post_unpack_func: Callable[[Any], None]) -> None:
    assert [name for name, _ in iterator] == [name for name, _ in group]
    for at in range(0, len(group), AT_ONCE):
        post_unpack_func(group[at : at + AT_ONCE])


class Loops(ModuleType):
    """The module of NeMo RL's loops, as far as a refit goes."""

    def __init__(self, get: Callable[[Any], Any] = lambda answers: answers) -> None:
        super().__init__("loops")
        ray = SimpleNamespace(get=get)
        others = {name: type(name, (), {}) for name in ("SGLangGeneration", "MegatronGeneration")}
        names = {"ray": ray, "nullcontext": nullcontext, "os": os, **others}
        vars(self).update(host_code(REFIT_FILE, "refit_policy_generation", names=names), time=time)


class Watched(SyncProver):
    """Keeps the last metrics."""

    last: ClassVar[dict[str, float]] = {}

    def take_metrics(self) -> dict[str, float]:
        Watched.last = super().take_metrics()
        return Watched.last


@dataclass(frozen=True)
class Refit:
    """A refit, as the driver sees it."""

    weights: int
    metrics: dict[str, float]
    told: list[str]
    """Warnings of our package."""
    error: str
    calls: list[str]
    """Other calls that the engine has had."""

    @property
    def proved(self) -> float:
        return self.metrics["rl_safe/sync_proved"]

    @property
    def not_proved(self) -> float:
        return self.metrics["rl_safe/sync_not_proved"]

    @property
    def redone(self) -> float:
        return self.metrics["rl_safe/sync_redone"]


def refits(rank: int, path: Path, transports: Sequence[str]) -> dict[tuple[str, str], Refit]:
    """Does one refit for each transport and fault, and a clean one at the end of each transport's."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import_without_gpus()
    from tests.nemo_rl import faulty_extension

    torch.compiler.set_stance("force_eager")
    at_once: Any = SimpleNamespace(get=lambda answers: answers)
    sync_prover.ray = guarded_driver.ray = at_once
    guarded_driver.SyncProver = Watched  # type: ignore[misc]
    policy, generation = made(path, f"{faulty_extension.__name__}.FaultyExtension")
    loops, told, found = Loops(), [], {}
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rl_safe_workers").addHandler(handler)
    with ExitStack() as ends:
        driver = GuardedDriver(NemoRlSettings().timeouts, ends, evidence=Path("failure"), prove_sync_freq=1)
        driver.policy, driver.generation = policy, generation
        driver.guard_loops(loops)
        for transport in transports:
            colocated = transport == "ipc"
            generation.colocate(colocated)
            for faults in ([], *([fault] for fault in FAULTS), TWICE, []):
                policy.trainer.weights = stepped(policy.trainer.weights)
                faulty_extension.faults += faults
                generation.calls, told[:], error = [], [], ""
                try:
                    returned = loops.refit_policy_generation(policy, generation, colocated, _refit_buffer_size_gb=1.0)
                    assert returned in (Watched.last, None), "older versions return nothing"
                except WeightSyncError as raised:
                    error = str(raised)
                found[transport, ", ".join(faults)] = Refit(
                    len(policy.trainer.weights), Watched.last, list(told), error, generation.calls
                )
    generation.shutdown()
    return found
