"""Runs one rank of the benchmark ``gpu``: ``python -m benchmarks.gpu_ranks ROLE RANK PORT JOB CONFIG``.

Trainers and rollout ranks run without Ray, which would add seconds to the start but nothing to a figure. Training rank
0 prints its figures as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from benchmarks.gpu import BROADCAST_BYTES, CHECKPOINT
from rl_safe_workers.checkpoint.folders.manifest import SHARDS, model_fingerprint
from rl_safe_workers.checkpoint.state.layer_states import EXTRA_STATE, layer_state_value
from rl_safe_workers.checkpoint.state.model_state import model_state
from rl_safe_workers.checkpoint.state.pieces import split
from rl_safe_workers.checkpoint.state.state import chunk_keys, state_digest
from rl_safe_workers.config import RunConfig
from rl_safe_workers.driver.inputs.preflight import layout_of
from rl_safe_workers.models.bridge import open_bridge
from rl_safe_workers.models.build import build_chunks
from rl_safe_workers.platforms import cuda
from rl_safe_workers.platforms.pinned import host_buffer
from rl_safe_workers.rollout.packing import Adjacent, adjacent_in
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec, plan_buckets
from rl_safe_workers.workers.outgoing import Outgoing
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store

ROUNDS = 4
"""Number of times that each thing is timed. The first time, which allocates, does not count."""
BLOCKS, BLOCK_STEPS = 10, 10
"""Number of blocks of each way to take steps, and number of steps of a block."""
PROVES = (False, True)
"""Values of ``prove`` of the syncs that are timed."""
STEP_ROUNDS = 9
"""Number of rounds of steps. The host's time to launch thousands of kernels varies by about 10 %."""
TRACES = os.environ.get("RL_SAFE_BENCH_TRACES")
"""Folder for a trace of one more sync by each rank, which shows where its time goes; None: no sync is traced."""
ROWS, TOKENS = 8, 512
"""Rows and tokens of a training step, on each data-parallel rank."""
PATIENCE = timedelta(minutes=5)


class Ranks:
    """The base of both roles: meeting points over the store, and clocks."""

    def __init__(self, config: RunConfig, address: StoreAddress) -> None:
        self.config, self.address = config, address
        self.store = connect_store(address, timeout=PATIENCE)
        self.trainers, self.rollouts = config.cluster.num_trainers, config.cluster.num_rollouts
        self._meetings = 0

    def meet(self) -> None:
        """Waits until all trainers and rollout ranks have reached this point."""
        self._meetings += 1
        key = f"bench/meeting/{self._meetings}"
        if self.store.add(f"{key}/came", 1) == self.trainers + self.rollouts:
            self.store.set(key, "")
        self.store.wait([key], PATIENCE)


@contextmanager
def _traced(name: str) -> Iterator[None]:
    """Writes what torch's profiler sees in the body as a trace, which Perfetto shows."""
    assert TRACES is not None, "the caller has asked"
    Path(TRACES).mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profile:
        yield
    profile.export_chrome_trace(str(Path(TRACES) / f"{name}.json.gz"))


class Rollout(Ranks):
    """A rollout rank, which receives weights."""

    def __init__(self, config: RunConfig, address: StoreAddress, rank: int) -> None:
        from rl_safe_workers.rollout.vllm import VllmRollout

        super().__init__(config, address)
        self.rank, self.worker = rank, VllmRollout(config, rollout_rank=rank)

    def receive(self) -> None:
        """Receives the weights as often as the trainers send them."""
        self.worker.start(time.time())
        specs = [WeightSpec(**{**s, "shape": tuple(s["shape"])}) for s in json.loads(self.store.get("bench/specs"))]
        self.worker.join(self.address, range(self.rollouts), specs)
        for prove in PROVES:
            for _ in range(ROUNDS):
                self.meet()
                self.worker.receive_weights(prove)
                self.meet()
            if TRACES:
                with _traced(f"rollout_{self.rank}{'_proved' if prove else ''}"):
                    self.worker.receive_weights(prove)
        self.store.set(f"bench/obstacle/{self.rank}", str(self.worker.loads_through()))
        self.meet()
        self.worker.teardown()


class Trainer(Ranks):
    """A training rank, which times the work."""

    def __init__(self, config: RunConfig, address: StoreAddress, rank: int) -> None:
        from rl_safe_workers.trainer.trainer_worker import TrainerWorker

        super().__init__(config, address)
        self.rank, self.worker = rank, TrainerWorker(config, training_rank=rank)
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.values: dict[str, Any] = {}
        self.layout = asdict(layout_of(config))

    def start(self) -> None:
        """Starts the worker, up to a model with its HF weights."""
        self.worker.start(time.time())
        self.worker.enter_world(self.address)
        self.worker.groups()
        self.worker.bootstrap()
        specs = self.worker.convert()
        if self.rank == 0:
            self.store.set("bench/specs", json.dumps([asdict(spec) for spec in specs]))
            self.values["weight_bytes"] = sum(spec.size_bytes for spec in specs)

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """Times work that all trainers begin together, until the last one and its device have finished."""
        dist.barrier()
        self._synchronize()
        started_s = time.perf_counter()
        value = work()
        self._synchronize()
        dist.barrier()
        self.seconds[name].append(time.perf_counter() - started_s)
        return value

    def _synchronize(self) -> None:
        if self.worker.device.type == "cuda":
            torch.cuda.synchronize()

    def speeds(self) -> None:
        """Times syncs, steps and offloads."""
        self.start()
        if self.rollouts:
            self._sync()
        self._steps(_batch(self.rank))
        self._offload()
        self.values["device_bytes"] = {e.phase: dict(e.device_bytes) for e in self.worker.safe.lifecycle.drain_events()}

    def syncs(self) -> None:
        """Times only syncs."""
        self.start()
        self._sync()
        self.values["first_sync"] = self.seconds["sync"][0]

    def broadcasts(self) -> None:
        """Times broadcasts of `BROADCAST_BYTES` from rank 0, over a communicator of NCCL's default size."""
        self.start()
        group = dist.new_group(backend="nccl" if self.worker.device.type == "cuda" else "gloo")
        whole = torch.empty(int(os.environ[BROADCAST_BYTES]), dtype=torch.uint8, device=self.worker.device)
        for _ in range(ROUNDS):
            self.timed("broadcast", lambda: dist.broadcast(whole, src=0, group=group))

    def _sync(self) -> None:
        """Times weight syncs, until the last rollout rank has its weights in place, and broadcasts of as many bytes."""
        self.worker.meet_rollouts(range(self.rollouts))
        for prove in PROVES:
            kind = "proved_" if prove else ""
            for _ in range(ROUNDS):
                self.meet()
                started_s = time.perf_counter()
                self.worker.sync(prove)
                self.seconds[f"{kind}sent"].append(time.perf_counter() - started_s)
                self.meet()
                self.seconds[f"{kind}sync"].append(time.perf_counter() - started_s)
            if TRACES:
                with _traced(f"trainer_{self.rank}{'_proved' if prove else ''}"):
                    self.worker.sync(prove)
        self.meet()
        self.values["obstacles"] = [self.store.get(f"bench/obstacle/{rank}").decode() for rank in range(self.rollouts)]
        own = self.worker.own_hf_weights()
        assert own is not None, "our bridge can tell"
        outgoing = Outgoing.of_own(own, training_rank=self.rank)
        buckets = plan_buckets(outgoing.specs, bucket_bytes=self.config.rollout.bucket_bytes)
        adjacent = adjacent_in(buckets)
        for _ in range(ROUNDS):
            self.timed("pack", partial(self._pack, outgoing, buckets, adjacent))
        if self.trainers < 2:
            return
        whole = torch.empty(
            _on_rank_0(self.values.get("weight_bytes", 0)), dtype=torch.uint8, device=self.worker.device
        )
        for _ in range(ROUNDS):
            self.timed("broadcast", lambda: dist.broadcast(whole, src=0))

    def _pack(self, outgoing: Outgoing, buckets: Sequence[Bucket], adjacent: Adjacent) -> None:
        """Packs all buckets of this rank, without sending them."""
        weights = outgoing.weights(adjacent)
        buffer = torch.empty(max(bucket.size_bytes for bucket in buckets), dtype=torch.uint8, device=self.worker.device)
        started_s = time.perf_counter()
        for bucket in buckets:
            outgoing.pack(bucket, weights, buffer[: bucket.size_bytes], training_rank=self.rank)
        self.seconds["pack_launches"].append(time.perf_counter() - started_s)

    def _steps(self, batch: Any) -> None:
        """Times training steps in turns: ours, and those of a loop over Megatron alone."""
        for _ in range(STEP_ROUNDS):
            self.timed("step", partial(self.worker.train, batch, len(batch)))
            self.timed("bare_step", partial(_bare_step, self.worker, batch))

    def _offload(self) -> None:
        size_bytes = _copied_bytes(self.worker)
        for _ in range(ROUNDS):
            self.timed("offload", self.worker.offload)
            self.timed("onload", self.worker.onload)
        self.values["moved_bytes"] = size_bytes
        device = torch.empty(size_bytes, dtype=torch.uint8, device=self.worker.device)
        host = host_buffer(size_bytes, pinned=device.is_cuda)
        for _ in range(ROUNDS):
            self.timed("to_host", lambda: host.copy_(device, non_blocking=True))
            self.timed("to_device", lambda: device.copy_(host, non_blocking=True))

    def saves(self) -> None:
        """Times sync and async saves of a model whose optimizer has taken a step, and plain writes."""
        self.start()
        batch = _batch(self.rank)
        self.worker.train(batch, len(batch))
        root = Path(self.config.trainer.default_local_dir or "")
        fingerprint = model_fingerprint(self.config.model.path)
        save = partial(self.worker.save_checkpoint, root, fingerprint=fingerprint, layout=self.layout, driver_state={})
        path = self.timed("save", lambda: save(step=1))
        files = [f.stat().st_size for f in path.rglob("*.distcp")]
        self.values["checkpoint_bytes"] = sum(files)
        self.timed("plain_write", partial(_write_plainly, root / f"plain_{self.rank}", sum(files) // self.trainers))
        (root / f"plain_{self.rank}").unlink()
        for step in (2, 3):
            self.timed("blocked", partial(save, step=step, background=True))
            self.worker.finalize_checkpoint()

    def repeatable_steps(self) -> None:
        """Takes steps with deterministic settings and prints a digest of every bit of the state."""
        cuda.make_deterministic()
        # These generators are part of the state, and differ in every process.
        random.seed(0)
        np.random.seed(0)
        self.start()
        batch = _batch(self.rank)
        for _ in range(2):
            self.worker.train(batch, len(batch))
        self.values["digest"] = state_digest(self.worker.chunks, self.worker.optimizer)

    def digest(self) -> None:
        """Loads a checkpoint and prints a digest of the whole model as HF weights."""
        self.start()
        path = Path(os.environ[CHECKPOINT])
        self.worker.load_checkpoint(path, fingerprint=model_fingerprint(self.config.model.path), layout=self.layout)
        # Another layout yields the weights in another order.
        digests = {name: _digest(tensor) for name, tensor in self.worker.export_hf_weights()}
        self.values["digest"] = _digest_of(digests)

    def layers(self) -> None:
        """Digests a checkpoint as read by our loader and by megatron-core's; measures the gap of 8-bit layers."""
        self.start()
        fp8, path = self.config.megatron.fp8, Path(os.environ[CHECKPOINT])
        # The logits must not be split.
        if fp8 and self.config.megatron.tensor_model_parallel_size == 1:
            tokens = torch.tensor(_batch(self.rank).tokens, device=self.worker.device)
            found = [_plain_logprobs(self.config, each, tokens) for each in (fp8, None)]
            self.values["plain_gap"] = float((found[0] - found[1]).abs().median())
        self.worker.load_checkpoint(path, fingerprint=model_fingerprint(self.config.model.path), layout=self.layout)
        self.values["ours"] = self._digests()
        chunks = self.worker.chunks
        _forget(chunks)
        loaded = dist_checkpointing.load(model_state(chunks), str(path / SHARDS))
        for key, chunk in zip(chunk_keys(chunks), chunks, strict=True):
            chunk.module.load_state_dict(loaded[key])
        self.values["stock"] = self._digests()

    def _digests(self) -> dict[str, Any]:
        """Returns digests of all HF weights, and of the values in the extra states of all layers."""
        weights = {name: _digest(tensor) for name, tensor in self.worker.export_hf_weights()}
        states = _layer_states(self.worker.chunks)
        return {"weights": _digest_of(weights), "extra_states": _digest_of(states), "count": len(states)}

    def blocks(self) -> None:
        """Times blocks of training steps in turns: ours, and those of a loop over Megatron alone."""
        self.start()
        batch = _batch(self.rank)
        ways = {"ours": partial(self.worker.train, batch, len(batch)), "bare": partial(_bare_step, self.worker, batch)}
        for name in (*ways, *ways):
            self.timed(f"{name} warm", ways[name])
        for turn in range(BLOCKS):
            for name in [*ways] if turn % 2 else [*ways][::-1]:
                self.timed(name, lambda way=ways[name]: deque((way() for _ in range(BLOCK_STEPS)), maxlen=0))
        self.values["ratios"] = [a / b for a, b in zip(self.seconds["ours"], self.seconds["bare"], strict=True)]

    def end(self) -> None:
        """Tears the worlds down. Training rank 0 first prints its figures."""
        if self.rank == 0:
            found = {**{name: median(values[1:] or values) for name, values in self.seconds.items()}, **self.values}
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
        self.worker.teardown()


def _plain_logprobs(config: RunConfig, fp8: str | None, tokens: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities ``[b, s - 1]`` of tokens under the HF weights, with or without 8-bit layers."""
    bridge = open_bridge(
        config.model.path,
        dtype=torch.bfloat16,
        transformer_engine=True,
        moe_token_dispatcher_type="alltoall",
        variable_seq_lengths=True,
        fp8=fp8,
        fp8_recipe=config.megatron.fp8_recipe,
    )
    (model,) = build_chunks(bridge)
    bridge.load_weights([model], config.model.path)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens, position_ids=positions, attention_mask=None)
    return logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def _forget(chunks: Any) -> None:
    """Sets all parameters, and the scales of all 8-bit layers, to zero."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        scaling = [getattr(module, "fp8_meta", {}).get(f"scaling_{way}") for way in ("fwd", "bwd")]
        scales = [each for each in scaling if hasattr(each, "amax_history")]
        for tensor in [*module.parameters(recurse=False), *(t for s in scales for t in (s.scale, s.amax_history))]:
            tensor.zero_()


def _layer_states(chunks: Any) -> dict[str, str]:
    """Returns the values of each extra state that is not empty, as text, by its key in a checkpoint, from all ranks."""
    objects = split(model_state(chunks)).objects
    states = {item.unique_key: item.data for item in objects if EXTRA_STATE in item.key}
    mine = {
        key: str({name: _plain(value) for name, value in layer_state_value(state, key).items()})
        for key, state in states.items()
        if isinstance(state, torch.Tensor) and state.numel()
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return {key: text for of_rank in found for key, text in of_rank.items()}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _digest_of(digests: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _on_rank_0(number: int) -> int:
    shared = [number]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _batch(rank: int) -> Any:
    from rl_safe_workers.trainer.batch import SequenceBatch

    generator = np.random.default_rng(rank)
    shape = (ROWS, TOKENS)
    mask = np.zeros(shape, np.float32)
    mask[:, TOKENS // 4 :] = 1
    logprobs = np.full(shape, -4.8, np.float32) * mask
    return SequenceBatch(
        tokens=generator.integers(7, 100, shape),
        response_mask=mask,
        rollout_logprobs=logprobs,
        old_logprobs=logprobs,
        advantages=generator.standard_normal(shape[0]).astype(np.float32),
    )


def _bare_step(worker: Any, batch: Any) -> None:
    """Takes a step like Megatron's own training loop, with the same model, optimizer, micro-batches and tokens."""
    from megatron.core import tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tokens = torch.tensor(batch.tokens, device=worker.device)
    positions = torch.arange(tokens.shape[1], device=worker.device)
    micro = worker.config.actor.ppo_micro_batch_size_per_gpu

    def forward_step(data: Iterator[torch.Tensor], model: Any) -> Any:
        rows = next(data)
        logits = model(input_ids=rows, position_ids=positions.expand_as(rows), attention_mask=None)[:, :-1].float()
        nll = tensor_parallel.vocab_parallel_cross_entropy(
            logits.transpose(0, 1).contiguous(), rows[:, 1:].transpose(0, 1).contiguous()
        )

        def loss(output: torch.Tensor) -> Any:
            total = output.sum()
            return total, torch.tensor(output.numel(), device=output.device), {"loss": total.detach()}

        return nll, loss

    for chunk in worker.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    worker.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(torch.split(tokens, micro)),
        model=worker.chunks,
        num_microbatches=len(tokens) // micro,
        seq_length=tokens.shape[1],
        micro_batch_size=micro,
        forward_only=False,
    )
    worker.optimizer.step()


def _copied_bytes(worker: Any) -> int:
    """Returns the bytes that an offload copies. It frees the gradients without a copy."""
    from rl_safe_workers.platforms.device_memory import megatron_owned

    held = megatron_owned(worker.chunks, worker.optimizer, device_type=worker.device.type)
    return held["weights"] + held["optimizer"]


def _write_plainly(path: Path, size_bytes: int) -> None:
    block = memoryview(bytes(64 * 2**20))
    with path.open("wb") as file:
        for start in range(0, size_bytes, block.nbytes):
            file.write(block[: size_bytes - start])
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    """Runs this process's part of a job."""
    role, rank, port, job, text = sys.argv[1:6]
    config = RunConfig.model_validate_json(text)
    address = StoreAddress(host="127.0.0.1", port=int(port), secret=bytes.fromhex(sys.stdin.readline()))
    if role == "rollout":
        Rollout(config, address, int(rank)).receive()
        return
    trainer = Trainer(config, address, int(rank))
    getattr(trainer, job)()
    trainer.end()


if __name__ == "__main__":
    main()
