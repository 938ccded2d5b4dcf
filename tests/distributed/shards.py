"""Small states in Megatron's sharded form, saved and loaded by ranks that share a store and nothing else."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from rl_safe_workers.checkpoint.folders.manifest import SHARDS, Manifest, step_dir
from rl_safe_workers.checkpoint.folders.publish import pending_path
from rl_safe_workers.checkpoint.folders.retention import commit, start_save
from rl_safe_workers.checkpoint.load.loader import Loader
from rl_safe_workers.checkpoint.save.save_plan import Replicas
from rl_safe_workers.checkpoint.save.saver import Saver
from rl_safe_workers.checkpoint.save.writer import WrittenFile, file_records
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.worker import control_plane

SIZE, EP, EXPERT_DP = 4, 2, 2
EXPERTS, LAYERS = 8, 2


def state_of(rank: int, *, step: int = 0, ep: int = EP, size: int = SIZE, hidden: int = 8) -> dict[str, Any]:
    """A rank's state at a step: experts, a replicated matrix, a tensor cut by rank, objects and common state."""
    state: dict[str, Any] = {"iteration": step, "args": {"lr": 0.5, "names": ["a", "b"]}}
    local = EXPERTS // ep
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}.mlp.experts.experts."
        # Megatron makes two sharded tensors of a gated matrix.
        for matrix, halves in {"linear_fc1": 2, "linear_fc2": 1}.items():
            for expert in range(rank % ep * local, (rank % ep + 1) * local):
                data = torch.arange(float(hidden * hidden)).view(hidden, hidden) + 1000 * expert + 7 * layer + step
                for half in range(halves):
                    state[f"{prefix}{expert}.{matrix}.{half}"] = ShardedTensor.from_rank_offsets(
                        f"{prefix}{matrix}.weight",
                        data + 100 * half,
                        (0, expert, EXPERTS),
                        (1, half, halves),
                        replica_id=(0, 0, rank // ep),
                        prepend_axis_num=1,
                    )
                state[f"{prefix}{expert}.{matrix}.extra"] = ShardedObject(
                    f"{prefix}{matrix}._extra_state", None, (EXPERTS,), (expert,), (0, 0, rank // ep)
                )
    replicated = torch.full((64, hidden), float(step))
    state["embedding"] = ShardedTensor.from_rank_offsets("embedding", replicated, replica_id=(0, 0, rank))
    mine = torch.full((3, hidden), float(10 * rank + step))
    state["cut"] = ShardedTensor.from_rank_offsets("cut", mine, (0, rank, size))
    state["object"] = ShardedObject("object", {"rank": rank, "step": step}, (size,), (rank,))
    return state


class Saving:
    """A rank's saver and loader, without a worker around them."""

    def __init__(self, rank: int, address: StoreAddress, *, timeout_s: float = 20.0, size: int = SIZE) -> None:
        self.rank, self.timeout = rank, timedelta(seconds=timeout_s)
        self.control = control_plane(address, rank=rank, size=size)
        self.store = self.control.store
        if not dist.is_initialized():
            prefix = dist.PrefixStore("world", self.store)
            dist.init_process_group("gloo", store=prefix, rank=rank, world_size=size, timeout=timedelta(seconds=20))
        replicas = Replicas(dense=size, expert=EXPERT_DP)
        self.saver, self.loader = Saver(self.control, replicas=replicas), Loader(self.control)

    def save(
        self, state: dict[str, Any], root: Path, *, step: int, background: bool = False, finish: bool = True
    ) -> str | None:
        """Saves under ``root``, as a checkpoint with a manifest."""
        pending = pending_path(step_dir(root, step))
        self.saver.begin(
            state,
            pending / SHARDS,
            content_metadata={},
            prepare=lambda: start_save(root, step),
            commit=lambda files, notes: str(commit(pending, manifest_of(pending, files, step), durable=files)),
            timeout=self.timeout,
            background=background,
        )
        return self.saver.finish(self.timeout) if finish else None

    def load(self, state: dict[str, Any], path: Path, *, strict: bool = True) -> dict[str, Any]:
        """Loads from a checkpoint with a manifest."""
        return self.loader.load(lambda: state, path / SHARDS, timeout=self.timeout, strict=strict)


def manifest_of(pending: Path, files: Mapping[str, WrittenFile], step: int, notes: Sequence[str] = ()) -> Manifest:
    """The least that a manifest needs."""
    return Manifest(
        step=step,
        model_fingerprint="tiny",
        layout={},
        saved_at=time.time(),
        versions={},
        files=file_records(pending, files),
        driver_state={},
        digests={},
    )


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    """The same state without its values, to be loaded into."""
    for value in state.values():
        if isinstance(value, ShardedTensor):
            value.data = torch.full_like(value.data, -1)
        elif isinstance(value, ShardedObject):
            value.data = None
    return state


def differences(loaded: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Keys whose loaded value is not bit for bit the wanted one."""
    found = []
    for key, value in wanted.items():
        if isinstance(value, ShardedTensor):
            same = torch.equal(loaded[key], value.data)
        else:
            same = loaded[key] == (value.data if isinstance(value, ShardedObject) else value)
        found += [] if same else [key]
    return found
