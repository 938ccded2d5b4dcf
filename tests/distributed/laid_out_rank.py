"""One training rank under a parallel layout, what it holds, and how ours and Megatron's own code save and load it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from rl_safe_workers.checkpoint.load.loader import Loader
from rl_safe_workers.checkpoint.save.save_plan import Replicas
from rl_safe_workers.checkpoint.save.saver import Saver
from rl_safe_workers.checkpoint.state.optimizer_state import allocate_state, set_adam_steps
from rl_safe_workers.checkpoint.state.pieces import split
from rl_safe_workers.checkpoint.state.state import CONTENT_METADATA, restore_state, sharded_state
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.platforms import cpu
from rl_safe_workers.ranks import trainer_ids
from rl_safe_workers.trainer.policy import MegatronPolicy
from tests.distributed import reference
from tests.distributed.stock_saves import keep_results_in_process
from tests.distributed.worker import run_config

HOMOGENEOUS = {**CONTENT_METADATA, "non_homogeneous_layers": False}
DP_RESHARDABLE = {**CONTENT_METADATA, "distrib_optim_sharding_type": "dp_reshardable"}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; the rest of the world is data-parallel."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1


@dataclass(frozen=True)
class Held:
    """The values that one rank would write of each global tensor, and the steps that its Adam counted."""

    shards: list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]
    """Key, global shape, offset, data: main replicas. bf16 as fp32, which is exact."""
    steps: set[float]


TIMEOUT = timedelta(seconds=60)


def whole(ranks: Sequence[Held]) -> dict[str, np.ndarray]:
    """Global tensors by key; fails unless every element is held exactly once."""
    tensors: dict[str, np.ndarray] = {}
    times: dict[str, np.ndarray] = {}
    for key, shape, offset, data in (shard for held in ranks for shard in held.shards):
        place = tuple(slice(a, a + n) for a, n in zip(offset, data.shape, strict=True))
        tensors.setdefault(key, np.zeros(shape, np.float32))[place] = data
        times.setdefault(key, np.zeros(shape, np.int8))[place] += 1
    assert all((count == 1).all() for count in times.values())
    return tensors


def assert_equal(ranks: Sequence[Held], expected: Sequence[Held], *, steps: int = 2) -> None:
    """Fails unless both have the same tensors, bit for bit, and have taken so many steps."""
    mine, theirs = whole(ranks), whole(expected)
    assert mine.keys() == theirs.keys()
    assert [key for key in mine if not np.array_equal(mine[key], theirs[key])] == []
    assert {step for held in ranks for step in held.steps} == {step for held in expected for step in held.steps}
    assert {step for held in ranks for step in held.steps} == {steps}


def control() -> ControlPlane:
    """A place in the world, made anew for each save and load."""
    store = dist.PrefixStore("shards", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    return ControlPlane(store, world="training world", rank=rank, members=trainer_ids(range(size)), secret=bytes(32))


class Rank(MegatronPolicy):
    """One training rank under a layout, with the metadata that Megatron's own code is given."""

    def __init__(self, model: Path, layout: Layout, dtype: str = "float32") -> None:
        self.config = run_config(model, tp=layout.tp, pp=layout.pp, ep=layout.ep)
        self.config.model.dtype = dtype
        self.device = torch.device("cpu")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        self.build()

    def step(self, seed: int) -> dict[str, float]:
        """One step on a batch of all data-parallel ranks; the loss is that of all of them."""
        batch = reference.random_batch(rows=8, seed=seed)
        size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        shard = batch.select(slice(rank * 8 // size, (rank + 1) * 8 // size))
        (metrics,) = self.update_policy(shard.with_logprobs(old=shard.rollout_logprobs), mini_batch_size=len(shard))
        loss = torch.tensor(metrics["loss"])
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return {"loss": float(loss), "grad_norm": metrics["grad_norm"]}

    def step_on_anything(self) -> None:
        """One step on gradients that are the same on all ranks that share a parameter."""
        for parameter in (p for chunk in self.chunks for p in chunk.parameters()):
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        self.optimizer.step()

    def ours(self, *, is_loading: bool, **options: Any) -> dict[str, Any]:
        return sharded_state(
            self.chunks,
            self.optimizer,
            training_rank=dist.get_rank(),
            size=dist.get_world_size(),
            is_loading=is_loading,
            **options,
        )

    def stock(self, *, is_loading: bool) -> dict[str, Any]:
        """Megatron's own sharded state dict. Collective: it gathers the optimizer's state."""
        metadata = {
            **CONTENT_METADATA,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = {f"model{i}": c.module.sharded_state_dict(metadata=metadata) for i, c in enumerate(self.chunks)}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {**model, "optimizer": optimizer}

    def save(self, directory: Path, state: dict[str, Any], content_metadata: dict[str, Any] = CONTENT_METADATA) -> None:
        replicas = Replicas(
            dense=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            expert=parallel_state.get_expert_data_parallel_world_size(),
        )
        saver = Saver(control(), replicas=replicas)
        saver.begin(
            state,
            directory,
            content_metadata=content_metadata,
            prepare=lambda: directory.mkdir(parents=True),
            commit=lambda files, notes: None,
            timeout=TIMEOUT,
            background=False,
        )
        saver.finish(TIMEOUT)

    def save_with_stock(self, directory: Path, state: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            directory.mkdir(parents=True)
        dist.barrier()
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        dist_checkpointing.save(state, str(directory), sharded_strategy=strategy, content_metadata=CONTENT_METADATA)

    def load(self, directory: Path, **options: Any) -> None:
        loader = Loader(control())
        loader.load(
            lambda: self.ours(is_loading=True, **options),
            directory,
            timeout=TIMEOUT,
            restore=lambda loaded: restore_state(self.chunks, self.optimizer, loaded),
        )

    def load_with_stock(self, directory: Path) -> Held:
        """Returns the values that Megatron's own code reads."""
        allocate_state(self.optimizer)
        loaded = dist_checkpointing.load(self.stock(is_loading=True), str(directory))
        for index, chunk in enumerate(self.chunks):
            chunk.load_state_dict(loaded[f"model{index}"])
        for index, part in enumerate(self.optimizer.chained_optimizers):
            # The load of the whole looks among the tensors for the step of torch's Adam (distrib_optimizer.py:944).
            for state in part.optimizer.state.values():
                del state["step"]
            part.load_parameter_state_from_fully_reshardable(loaded["optimizer"][index]["param_state"])
            set_adam_steps(part, loaded["optimizer"][index]["optimizer"]["param_groups"][0]["step"])
        return self.held()

    def held(self) -> Held:
        """As Megatron describes it."""
        return self._held(self.stock(is_loading=False))

    def described(self) -> Held:
        """As ours does."""
        return self._held(self.ours(is_loading=False, rng=False))

    def _held(self, state: dict[str, Any]) -> Held:
        tensors = split(state).tensors
        shards = [(s.key, s.global_shape, s.global_offset, _array(s)) for s in tensors if is_main_replica(s.replica_id)]
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return Held(shards, {float(state["step"]) for part in parts for state in part.optimizer.state.values()})


R = TypeVar("R", bound=Rank)


def _array(shard: ShardedTensor) -> np.ndarray:
    data = shard.data.detach().float().numpy().copy()
    return data.reshape((1,) * shard.prepend_axis_num + data.shape)


@contextmanager
def layout(model: Path, sizes: Layout, dtype: str = "float32", *, kind: Callable[..., R] = Rank) -> Iterator[R]:
    """A rank under a layout, whose groups are gone afterwards."""
    yield kind(model, sizes, dtype)
    for group in parallel_state._global_process_group_list[1:]:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def join(rank: int, size: int, root: Path) -> None:
    cpu.apply()
    keep_results_in_process()
    dist.init_process_group(
        "gloo", init_method=f"file://{root / 'store'}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
