"""Checkpoints that megatron-core writes by itself: the audit passes them, finds damage, and torch loads them safely."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.enums import ModelType
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

from rl_safe_workers.checkpoint.audit import audit
from rl_safe_workers.checkpoint.format.index import read_index
from rl_safe_workers.checkpoint.ranges import Needs, materialise, needed_ranges
from rl_safe_workers.platforms import cpu
from tests.distributed.ranks import run_ranks, values
from tests.distributed.stock_saves import keep_results_in_process

SIZE, LAYERS, EXPERTS, HIDDEN = 2, 2, 4, 8


def _state(rank: int) -> dict[str, object]:
    """A small MoE model's: one tensor and one extra state per expert, the rest replicated or cut over the ranks."""
    state: dict[str, object] = {}
    for layer in range(LAYERS):
        for expert in range(rank * EXPERTS // SIZE, (rank + 1) * EXPERTS // SIZE):
            at = (0, layer, LAYERS), (1, expert, EXPERTS)
            weight = torch.full((HIDDEN, HIDDEN), layer + expert / 8)
            state[f"fc1.{layer}.{expert}"] = ShardedTensor.from_rank_offsets("experts", weight, *at, prepend_axis_num=2)
            extra = ShardedObject("extra", torch.tensor([expert]), (LAYERS, EXPERTS), (layer, expert))
            state[f"extra.{layer}.{expert}"] = extra
    half = torch.full((HIDDEN,), rank, dtype=torch.bfloat16)
    state["qkv"] = ShardedTensor.from_rank_offsets("qkv", half, (0, rank, SIZE))
    state["norm"] = ShardedTensor.from_rank_offsets("norm", torch.ones(HIDDEN), replica_id=rank)
    state["step"] = ShardedTensor.from_rank_offsets("step", torch.tensor(3.0), replica_id=rank)
    state["rng"] = ShardedObject("rng_state", [{"torch": torch.get_rng_state()}], (SIZE,), (rank,))
    state["args"] = argparse.Namespace(params_dtype=torch.bfloat16, model_type=ModelType.encoder_or_decoder)
    return {**state, "iteration": 3}


def _save(rank: int, port_file: Path, directory: Path) -> None:
    cpu.apply()
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=SIZE)
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    keep_results_in_process()
    dist_checkpointing.save(_state(rank), str(directory), sharded_strategy=strategy)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by megatron-core alone, with its validation, by two ranks."""
    root = tmp_path_factory.mktemp("stock")
    (root / "iter_0000003").mkdir()
    values(run_ranks(_save, SIZE, root / "rendezvous", root / "iter_0000003"))
    return root / "iter_0000003"


@pytest.mark.parametrize("deep", [False, True])
def test_a_stock_checkpoint_passes(checkpoint: Path, deep: bool) -> None:
    report = audit(checkpoint, deep=deep)
    assert report.problems == ()
    assert (report.tensors, report.chunks) == (4, LAYERS * EXPERTS + SIZE + 2)
    # From 0.19 on megatron-core keeps the common state among them.
    assert report.objects == LAYERS * EXPERTS + SIZE + (not (checkpoint / "common.pt").exists())


def test_a_damaged_byte_of_a_stock_checkpoint_fails_deep(checkpoint: Path, tmp_path: Path) -> None:
    copy = _copy(checkpoint, tmp_path / "copy")
    place = read_index(copy).tensors["experts"].chunks[0].place
    assert place is not None
    path = copy / place.file
    data = bytearray(path.read_bytes())
    # 8 x 8 equal fp32 values: the last of the run of zeros that layer 0's expert 0 consists of.
    data[data.index(bytes(HIDDEN * HIDDEN * 4), place.offset, place.stop) + 4] ^= 1
    path.write_bytes(data)
    assert audit(copy).ok
    report = audit(copy, deep=True)
    assert report.counts == {"bytes": 1}
    assert report.problems[0].text.startswith(f"experts at {place.offset} of {place.file} does not have the bytes")


def _copy(checkpoint: Path, target: Path) -> Path:
    everything = {path.name: [(0, path.stat().st_size)] for path in checkpoint.iterdir()}
    materialise(checkpoint, target, everything)
    return target


def test_a_lost_rank_of_a_stock_checkpoint_is_found(checkpoint: Path, tmp_path: Path) -> None:
    copy = _copy(checkpoint, tmp_path / "copy")
    (copy / "__1_0.distcp").unlink()
    assert [problem.text for problem in audit(copy).problems] == ["__1_0.distcp is missing"]


def test_the_index_is_what_torch_reads(checkpoint: Path) -> None:
    index = read_index(checkpoint)
    metadata = FileSystemReader(checkpoint).read_metadata()
    assert metadata.state_dict_metadata.keys() == {*index.tensors, *index.objects}
    for key, entry in index.tensors.items():
        described = metadata.state_dict_metadata[key]
        assert (described.size, str(described.properties.dtype)) == (entry.shape, f"torch.{entry.dtype}")
        assert [(chunk.offsets, chunk.sizes) for chunk in described.chunks] == [
            (chunk.offsets, chunk.sizes) for chunk in entry.chunks
        ]
        places = [(place.file, place.offset, place.length) for place in (chunk.place for chunk in entry.chunks)]
        stored = [metadata.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in entry.chunks]
        assert [(info.relative_path, info.offset, info.length) for info in stored] == places


def test_each_rank_loads_from_a_slice_that_holds_its_part_alone(checkpoint: Path, tmp_path: Path) -> None:
    index = read_index(checkpoint)
    for rank in range(SIZE):
        shards = [value for value in _state(rank).values() if isinstance(value, ShardedTensor | ShardedObject)]
        tensors = [(s.key, s.global_offset, (1,) * s.prepend_axis_num + s.local_shape) for s in _tensors(shards)]
        objects = [s.unique_key for s in shards if isinstance(s, ShardedObject)]
        ranges = needed_ranges(index, Needs(rectangles=tensors, objects=objects))
        assert materialise(checkpoint, tmp_path / str(rank), ranges) < audit(checkpoint).bytes
    values(run_ranks(_load, SIZE, tmp_path / "rendezvous", tmp_path))


def _tensors(shards: list[ShardedTensor | ShardedObject]) -> list[ShardedTensor]:
    return [shard for shard in shards if isinstance(shard, ShardedTensor)]


def _load(rank: int, rendezvous: Path, slices: Path) -> None:
    cpu.apply()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=SIZE)
    saved = _state(rank)
    wanted = _state(rank)
    for shard in wanted.values():
        if isinstance(shard, ShardedTensor):
            shard.data.zero_()
    loaded = dist_checkpointing.load(wanted, str(slices / str(rank)), validate_access_integrity=False)
    for name, shard in saved.items():
        if isinstance(shard, ShardedTensor | ShardedObject) and name != "rng":
            assert torch.equal(loaded[name], shard.data), name
