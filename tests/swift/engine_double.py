"""Stands in for vLLM where there is no GPU, where ms-swift calls it. It keeps digests of the weights that it is given.

What it generates follows from the prompt and the place in the batch alone, so that two jobs see the same samples.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

MODEL = "engine-double"
TOKENS = 6
BREAK_ENGINE = "BREAK_ENGINE"
"""The variable says where and how the engine breaks, such as ``generate:kill``."""


def strike(place: str) -> None:
    """Breaks the engine where the variable says so."""
    where, _, how = os.environ.get(BREAK_ENGINE, "").partition(":")
    if where != place:
        return
    Path(os.environ.get("STRUCK", "struck")).write_text(str(time.time()))
    if how == "raise":
        raise RuntimeError("the engine is broken on purpose")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def texts_of(prompts: Sequence[str]) -> list[tuple[str, list[int]]]:
    """A completion and its tokens for each prompt."""
    found = []
    for place, prompt in enumerate(prompts):
        digest = hashlib.sha256(f"{place} {prompt}".encode()).digest()
        tokens = [32 + byte % 64 for byte in digest[:TOKENS]]
        found.append((" ".join(map(str, tokens)), tokens))
    return found


def responses(requests: Sequence[Any]) -> list[Any]:
    """ms-swift's own responses to its requests."""
    from swift.infer_engine.protocol import (
        ChatCompletionResponse,
        ChatCompletionResponseChoice,
        ChatMessage,
        UsageInfo,
    )

    prompts = [json.dumps(getattr(request, "messages", None) or request["messages"]) for request in requests]
    return [
        ChatCompletionResponse(
            MODEL,
            [
                ChatCompletionResponseChoice(
                    0,
                    ChatMessage(role="assistant", content=text),
                    finish_reason="stop",
                    logprobs={"content": [{"logprob": -1.0} for _ in tokens]},
                    token_ids=tokens,
                )
            ],
            UsageInfo(1, len(tokens), 1 + len(tokens)),
        )
        for text, tokens in texts_of(prompts)
    ]


def infer(infer_requests: Sequence[Any], request_config: Any = None, use_tqdm: bool = False) -> list[Any]:
    """ms-swift's own output of a rollout."""
    from swift.infer_engine.protocol import RolloutOutput

    return [RolloutOutput(response=response) for response in responses(infer_requests)]


class Weights:
    """Digests of the weights that the engine was given last."""

    def __init__(self) -> None:
        self.of_name: dict[str, str] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            strike("load")
            whole = (
                tensor.detach().clone().contiguous().view(torch.uint8)
            )  # numpy would keep the memory from being freed
            self.of_name[name] = hashlib.sha256(whole.numpy().tobytes()).hexdigest()

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(sorted(self.of_name.items())).encode()).hexdigest()

    def modules(self) -> list[Any]:
        return []


class ColocatedEngine:
    """The names of ``GRPOVllmEngine`` that ms-swift's trainer uses, in the trainer's process."""

    def __init__(self) -> None:
        self.inner_model, self.calls = Weights(), list[str]()
        self.inner_model_executor = SimpleNamespace(is_sleeping=False)
        self.engine = self
        self.model_config = None
        # As vLLM's: of torch, in the trainers' world, with the backend named.
        self._group = dist.new_group(backend="gloo", group_desc="of the engine")

    def reset_mm_cache(self) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def sleep(self, level: int) -> None:
        self.inner_model_executor.is_sleeping = True
        self.calls.append("sleep")

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            self.inner_model_executor.is_sleeping = False
            ranks = torch.ones(1)
            dist.all_reduce(ranks, group=self._group)  # while the trainers' communicators are away
            assert ranks == dist.get_world_size()
        self.calls.append(f"wake {tags}")

    def infer(self, infer_requests: Sequence[Any], request_config: Any = None, use_tqdm: bool = False) -> list[Any]:
        self.calls.append("infer")
        strike("generate")
        return infer(infer_requests)


class RayServer:
    """The names of ms-swift's ``VllmServer``, an actor of Ray mode, with the protocol of its weights."""

    def __init__(self, **place: Any) -> None:
        self._weights = Weights()

    def get_master_address(self) -> tuple[str, int, int]:
        return "127.0.0.1", 0, 0

    def launch_server(self, **settings: Any) -> dict[str, Any]:
        strike("launch")
        return {"model_id": settings["model_id"], "tp_size": 1, "node_rank": 0}

    def generate(self, infer_requests: list[Any], request_config: Any = None) -> list[Any]:
        strike("generate")
        return responses(infer_requests)

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def get_model_param_names(self) -> list[str]:
        return []

    def digest(self) -> str:
        return self._weights.digest()

    def update_weights_ipc(
        self,
        zmq_handle: str,
        use_shm: bool = False,
        timeout_s: int = 600,
        peft_config: Any = None,
        base_sync_done: bool = False,
    ) -> None:
        from multiprocessing import resource_tracker, shared_memory

        import zmq

        (Path(os.environ["RECORDS"]) / f"socket{os.getpid()}").write_text(zmq_handle)
        socket = zmq.Context.instance().socket(zmq.REP)
        socket.connect(zmq_handle)
        place = socket.recv_pyobj()
        shared = shared_memory.SharedMemory(name=place["name"])
        resource_tracker.unregister(shared._name, "shared_memory")  # type: ignore[attr-defined]
        socket.send(b"")
        is_last = False
        while not is_last:
            bucket = socket.recv_pyobj()
            strike("load")
            for one in bucket["bucket_meta"].values():
                size = one["shape"].numel() * one["dtype"].itemsize
                flat = torch.frombuffer(bytearray(shared.buf[one["offset"] : one["offset"] + size]), dtype=torch.uint8)
                self._weights.load_weights([(one["name"], flat)])
            is_last = bucket["is_last"]
            socket.send(b"")
        socket.close()
        shared.close()

    def shutdown(self) -> None: ...
