"""Refits over our joint group: two trainers over the small host, NeMo RL's own refit, and a real vLLM engine on CPU.

The last process is the driver and has the engine. It calls the trainers over sockets, as Ray would.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rl_safe_workers.adapters import sync_prover
from rl_safe_workers.adapters.nemo_rl import guarded_driver, joint_refit
from rl_safe_workers.adapters.nemo_rl.guarded_driver import GuardedDriver
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NemoRlSettings
from tests.distributed import reference
from tests.nemo_rl import proved_refits
from tests.nemo_rl.proved_refits import Loops, Watched, import_without_gpus, made
from tests.nemo_rl.test_life import start

TRAINERS, KEY = 2, b"loopback"
NORM = "model.norm.weight"


class _Answer:
    """A call under way. Ray's reference to it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self) -> Any:
        is_error, value = self._connection.recv()
        if is_error:
            raise value
        return value


class _Actor:
    """A trainer, as the driver calls it."""

    def __init__(self, path: Path) -> None:
        while not path.exists():
            threading.Event().wait(0.05)
        self._connection = Client(str(path), authkey=KEY)

    def hang_up(self) -> None:
        self._connection.close()

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **kwargs: Any) -> _Answer:
            self._connection.send((name, args, kwargs))
            return _Answer(self._connection)

        return SimpleNamespace(remote=remote)


def _get(answers: Any) -> Any:
    if isinstance(answers, list):
        return [_get(answer) for answer in answers]
    return answers.get() if isinstance(answers, _Answer) else answers


def serve(worker: Any, path: Path) -> None:
    """Does the driver's calls, one after another, until it hangs up."""
    with Listener(str(path), authkey=KEY) as listener, listener.accept() as connection:
        while True:
            try:
                name, args, kwargs = connection.recv()
            except EOFError:
                return
            try:
                connection.send((False, getattr(worker, name)(*args, **kwargs)))
            except Exception as error:
                connection.send((True, error))


class _Policy:
    """NeMo RL's, over the trainers."""

    def __init__(self, folder: Path) -> None:
        self.worker_group = SimpleNamespace(workers=[_Actor(folder / f"t{rank}") for rank in range(TRAINERS)])

    def _all(self, name: str, *args: Any) -> list[_Answer]:
        return [getattr(worker, name).remote(*args) for worker in self.worker_group.workers]

    def init_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        raise AssertionError("NeMo RL's communicator is joined")

    def prepare_refit_info(self) -> Any:
        return _get(self._all("prepare_refit_info"))[0]

    def offload_before_refit(self) -> None: ...

    def offload_after_refit(self) -> None: ...

    def broadcast_weights_for_collective(self, kv_scales: Any = None) -> list[_Answer]:
        return self._all("broadcast_weights_for_collective")


@dataclass(frozen=True)
class Refit:
    """A refit, as the driver sees it."""

    metrics: dict[str, float]
    error: str
    held: dict[str, torch.Tensor]
    """Some of the engine's parameters afterwards."""
    sent: dict[str, torch.Tensor]
    """The same weights of the trainers."""


@dataclass(frozen=True)
class Sender:
    """A trainer's side of the refits."""

    specs: list[dict[str, Any]]
    """The weights, if it told the driver."""
    share: float
    """Bytes sent, for each byte of the weights."""


def take_part(
    rank: int, port: int, config: dict[str, Any], folder: Path, options: dict[str, Any]
) -> dict[str, Refit] | Sender:
    """Trainers return what they sent; the last process returns the refits.

    Args:
        rank: Of the trainers, then of the driver.
        port: Of the trainers' default group.
        config: NeMo RL's node ``policy``.
        folder: For the trainers' sockets.
        options: Further options of the engine.
    """
    if rank == TRAINERS:
        return _drive(Path(config["model_name"]), folder, options)
    worker = start(rank, port, config, size=TRAINERS, workers=TRAINERS)
    # Megatron-Bridge's part, which the tests of Megatron-Bridge show.
    worker.megatron_bridge = worker.refit_conversion_tasks = None
    joint_refit.own_weights_of_tasks = lambda bridge, chunks, tasks, announced: worker.policy.own_hf_weights()
    worker.exported = lambda: {
        name: weight.clone() for name, weight in worker.policy.export_hf_weights() if name in HELD
    }
    plans: list[dict[str, Any]] = []
    plan = worker.rl_safe_plan_refits
    worker.rl_safe_plan_refits = lambda: plans.append(plan()) or plans[-1]
    serve(worker, folder / f"t{rank}")
    ((buckets, _),) = worker.safe.trainer.weights._buckets.values()
    whole, sent = sum(bucket.size_bytes for bucket, _ in buckets), sum(parts[-1].end for _, parts in buckets)
    return Sender([spec for found in plans if found is not None for spec in found["specs"]], sent / whole)


HELD = {NORM: "model.norm.weight", "lm_head.weight": "lm_head.weight"}
"""HF weights that the engine holds whole, by the names of its parameters."""


@contextmanager
def _flipping(engine: Any, times: int) -> Iterator[None]:
    """Flips a bit of the final norm after the next ``times`` refits."""
    (transfer,) = engine.llm.collective_rpc(lambda wrapper: wrapper.worker._rl_safe_transfer)
    finish, left = transfer.finish_weight_update, [None] * times

    def flip() -> None:
        if left:
            left.pop()
            with torch.no_grad():
                norm = dict(transfer.model.named_parameters())[NORM]
                norm.view(torch.int32)[0] ^= 1
        finish()

    transfer.finish_weight_update = flip
    try:
        yield
    finally:
        del transfer.finish_weight_update


def _held(engine: Any) -> dict[str, torch.Tensor]:
    (transfer,) = engine.llm.collective_rpc(lambda wrapper: wrapper.worker._rl_safe_transfer)
    parameters = dict(transfer.model.named_parameters())
    return {name: parameters[own].detach().clone() for name, own in HELD.items()}


def _drive(model: Path, folder: Path, options: dict[str, Any]) -> dict[str, Refit]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    import_without_gpus()
    torch.compiler.set_stance("force_eager")
    sync_prover.ray = guarded_driver.ray = SimpleNamespace(get=_get, put=lambda value: value)
    guarded_driver.SyncProver = Watched  # type: ignore[misc]
    _, generation = made(model, "tests.nemo_rl.joint_extension.SafeVllmExtension", **options)
    generation.colocate(False)
    loops = Loops(_get)
    loops.VllmGeneration = proved_refits.Generation  # type: ignore[attr-defined]
    found: dict[str, Refit] = {}
    with ExitStack() as ends:
        driver = GuardedDriver(NemoRlSettings().timeouts, ends, evidence=Path("failure"), prove_sync_freq=2, joins=True)
        driver.guard_setup(loops)
        policy = driver.making(_Policy)(folder)
        driver.generation = generation
        assert policy.init_collective("", 0, 3) + generation.init_collective("", 0, 3) == []
        generation.prepare_refit_info(policy.prepare_refit_info())
        driver.guard_loops(loops)

        def refit(name: str, flips: int = 0) -> None:
            _get(policy._all("train", reference.random_batch(rows=4)))
            error = ""
            try:
                with _flipping(generation._engine, flips) if flips else nullcontext():
                    loops.refit_policy_generation(policy, generation, False, _refit_buffer_size_gb=1.0)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            held = {} if options else _held(generation._engine)
            found[name] = Refit(Watched.last, error, held, _get(policy._all("exported"))[0])

        refit("first")
        refit("not proved")
        refit("third")
        if not options:  # the engine is in this process
            refit("fourth")
            refit("wrong once", flips=1)
            refit("sixth")
            refit("wrong twice", flips=2)
    generation._engine.rl_safe_leave()
    assert _get(policy._all("rl_safe_end_groups")) == [{}] * TRAINERS
    generation.shutdown()
    for worker in policy.worker_group.workers:
        worker.hang_up()
    return found
