"""A real vLLM engine in one process, to which weights of an HF folder are sent, and corruptions of what it gets.

A test says where a weight lies in the engine without the package's rules, and compares with `slow_digest`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import RolloutError, WeightSyncError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.rollout.cuts import engine_ranks, parts_of
from rl_safe_workers.rollout.packing import dtype_name
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec, plan_buckets
from rl_safe_workers.rollout.read_back import ReadBack
from rl_safe_workers.rollout.sent_digests import SentDigests
from rl_safe_workers.rollout.sync_proof import HeldWeights
from rl_safe_workers.workers.outgoing import Outgoing
from rl_safe_workers.worlds.joint_group import two_buffers
from tests.slow_digest import slow_digest
from tests.unpacking import unpack

Weights = dict[str, torch.Tensor]
Where = Literal["before packing", "on the wire", "after the loader"]
Corrupt = Callable[[Weights, Weights], Weights]
"""Function from the new weights and those of the step before to the weights that arrive in the place of some."""
LAYER = "model.layers.0."
SMALL_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 2**26,
    "gpu_memory_utilization": 0.05,
    "max_model_len": 64,
    "disable_log_stats": True,
}
"""vLLM's options for an engine that only receives weights, on CPU."""
EMBEDDING, HEAD, QUERY_BIAS = "model.embed_tokens.weight", "lm_head.weight", f"{LAYER}self_attn.q_proj.bias"
OUT, DOWN = f"{LAYER}self_attn.o_proj.weight", f"{LAYER}mlp.experts.0.down_proj.weight"


def _cut(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    half = new.shape[0] // 2
    return torch.cat([new[:half], old[half:]])


def _swapped(first: str, second: str) -> Corrupt:
    return lambda new, old: {first: new[second], second: new[first]}


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.clone()
    bits.view(torch.int32).view(-1)[77] ^= 1
    return bits


def _transposed_block(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[:16, :16] = tensor[:16, :16].t()
    return changed


CORRUPTIONS: dict[str, Corrupt] = {
    "two experts swapped": _swapped(DOWN, DOWN.replace("experts.0", "experts.1")),
    "one stale shard": lambda new, old: {
        f"{LAYER}self_attn.k_proj.weight": _cut(*(weights[f"{LAYER}self_attn.k_proj.weight"] for weights in (new, old)))
    },
    "a transposed block": lambda new, old: {OUT: _transposed_block(new[OUT])},
    "one flipped bit": lambda new, old: {DOWN: _flipped(new[DOWN])},
    "wrong scale": lambda new, old: {f"{LAYER}mlp.gate.weight": 2 * new[f"{LAYER}mlp.gate.weight"]},
    "wrong layer order": _swapped(OUT, OUT.replace("layers.0", "layers.1")),
    "vocabulary padding": lambda new, old: {EMBEDDING: new[EMBEDDING].roll(1, 0)},
    "half a bucket": lambda new, old: {name: old[name] for name in list(new)[len(new) // 2 :]},
    "old step": lambda new, old: old,
    "wrong dtype": lambda new, old: {"model.norm.weight": new["model.norm.weight"].bfloat16().float()},
    "missing bias": lambda new, old: {QUERY_BIAS: torch.zeros_like(new[QUERY_BIAS])},
    "tied embedding missed": lambda new, old: {EMBEDDING: old[EMBEDDING]},
}


@dataclass
class Wire:
    """Stands in for the joint group: the buffers of the one sender, as the wire leaves them."""

    buckets: list[Bucket]
    sent: list[torch.Tensor] = field(default_factory=list)
    has_all_parts = False
    breaks_before: int | None = None
    """Number of the bucket that does not arrive any more; None: all arrive."""

    def buffers(self, size_bytes: int) -> list[torch.Tensor]:
        return two_buffers(size_bytes, torch.device("cpu"))

    def broadcast(self, buffer: torch.Tensor, *, source: int) -> Callable[[], None]:
        if len(self.buckets) - len(self.sent) == self.breaks_before:
            raise WeightSyncError("the wire is broken")
        buffer.copy_(self.sent.pop(0))
        return lambda: None

    def flush(self) -> None:
        assert not self.sent

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def send(self, weights: Weights, on_the_wire: Weights, digests: SentDigests | None = None) -> None:
        outgoing = outgoing_of(weights)
        taken = outgoing.weights(frozenset())
        if digests is not None:
            outgoing.digest_in_place(digests, frozenset())
        self.sent = []
        for bucket in self.buckets:
            buffer = torch.zeros(bucket.size_bytes, dtype=torch.uint8)
            outgoing.pack(bucket, taken, buffer, training_rank=0, digests=digests)
            for name, place in unpack(bucket, buffer):
                if name in on_the_wire:
                    place.copy_(on_the_wire[name])
            self.sent.append(buffer)


def outgoing_of(weights: Weights) -> Outgoing:
    specs = tuple(
        WeightSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
        for name, tensor in weights.items()
    )
    return Outgoing(
        specs=specs,
        mine=frozenset(weights),
        is_collective=False,
        weights=lambda _: (((name,), (tensor,)) for name, tensor in weights.items()),
        # Every other weight is a parameter. The others are built.
        in_place=lambda _: (((name,), (weights[name],)) for name in [*weights][::2]),
    )


def view_of(model: torch.nn.Module, name: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Returns a weight of a Qwen2-MoE in the engine by this test's own knowledge; None if it is packed there."""
    held = dict(model.named_parameters(remove_duplicate=False))
    rows = weights[name].shape[0]
    if ".experts." in name:
        layer, _, rest = name.partition(".experts.")
        expert, part, _ = rest.split(".")
        matrix = held[f"{layer}.experts.routed_experts.{'w2' if part == 'down_proj' else 'w13'}_weight"][int(expert)]
        return matrix if part == "down_proj" else matrix.chunk(2)[part == "up_proj"]
    for part, place in (("q_proj", 0), ("k_proj", 1), ("v_proj", 2)):
        if part in name:
            whole = held[name.replace(part, "qkv_proj")]
            start = (0, len(whole) - 2 * rows, len(whole) - rows)[place]
            return whole[start : start + rows] if len(whole) else None
    for part, place in (("gate_proj", 0), ("up_proj", 1)):
        if part in name:
            whole = held[name.replace(part, "gate_up_proj")]
            return whole.chunk(2)[place] if len(whole) else None
    return held[name] if len(held[name]) else None


@contextmanager
def corrupting_the_model(model: torch.nn.Module, changed: Weights, weights: Weights) -> Iterator[None]:
    """Writes into the model after its loaders, before a layer is converted, and at the end."""
    left = dict(changed)

    def write(module: str) -> None:
        for name in list(left):
            owner = name.rpartition(".")[0]
            view = view_of(model, name, weights)
            if view is not None and (not module or _inside(owner, module)):
                with torch.no_grad():
                    view[: len(left[name])].copy_(left.pop(name)) if view.dim() else view.copy_(left.pop(name))

    class Corrupted(ReadBack):
        def around(self, name: str, convert: Callable[[], None]) -> None:
            write(name)
            super().around(name, convert)

        def finish(self) -> HeldWeights:
            write("")
            return super().finish()

    from rl_safe_workers.rollout import vllm_transfer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_transfer, "ReadBack", Corrupted)
        yield
    assert not left, f"never written: {list(left)}"


def _inside(owner: str, module: str) -> bool:
    """Returns True if the HF layer ``owner`` is part of the engine's module."""
    joined = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    joined |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    layer, _, part = owner.rpartition(".")
    if ".experts." in owner:
        return module == f"{owner.partition('.experts.')[0]}.experts.routed_experts"
    return module in (owner, f"{layer}.{joined.get(part, part)}")


class ProvedEngine:
    """Updates the engine of a worker, and compares what it holds."""

    def __init__(self, worker: Any, weights: Weights) -> None:
        from rl_safe_workers.rollout.vllm_transfer import JointWeightTransferEngine

        self.model: torch.nn.Module = worker.get_model()
        self.engine: JointWeightTransferEngine = worker.weight_transfer_engine
        self.announce(weights)

    def announce(self, weights: Weights) -> None:
        specs = outgoing_of(weights).specs
        self._wire = Wire(plan_buckets(specs, bucket_bytes=2**18))
        ranks = engine_ranks(1, kv_heads=1)
        self.engine._specs = specs
        self.engine._buckets = [(bucket, parts_of(bucket, ranks)) for bucket in self._wire.buckets]
        self.engine._loading.forget()

    def update(self, weights: Weights, on_the_wire: Weights | None = None) -> HeldWeights:
        self._wire.send(weights, on_the_wire or {})
        self.receive(prove=True)
        held = self.engine.held
        assert held is not None
        return held

    def break_off(self, weights: Weights, *, before: int) -> None:
        """Updates, and loses the senders before a bucket."""
        self._wire.breaks_before = before
        with pytest.raises(WeightSyncError):
            self.update(weights)
        self._wire.breaks_before = None

    @property
    def buckets(self) -> int:
        return len(self._wire.buckets)

    def receive(self, *, prove: bool) -> None:
        # It has left after a broken update.
        self.engine._group = self._wire  # type: ignore[assignment]
        self.engine.start_weight_update()
        self.engine.update_weights({"prove": prove})
        self.engine.finish_weight_update()

    def sync(self, weights: Weights, *, prove: bool) -> list[str]:
        """Syncs as a trainer and an engine do, with the package's digests on both sides; returns what differs."""
        found = SentDigests()
        self._wire.send(weights, {}, found if prove else None)
        self.receive(prove=prove)
        if self.engine.held is None:
            return []
        return self.engine.held.differences(found.sent().digests)


def wrong(held: HeldWeights, weights: Weights) -> list[str]:
    """Sentences for the weights that are held otherwise than the slow reference says."""
    return held.differences({name: slow_digest(tensor) for name, tensor in weights.items()})


def stepped(weights: Weights) -> Weights:
    """The weights one training step later."""
    generator = torch.Generator().manual_seed(2)
    return {
        name: (tensor + 0.01 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def in_engine(path: Path, work: Callable[[Any, Weights], Any]) -> Any:
    """Runs ``work(worker, weights of the folder)`` in an engine with these weights. In a process of its own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from rl_safe_workers.rollout import vllm_transfer

    vllm_transfer.register()
    torch.compiler.set_stance("force_eager")
    llm = LLM(
        model=str(path),
        load_format="safetensors",
        weight_transfer_config={"backend": vllm_transfer.BACKEND},
        **SMALL_ENGINE,
    )
    weights = load_file(path / "model.safetensors")
    (result,) = llm.collective_rpc(lambda worker: work(worker, weights))
    llm.llm_engine.engine_core.shutdown()
    return result


def all_corruptions(rank: int, path: Path) -> dict[tuple[str, Where], tuple[list[str], list[str], set[str]]]:
    """Returns what is found, what is still wrong after a clean update, and what was corrupted, for each case."""
    return in_engine(path, _all_corruptions)


def _all_corruptions(worker: Any, old: Weights) -> Any:
    new, found = stepped(old), {}
    engine = ProvedEngine(worker, new)
    for label, corrupt in CORRUPTIONS.items():
        changed = corrupt(new, old)
        for where in ("before packing", "on the wire", "after the loader"):
            assert wrong(engine.update(old), old) == []
            if where == "before packing":
                held = engine.update(new | changed)
            elif where == "on the wire":
                held = engine.update(new, changed)
            elif label == "tied embedding missed":
                held = _with_own_head(engine, new, old)
            else:
                with corrupting_the_model(engine.model, changed, new):
                    held = engine.update(new)
            found[label, where] = wrong(held, new), wrong(engine.update(new), new), set(changed)
    found["missing bias", "before packing"] = _without(engine, new, QUERY_BIAS)
    return found


def _with_own_head(engine: ProvedEngine, new: Weights, old: Weights) -> HeldWeights:
    """Unties the output layer for an update. It keeps the old weights then."""
    model: Any = engine.model
    tied = model.lm_head
    model.lm_head = copy.deepcopy(model.model.embed_tokens)
    assert wrong(engine.update(old), old) == [], "the output layer has the same weights so far"
    held = engine.update(new)
    model.lm_head = tied
    return held


def _without(engine: ProvedEngine, new: Weights, name: str) -> tuple[list[str], list[str], set[str]]:
    fewer = {key: tensor for key, tensor in new.items() if key != name}
    engine.announce(fewer)
    held = engine.update(fewer)
    engine.announce(new)
    return wrong(held, fewer), wrong(engine.update(new), new), {name}


def clean_update(rank: int, path: Path) -> tuple[list[str], HeldWeights, list[str]]:
    """Returns what is wrong after a clean update, what the engine holds then, and the names of the weights."""

    def work(worker: Any, old: Weights) -> Any:
        new = stepped(old)
        held = ProvedEngine(worker, new).update(new)
        return wrong(held, {name: new[name] for name in new if name not in held.unread}), held, list(new)

    return in_engine(path, work)


def broken_updates(rank: int, path: Path) -> list[list[str]]:
    """Returns what is wrong after each of the clean updates that follow on one that was broken off, and on the next."""

    def work(worker: Any, old: Weights) -> Any:
        new, found = stepped(old), []
        engine = ProvedEngine(worker, new)
        for before in (1, engine.buckets // 2, engine.buckets - 1):
            engine.announce(new)
            engine.break_off(old, before=before)
            found.append(wrong(engine.update(new), new))
            engine.break_off(new, before=before)
            found.append(wrong(engine.update(old), old))
        return found

    return in_engine(path, work)


class BrokenUpdates:
    """Stands in for vLLM's ``LLM``; its updates fail half-way."""

    def start_weight_update(self) -> None: ...

    def update_weights(self, update: Any) -> None:
        raise ValueError("half-way")


def refusals(rank: int) -> list[str]:
    """Why a rollout rank does not generate: before it has an engine, and after a sync that has failed half-way."""
    from rl_safe_workers.rollout.vllm import VllmRollout

    rollout, found = VllmRollout(RunConfig(), rollout_rank=0), []
    for phase in (Phase.START, Phase.JOINT):
        with rollout.lifecycle.enter(phase):
            pass
    for engine in (None, BrokenUpdates()):
        if engine is not None:
            rollout._llm = engine  # type: ignore[assignment]
            with pytest.raises(ValueError, match="half-way"):
                rollout.receive_weights()
        with pytest.raises(RolloutError) as raised:
            rollout.generate([], 0, 1)
        found.append(str(raised.value))
    return found
