"""Rollout engines without a model, in the place of vLLM's: they repeat the prompt, from a place that its tokens decide.

verl imports it by ``actor_rollout_ref.model.external_lib``, in the driver and in each worker. The file that
``rollout.custom.fault`` names says which call of replica 1 has no answer. ``rollout.custom.tokens`` is the length of an
answer, 8 by default. Faults of training ranks are in `faulty_training`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import ray
import torch
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from tests.diagnosis import misdeeds
from tests.verl import faulty_training

VICTIM = 1
_PHASE_OF = {"generate": "rollout"}


@ray.remote(num_cpus=0)
class _Server:
    """One engine's server."""

    def __init__(self, replica_rank: int, fault: str, tokens: int) -> None:
        self._replica_rank, self._fault, self._tokens = replica_rank, fault, tokens
        self._silent = False
        self._step = 0

    async def _reach(self, call: str) -> None:
        misdeeds.here("rollout", self._replica_rank, _PHASE_OF.get(call, "sync"), call)
        told = Path(self._fault).read_text() if self._fault and Path(self._fault).is_file() else ""
        if self._replica_rank == VICTIM and told == f"{call} {self._step}":
            self._silent = True
            Path(f"{self._fault}.since").write_text(str(time.time()))
        if self._silent:
            await asyncio.Event().wait()

    async def generate(self, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        await self._reach("generate")
        start = sum(prompt_ids) % len(prompt_ids)
        answer = list(islice(cycle(prompt_ids), start, start + self._tokens))
        return TokenOutput(
            token_ids=answer,
            log_probs=[-1.0] * len(answer),
            stop_reason="completed",
            extra_fields={"global_steps": self._step},
        )

    async def wake_up(self, tags: list[str]) -> None:
        await self._reach(f"wake_{tags[0]}")

    async def sleep(self) -> None:
        await self._reach("sleep")

    async def clear_kv_cache(self) -> None:
        await self._reach("clear_kv_cache")

    async def set_global_steps(self, step: int) -> None:
        self._step = step


class EchoReplica(RolloutReplica):
    """An engine of one rank."""

    async def launch_servers(self) -> None:
        custom = self.config.custom or {}
        fault, tokens = str(custom.get("fault", "")), int(custom.get("tokens", 8))
        server = _Server.options(name=f"echo_{self.replica_rank}").remote(self.replica_rank, fault, tokens)
        await server.clear_kv_cache.remote()  # it is up, as vLLM's is when verl goes on
        self.servers, self._server_handle, self._server_address = [server], server, f"echo_{self.replica_rank}"


class EchoAdapter(base.BaseRollout):
    """A training rank's way to the engine beside it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replica_rank = int(os.environ["RANK"])
        faulty_training.install(Path(str((self.config.custom or {}).get("fault", ""))))
        self._server: Any = None

    async def _call(self, method: str, *args: Any) -> None:
        if self._server is None:
            self._server = ray.get_actor(f"echo_{self.replica_rank}")
        await getattr(self._server, method).remote(*args)

    async def resume(self, tags: list[str]) -> None:
        await self._call("wake_up", tags)

    async def release(self) -> None:
        await self._call("sleep")

    async def update_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int = 0, **_: Any
    ) -> None:
        for _weight in weights:
            pass
        await self._call("set_global_steps", global_steps)


base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.{EchoAdapter.__name__}"
RolloutReplicaRegistry.register("vllm", lambda: EchoReplica)
