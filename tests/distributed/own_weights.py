"""One rank's view of the weights that it sends, under each layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.rollout.packing import adjacent_in, dtype_name
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec, plan_buckets
from rl_safe_workers.workers.outgoing import Outgoing
from rl_safe_workers.workers.packed_export import PackedExport
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.families import LIBRARIES
from tests.distributed.worker import Worker, run_config
from tests.unpacking import unpack

SIZE, BUCKET_BYTES, NUM_EXPERTS = 4, 20_000, 8
QKV, SPLIT = ("q_proj", "k_proj", "v_proj"), ("o_proj", "embed_tokens", "lm_head")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model and parallel sizes over four trainers."""

    model: str = "moe"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    stages: int | None = None
    """Virtual ones of each pipeline rank."""


LAYOUTS = {
    "ep2": Layout(ep=2),
    "ep4": Layout(ep=4),
    "pp2_ep2": Layout(pp=2, ep=2),
    "tp2_ep2": Layout(tp=2, ep=2),
    "tp2_etp2": Layout(tp=2, etp=2),
    "tp2_etp2_ep2": Layout(tp=2, etp=2, ep=2),
    "etp2_ep2": Layout(etp=2, ep=2),
    "tp2_pp2_etp2": Layout(tp=2, pp=2, etp=2),
    "pp2_vpp2_ep2": Layout(pp=2, ep=2, stages=2),
    "dense_tp2": Layout(model="dense", tp=2),
    "tied_pp2": Layout(model="tied", pp=2),
    "tied_tp2": Layout(model="tied", tp=2),
}


Prints = dict[str, tuple[str, tuple[int, ...], str]]
"""Dtype, shape, and digest of every bit, by name."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One rank's record."""

    specs: tuple[WeightSpec, ...]
    buckets: list[Bucket]
    mine: frozenset[str]
    exported: Prints
    made: Prints
    """Prints of the weights that this rank takes part in making."""
    together: set[tuple[str, ...]]
    """Names of weights that were taken as one item, where no bucket ends."""
    views: set[str]
    """Names of those that share their storage with a parameter."""
    received: Prints
    """Through buckets, of which each came from its source."""
    left_over: int
    """Weights that were in no bucket."""
    packed: Prints
    """Through a `PackedExport`."""
    packed_sources: list[int]
    """The source of each of its buckets."""
    moved_exported: Prints
    moved_made: Prints
    """After the parameters were doubled."""
    onloaded_made: Prints
    ep_rank: int


def _worker(rank: int, address: StoreAddress, models: Path, layout: Layout) -> Worker:
    config = run_config(models / layout.model, tp=layout.tp, pp=layout.pp, ep=layout.ep, vpp=layout.stages)
    config.model.bridge = LIBRARIES[0]
    config.megatron.expert_tensor_parallel_size = layout.etp
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    worker.convert()
    return worker


def _print(weight: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    # Of a clone, for storage that numpy has seen cannot be offloaded.
    whole = weight.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return dtype_name(weight.dtype), tuple(weight.shape), hashlib.sha256(whole.numpy()).hexdigest()


def _prints(weights: Iterable[tuple[str, torch.Tensor]]) -> Prints:
    return {name: _print(weight) for name, weight in weights}


def _made(outgoing: Outgoing) -> Prints:
    return _prints((name, weight) for (name,), (weight,) in outgoing.weights(frozenset()))


def _views(worker: Worker, outgoing: Outgoing) -> set[str]:
    storages = {p.untyped_storage().data_ptr() for chunk in worker.chunks for p in chunk.parameters()}
    return {
        name for (name,), (weight,) in outgoing.weights(frozenset()) if weight.untyped_storage().data_ptr() in storages
    }


def _send(outgoing: Outgoing, buckets: list[Bucket], rank: int) -> tuple[Prints, int]:
    """Sends all buckets to all trainers; returns what arrived, and how many weights were not sent."""
    weights, received = outgoing.weights(adjacent_in(buckets)), []
    for bucket in buckets:
        buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8)
        outgoing.pack(bucket, weights, buffer, training_rank=rank)
        dist.broadcast(buffer, group_src=bucket.source, group=dist.group.WORLD)
        received.append(_prints(unpack(bucket, buffer)))
    assert sum(map(len, received)) == len(outgoing.specs)
    return dict(chain.from_iterable(of_bucket.items() for of_bucket in received)), sum(1 for _ in weights)


def _packed(export: PackedExport) -> Prints:
    pairs = [*zip(export.buckets, export.tensors(torch.device("cpu")), strict=True)]
    return _prints(weight for bucket, buffer in pairs for weight in unpack(bucket, buffer))


@torch.no_grad()
def _double(worker: Worker) -> None:
    for chunk in worker.chunks:
        for parameter in chunk.parameters():
            parameter.mul_(2)


def see(rank: int, address: StoreAddress, models: Path, layout: Layout) -> Seen:
    worker = _worker(rank, address, models, layout)
    own = worker.own_hf_weights()
    assert own is not None
    outgoing = Outgoing.of_own(own, training_rank=rank)
    buckets = plan_buckets(outgoing.specs, bucket_bytes=BUCKET_BYTES)
    exported, made, views = _prints(worker.export_hf_weights()), _made(outgoing), _views(worker, outgoing)
    received, left_over = _send(outgoing, buckets, rank)
    export = PackedExport(own, training_rank=rank, bucket_bytes=BUCKET_BYTES)
    packed = _packed(export)
    _double(worker)
    moved_exported, moved_made = _prints(worker.export_hf_weights()), _made(outgoing)
    (whole,) = plan_buckets([replace(spec, source=0) for spec in outgoing.specs], bucket_bytes=2**40)
    worker.offload()
    worker.onload()
    onloaded_made, ep_rank = _made(outgoing), parallel_state.get_expert_model_parallel_rank()
    together = {names for names, _ in outgoing.weights(adjacent_in([whole])) if len(names) > 1}
    assert worker.teardown() == {}
    return Seen(
        specs=outgoing.specs,
        buckets=buckets,
        mine=outgoing.mine,
        exported=exported,
        made=made,
        together=together,
        views=views,
        received=received,
        left_over=left_over,
        packed=packed,
        packed_sources=[bucket.source for bucket in export.buckets],
        moved_exported=moved_exported,
        moved_made=moved_made,
        onloaded_made=onloaded_made,
        ep_rank=ep_rank,
    )
