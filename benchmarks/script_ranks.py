"""Runs one rank of the benchmark ``script``: ``python -m benchmarks.script_ranks RANK JOBS``.

It is a plain Megatron training script without our classes: groups, model, optimizer, steps. Each job runs in a fork.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from benchmarks.comms import OURS
from benchmarks.comms_peers import WARMUPS
from benchmarks.comms_ranks import synchronize, timed
from benchmarks.forks import run_jobs_of_rank
from benchmarks.script import UNLIMITED, WATCHED, Job
from benchmarks.taken import Taken
from rl_safe_workers import bootstrap, channel_limits, guard, teardown
from rl_safe_workers.comms import late
from rl_safe_workers.diagnostics.neighbours import Neighbours
from rl_safe_workers.models.local_spec import decoder_block_spec
from rl_safe_workers.platforms import cpu
from rl_safe_workers.topology.groups import Features

STEPS, MICRO_BATCHES = 4, 4
STOP_LIMIT_S, _SETTLES_S = 10.0, 1.0


def init(job: Job, rank: int) -> None:
    """Makes the groups in the job's way."""
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    limits = None
    if job.way == OURS:
        limits = channel_limits(features=Features(**job.features), world_size=job.ranks, **job.sizes)
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=job.ranks,
        pg_options=limits and limits.world,
    )
    sizes = limits.megatron if limits else job.sizes
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)


def build(job: Job) -> tuple[Any, Any]:
    """Returns this rank's model chunk, in Megatron's data-parallel wrapper, and its distributed optimizer."""
    dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    tensor = job.sizes.get("tensor_model_parallel_size", 1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=job.hidden,
        num_attention_heads=16,
        num_moe_experts=16,
        moe_router_topk=2,
        moe_ffn_hidden_size=job.hidden,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=1e-2,
        moe_router_load_balancing_type="aux_loss",
        moe_grouped_gemm=job.layers == "te",
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        sequence_parallel=tensor > 1,
        fp8="hybrid" if job.fp8 else None,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=job.sizes.get("pipeline_model_parallel_size", 1),
        expert_model_parallel_size=job.sizes.get("expert_model_parallel_size", 1),
        expert_tensor_parallel_size=job.sizes.get("expert_tensor_parallel_size", tensor),
        context_parallel_size=job.sizes.get("context_parallel_size", 1),
    )
    if job.layers == "te":
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(num_experts=16, moe_grouped_gemm=True)
    else:
        spec = decoder_block_spec(config)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=8192,
        max_sequence_length=job.tokens,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).to(job.device, dtype)
    wrapped = DistributedDataParallel(
        config=config, ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True), module=chunk
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-6, bf16=config.bf16, params_dtype=dtype, use_distributed_optimizer=True
        ),
        [wrapped],
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


def batches(job: Job) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the same random micro-batch forever."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    length = job.tokens // parallel_state.get_context_parallel_world_size()
    tokens = torch.randint(0, 8192, (2, length), generator=generator).to(job.device)
    places = torch.arange(length, device=job.device).expand(2, -1)
    while True:
        yield {"input_ids": tokens, "position_ids": places, "labels": tokens, "attention_mask": None}


def forward(data: Iterator[Mapping[str, Any]], chunk: Any) -> tuple[torch.Tensor, Any]:
    """Runs a forward step, as Megatron's schedule calls it."""
    losses = chunk(**next(data))
    return losses, lambda output: (output.float().mean(), {})


def train(job: Job, chunk: Any, optimizer: Any) -> None:
    """Runs one step of `MICRO_BATCHES` micro-batches."""
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches(job),
        model=[chunk],
        num_microbatches=MICRO_BATCHES,
        seq_length=job.tokens,
        micro_batch_size=2,
        forward_only=False,
    )
    optimizer.step()


def gather_of_a_save(rank: int, ranks: int) -> None:
    """Gathers an object on rank 0 over the default group, as Megatron's asynchronous saves do."""
    found: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object({"rank": rank}, found)


@contextmanager
def late_warnings() -> Iterator[list[str]]:
    """Yields a list that collects every warning of the watch for late allocations during the body."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    watch = logging.getLogger(late.__name__)
    watch.addHandler(handler)
    try:
        yield found
    finally:
        watch.removeHandler(handler)


def take_turns(job: Job, step: Callable[[], None], device: torch.device) -> list[float]:
    """Runs blocks of steps in turns with the other job; returns the seconds of each block."""
    store = dist.TCPStore("127.0.0.1", job.turns_port, is_master=False)

    def block() -> None:
        for _ in range(job.block_steps):
            step()

    def wait_for(name: str, ranks: int) -> None:
        while store.add(name, 0) < ranks:
            time.sleep(1e-3)

    store.add("ready", 1)
    wait_for("ready", 2 * job.ranks)
    seconds = []
    for turn in range(2 * job.blocks):
        if turn % 2 == job.place:
            seconds.append(timed(block, device))
            store.add(f"{turn}", 1)
        wait_for(f"{turn}", job.ranks)
    return seconds


class Watch:
    """The watch of a plain script's ranks, as `bootstrap` starts it, and its cost in this process."""

    def __init__(self, key: str, rank: int) -> None:
        threads, process = set(threading.enumerate()), psutil.Process()
        before = process.memory_full_info().uss
        self._neighbours = Neighbours(key, rank=rank, stop_limit_s=STOP_LIMIT_S)
        self._threads = [thread for thread in threading.enumerate() if thread not in threads]
        time.sleep(_SETTLES_S)
        self._bytes = process.memory_full_info().uss - before

    @contextmanager
    def measured(self, found: dict[str, Any]) -> Iterator[None]:
        """Adds the share of a core that its threads take in the body, and its memory in bytes. Then ends the watch."""
        started_s, cpu_s = time.monotonic(), self._cpu_seconds()
        yield
        found["watch_share"] = (self._cpu_seconds() - cpu_s) / (time.monotonic() - started_s)
        found["watch_bytes"] = self._bytes
        self._neighbours.leave()

    def _cpu_seconds(self) -> float:
        """Returns the CPU seconds of all threads of the watch (the first field of schedstat, in ns)."""
        files = [Path(f"/proc/self/task/{thread.native_id}/schedstat") for thread in self._threads]
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def measure(job: Job, rank: int) -> dict[str, Any]:
    """Warms up, builds the model and trains `STEPS` steps; returns this rank's bytes and seconds."""
    if job.device == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    else:
        device = cpu.start()  # a few calls of Megatron ask for CUDA
    init(job, rank)
    torch.zeros(1, device=device)
    synchronize(device)
    taken, started_s, report = Taken(device), time.perf_counter(), None
    watch = None
    if job.way in (OURS, UNLIMITED):
        report = bootstrap(features=Features(**job.features))
    elif job.way == WATCHED:
        watch = Watch(f"bench_{job.port}", rank)
    else:
        WARMUPS[job.way](device)
    synchronize(device)
    found: dict[str, Any] = {"warmup_s": time.perf_counter() - started_s, "warm_bytes": taken.growth()}
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    with taken.attributed(), late_warnings() as warnings:
        chunk, optimizer = build(job)
        for _ in range(STEPS):
            with guard("train", watch_steps=STEPS) if report else nullcontext():
                train(job, chunk, optimizer)
        if job.features.get("background_saves"):
            gather_of_a_save(rank, job.ranks)
        synchronize(device)
    found |= {
        "growth_bytes": taken.growth(),
        "late_bytes": taken.by_collectives,
        "by_group": dict(taken.by_group),
        "predicted_bytes": report.predicted_bytes if report else 0,
        "named_late": len(warnings),
    }
    if job.turns_port:
        with nullcontext() if watch is None else watch.measured(found):
            found["block_s"] = take_turns(job, lambda: train(job, chunk, optimizer), device)
    if watch is None:
        teardown()
    return found


if __name__ == "__main__":
    run_jobs_of_rank(lambda fields, rank: measure(Job(**fields), rank))
