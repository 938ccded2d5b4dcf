"""Saves of state that lies on a GPU: staged through pinned memory, written beside whatever the GPU does next."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from rl_safe_workers.checkpoint.load.loader import Loader
from rl_safe_workers.checkpoint.save.save_plan import Replicas
from rl_safe_workers.checkpoint.save.saver import Saver
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.seal import new_secret
from rl_safe_workers.ranks import trainer_ids

TIMEOUT = timedelta(seconds=60)
EXPERTS = 16

SECRET = new_secret()


@pytest.fixture(scope="module")
def store() -> Iterator[dist.Store]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


def _state(seed: int) -> dict[str, Any]:
    """Experts in bf16, a matrix, a strided view and a scalar, all on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    state: dict[str, Any] = {
        f"experts.{i}": ShardedTensor.from_rank_offsets(
            "mlp.experts.experts.linear_fc1.weight",
            values(256, 128, dtype=torch.bfloat16),
            (0, i, EXPERTS),
            prepend_axis_num=1,
        )
        for i in range(EXPERTS)
    }
    plain = {"matrix": values(2048, 1024), "view": values(64, 64).t()[:, 3:40], "scalar": values()}
    return state | {key: ShardedTensor.from_rank_offsets(key, value) for key, value in plain.items()}


@pytest.mark.parametrize("background", [False, True])
def test_what_was_on_the_gpu_when_the_save_began_comes_back(
    background: bool, store: dist.Store, tmp_path: Path
) -> None:
    control = ControlPlane(store, world="training world", rank=0, members=trainer_ids([0]), secret=SECRET)
    saver, loader = Saver(control, replicas=Replicas()), Loader(control)
    for step in range(2):
        state, directory = _state(seed=step), tmp_path / str(step)
        saver.begin(
            state,
            directory,
            content_metadata={},
            prepare=directory.mkdir,
            commit=lambda files, notes: len(files),
            timeout=TIMEOUT,
            background=background,
        )
        for shard in state.values():
            shard.data.fill_(-1)  # at once, on the stream that the copies were made on
        assert saver.finish(TIMEOUT) == 1
        wanted, target = _state(seed=step), _state(seed=100)
        loaded = loader.load(lambda target=target: target, directory, timeout=TIMEOUT)
        assert [key for key, shard in wanted.items() if not torch.equal(loaded[key], shard.data)] == []
        assert all(loaded[key].is_cuda for key in wanted)


def test_the_copy_for_a_save_in_the_background_is_pinned(store: dist.Store) -> None:
    from rl_safe_workers.checkpoint.save.staging import Staging

    tensors = [torch.arange(1000.0, device="cuda"), torch.arange(7, dtype=torch.uint8, device="cuda")]
    copies = Staging().copy(tensors, sum(t.nbytes for t in tensors))
    assert all(copy.is_pinned() for copy in copies)
    assert all(torch.equal(copy, tensor.cpu()) for copy, tensor in zip(copies, tensors, strict=True))


def test_a_synchronous_save_needs_pinned_memory_for_one_tensor_at_a_time(store: dist.Store) -> None:
    from rl_safe_workers.checkpoint.save.staging import Staging

    staging, tensors = Staging(), [torch.full((2**20,), float(i), device="cuda") for i in range(8)]
    for tensor, copy in zip(tensors, staging.one_by_one(tensors, tensors[0].nbytes), strict=True):
        assert copy.is_pinned()
        assert torch.equal(copy, tensor.cpu())
    assert staging._buffer.nbytes < 2 * tensors[0].nbytes
