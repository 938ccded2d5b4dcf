"""Gathers plain values from all ranks of a group as JSON.

torch's `all_gather_object` unpickles whatever arrives. Gloo has no password, so anybody could send a pickle that
executes code. JSON cannot.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from rl_safe_workers.errors import CommunicatorError

MAX_BYTES = 2**30
"""Largest value of one rank. A model of a million weights announces 200 MiB."""


def gather_json(value: Any, *, group: dist.ProcessGroup) -> list[Any]:
    """Returns the values of all ranks, by group rank. Collective over: the group, with two all-gathers.

    Args:
        value: A value that JSON can hold. A tuple arrives as a list.
        group: The group, with any backend.

    Raises:
        CommunicatorError: If a message is not JSON, or is longer than ``MAX_BYTES``.
    """
    device = _device(group)
    sent = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([sent.numel()], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(group.size())]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(one) for one in torch.cat(lengths).tolist()]
    if min(sizes) < 1 or max(sizes) > MAX_BYTES:
        raise CommunicatorError(f"group ranks sent values of {sizes} bytes; each must have 1 to {MAX_BYTES} bytes")
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: sent.numel()] = sent
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return [_value(part[:size], rank) for rank, (part, size) in enumerate(zip(received, sizes, strict=True))]


def _value(part: torch.Tensor, group_rank: int) -> Any:
    try:
        return json.loads(part.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CommunicatorError(f"group rank {group_rank} sent what is not JSON ({type(error).__name__})") from None


def _device(group: dist.ProcessGroup) -> torch.device:
    """Returns a device that the group's backend supports; if it supports several, the CPU, as torch itself does."""
    devices: list[torch.device] = group._device_types  # private: seen in torch 2.8 to 2.13
    if len(devices) == 1 and devices[0].type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
