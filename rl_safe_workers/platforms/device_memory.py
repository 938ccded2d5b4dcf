"""Accounts for the memory of a CUDA device by owner, at the end of each phase of one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from rl_safe_workers.lifecycle import FREE_BYTES, Phase

logger = logging.getLogger(__name__)

CONTEXT, COMMUNICATORS, OTHER = "context", "communicators", "other"

GROWS: Mapping[Phase, str] = {
    Phase.START: CONTEXT,
    Phase.WORLD: CONTEXT,
    Phase.GROUPS: COMMUNICATORS,
    Phase.BOOTSTRAP: COMMUNICATORS,
    Phase.JOINT: COMMUNICATORS,
    Phase.OFFLOAD: COMMUNICATORS,
    Phase.ONLOAD: COMMUNICATORS,
    Phase.SYNC: COMMUNICATORS,
    Phase.TEARDOWN: COMMUNICATORS,
}
"""Owner of a phase's growth outside torch's allocator. In any other phase the growth is mostly loaded kernels,
and goes to ``other``."""


SHARED_PHASES = frozenset({Phase.START, Phase.JOINT, Phase.SYNC})
"""Phases in which a trainer and the rollout rank on its GPU do not take turns."""


class Probe(Protocol):
    """The numbers that a device and torch's caching allocator tell, in bytes: what a test without a device fakes."""

    def used(self) -> int:
        """Memory of the device in use by all processes."""
        ...

    def free(self) -> int:
        """The rest of it."""
        ...

    def reserved(self) -> int:
        """Bytes that this process's allocator has taken from the device."""
        ...

    def allocated(self) -> int:
        """Bytes of it that tensors hold."""
        ...


class CudaProbe:
    """Reads a real device.

    NVML tells the used memory to a process that has no CUDA context yet, so that the phase that creates the context
    shows its size. Where NVML cannot be read ``torch.cuda.mem_get_info`` stands in: the first look creates the context,
    which is then in no account.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_nvml = True
        try:
            self.used()
        except Exception as error:  # NVML has its own classes, and they exist only where it is installed
            logger.warning("NVML cannot be read (%r): the memory of the CUDA context will not be reported", error)
            self._has_nvml = False

    def used(self) -> int:
        """Memory of the device in use by all processes."""
        if self._has_nvml:
            return int(torch.cuda.device_memory_used(self._device))
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def free(self) -> int:
        """The rest of it."""
        return int(torch.cuda.get_device_properties(self._device).total_memory) - self.used()

    def reserved(self) -> int:
        """Bytes that this process's allocator has taken from the device."""
        return int(torch.cuda.memory_reserved(self._device))

    def allocated(self) -> int:
        """Bytes of it that tensors hold."""
        return int(torch.cuda.memory_allocated(self._device))


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that nobody uses."""
    return int(torch.cuda.mem_get_info(device)[0])


def outside_torch(device: torch.device) -> Callable[[], int] | None:
    """Returns what tells the used memory of a device that is not torch's; None for a CPU.

    That of another process on the device counts, so it tells growth only while the other rests.
    """
    if device.type != "cuda":
        return None

    def outside() -> int:
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device))

    return outside


class DeviceMemory:
    """Accounts for the memory that one process holds on one device; observes a Lifecycle.

    | owner | bytes |
    |-------|-------|
    | those that ``owned`` names | as it says |
    | ``activations`` | the rest of what torch has allocated |
    | ``cache`` | the rest of what torch has reserved |
    | ``communicators``, ``context``, ``other`` | growth of the device's other memory over phases, see GROWS |

    Only growth within a phase counts, so another process on the device does no harm as long as the two take turns.
    What it takes or gives back during a phase of this process goes to this process's account, unless the phase is
    one of ``shared``.

    Args:
        device: The CUDA device of this process.
        owned: Bytes of torch's memory by owner, those the worker can name now; called at the end of each phase.
            Buffers of torch's that serve communication can be named ``communicators`` and are added to the rest.
        mapped: Bytes of the reserved memory that are backed now; None for all. vLLM's sleep mode gives memory back
            without the allocator's knowledge: torch goes on counting it, ``owned`` should not.
        shared: Phases in which another process works on the device too: their growth is booked to no one.
        probe: Where the numbers come from; None for the device itself.
    """

    def __init__(
        self,
        device: torch.device,
        owned: Callable[[], Mapping[str, int]],
        *,
        mapped: Callable[[], int] | None = None,
        shared: Collection[Phase] = (),
        probe: Probe | None = None,
    ) -> None:
        self._owned, self._shared = owned, frozenset(shared)
        self._probe = CudaProbe(device) if probe is None else probe
        self._mapped = self._probe.reserved if mapped is None else mapped
        self._grown = {COMMUNICATORS: 0, CONTEXT: 0, OTHER: 0}
        self._before: int | None = None

    def begin(self, phase: Phase) -> None:
        """Remembers what lies outside torch's allocator.

        Of several calls before an `end` the first counts: a worker that creates its CUDA context before it enters
        its first phase calls this before both.
        """
        if self._before is None:
            self._before = self._outside()

    def end(self, phase: Phase) -> dict[str, int]:
        """Books the growth since `begin`, if that succeeded; returns bytes by owner, at least 0, and what is free."""
        before, self._before = self._before, None
        if before is not None and phase not in self._shared:
            self._grown[GROWS.get(phase, OTHER)] += self._outside() - before
        inside = self._inside()
        held = inside | {owner: inside.get(owner, 0) + max(0, grown) for owner, grown in self._grown.items()}
        return held | {FREE_BYTES: self._probe.free()}

    def _outside(self) -> int:
        return self._probe.used() - self._mapped()

    def _inside(self) -> dict[str, int]:
        owned, mapped = dict(self._owned()), self._mapped()
        named = sum(owned.values())
        backed = self._probe.allocated() - (self._probe.reserved() - mapped)
        activations = max(0, backed - named)
        return {**owned, "activations": activations, "cache": max(0, mapped - named - activations)}


def megatron_owned(chunks: Sequence[Any], optimizer: Any, *, device_type: str = "cuda") -> dict[str, int]:
    """Returns the bytes of Megatron's state on the device: ``weights``, ``gradients`` and ``optimizer``.

    A storage that several tensors share counts once, for the first of these owners; an offloaded one does not count.

    Args:
        chunks: Model chunks, wrapped in Megatron's DistributedDataParallel or not yet; may be empty.
        optimizer: Megatron's DistributedOptimizer, a chain of them, or None.
        device_type: Where the memory that counts is.
    """
    buffers = [buffer for chunk in chunks for buffer in _ddp_buffers(chunk)]
    parameters = [parameter for chunk in chunks for parameter in _parameters(chunk)]
    counted: set[int] = set()
    return {
        "weights": _new_bytes([*(b.param_data for b in buffers), *parameters], counted, device_type),
        "gradients": _new_bytes((b.grad_data for b in buffers), counted, device_type),
        "optimizer": _new_bytes(_optimizer_values(optimizer), counted, device_type),
    }


_PARAMETERS: WeakKeyDictionary[torch.nn.Module, list[torch.nn.Parameter]] = WeakKeyDictionary()
"""Parameters of each chunk: to go through a thousand modules takes as long as to send their weights."""


def _parameters(chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
    if chunk not in _PARAMETERS:
        _PARAMETERS[chunk] = list(chunk.parameters())
    return _PARAMETERS[chunk]


def _ddp_buffers(chunk: Any) -> list[Any]:
    # On a chunk that is not wrapped `buffers` is a method of torch.nn.Module.
    return [*chunk.buffers, *chunk.expert_parallel_buffers] if hasattr(chunk, "expert_parallel_buffers") else []


def _optimizer_values(optimizer: Any) -> Iterator[Any]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)  # None on a rank without parameters to optimize
        if inner is not None:
            for group in inner.param_groups:
                yield from group["params"]
            for state in inner.state.values():
                yield from state.values()


def _new_bytes(values: Iterable[Any], counted: set[int], device_type: str) -> int:
    """Adds up the storages not yet counted; anything but tensors on the device is skipped."""
    added = 0
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type == device_type:
            storage = value.untyped_storage()
            if storage.nbytes() > 0 and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                added += storage.nbytes()
    return added
