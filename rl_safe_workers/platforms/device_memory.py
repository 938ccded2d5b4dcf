"""Accounts for a CUDA device's memory by owner, at the end of each phase of one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from rl_safe_workers.lifecycle import FREE_BYTES, Phase
from rl_safe_workers.platforms.nvml_memory import process_memory

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
"""Owner of the growth outside torch's allocator, by phase. In any other phase the owner is ``other``; such growth is
mostly loaded kernels."""


SHARED_PHASES = frozenset({Phase.START, Phase.JOINT, Phase.SYNC})
"""Phases in which a trainer and the rollout rank on its GPU work at the same time."""

UNMOVED_PHASES = frozenset({Phase.LOGPROB, Phase.SYNC})
"""Phases of a trainer that neither move nor allocate nor free weights, gradients or optimizer state."""


class Probe(Protocol):
    """Reads memory sizes, in bytes, from a device and torch's caching allocator. Tests without a device use a fake."""

    def used(self) -> int:
        """Returns the bytes of device memory that all processes use."""
        ...

    def total(self) -> int:
        """Returns the bytes of device memory."""
        ...

    def reserved(self) -> int:
        """Returns the bytes that the allocator of this process has reserved on the device."""
        ...

    def allocated(self) -> int:
        """Returns the bytes that tensors of this process hold, a part of the reserved bytes."""
        ...


class CudaProbe:
    """Reads a real device.

    NVML returns the used memory even in a process without a CUDA context, so the phase that creates the context shows
    its size. If NVML cannot be read, ``torch.cuda.mem_get_info`` is used. Its first call creates the context, whose
    size is then not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_nvml = True
        try:
            self.used()
        except Exception as error:  # NVML's error classes exist only if it is installed
            logger.warning("NVML cannot be read (%r): the memory of the CUDA context will not be reported", error)
            self._has_nvml = False

    def used(self) -> int:
        """Returns the bytes of device memory that all processes use."""
        if self._has_nvml:
            return int(torch.cuda.device_memory_used(self._device))
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def total(self) -> int:
        """Returns the bytes of device memory."""
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def reserved(self) -> int:
        """Returns the bytes that the allocator of this process has reserved on the device."""
        return reserved_bytes(self._device)

    def allocated(self) -> int:
        """Returns the bytes that tensors of this process hold, a part of the reserved bytes."""
        return allocated_bytes(self._device)


def reserved_bytes(device: torch.device) -> int:
    """Returns the bytes that torch's allocator of this process has reserved on a CUDA device."""
    return _of_allocator(device, "reserved_bytes")


def allocated_bytes(device: torch.device) -> int:
    """Returns the bytes that tensors of this process hold on a CUDA device."""
    return _of_allocator(device, "allocated_bytes")


def _of_allocator(device: torch.device, statistic: str) -> int:
    """Returns one statistic. ``torch.cuda.memory_reserved`` lists and sorts all of them first, some 130."""
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    return int(statistics[statistic]["all"]["current"]) if statistics else 0  # empty before the first use of CUDA


def free_bytes(device: torch.device) -> int:
    """Returns the bytes of a CUDA device's memory that no process uses."""
    return int(torch.cuda.mem_get_info(device)[0])


def make_room(device: torch.device, needed_bytes: int, what: str) -> None:
    """Empties torch's cache if less device memory is free than needed, and logs that. Does nothing on a CPU.

    Emptying the cache always would cost time in each step, and may leave the memory in smaller pieces (slime 956).

    Args:
        device: The device.
        needed_bytes: Bytes that something outside torch's allocator is about to take.
        what: That something, for the log.
    """
    if device.type != "cuda" or (free := free_bytes(device)) >= needed_bytes:
        return
    torch.cuda.empty_cache()
    logger.info(
        "emptied torch's cache: %s need %.0f MiB, %.0f MiB were free, and now %.0f MiB are",
        what,
        needed_bytes / 2**20,
        free / 2**20,
        free_bytes(device) / 2**20,
    )


def outside_torch(device: torch.device) -> Callable[[], int] | None:
    """Returns a function for the bytes of used device memory outside torch's allocator; None for a CPU.

    It counts this process alone where `process_memory` can. Elsewhere memory of other processes on the device counts,
    too, and a growth is meaningful only while they are idle.
    """
    if device.type != "cuda":
        return None
    of_process = process_memory(device)

    def used() -> int:
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    return lambda: (of_process or used)() - reserved_bytes(device)


class DeviceMemory:
    """Accounts for the memory that one process holds on one device. Is the observer of a `Lifecycle`.

    | owner | bytes |
    |-------|-------|
    | the owners that ``owned`` returns | the bytes that it returns |
    | ``activations`` | the rest of the memory that torch has allocated |
    | ``cache`` | the rest of the memory that torch has reserved |
    | ``communicators``, ``context``, ``other`` | growth of all other device memory during phases, see `GROWS` |

    Only growth within a phase counts, so another process on the device does no harm while the two take turns. If the
    other process allocates or frees memory during a phase of this process, this process is charged for it, unless the
    phase is in ``shared``.

    Args:
        device: The CUDA device of this process.
        owned: Returns bytes of torch's memory by owner, for the owners that the worker can name. Called at the end of
            each phase that is not in ``unmoved``. Communication buffers that torch allocates may have the owner
            ``communicators``, and are added to its other memory.
        mapped: Returns the bytes of the reserved memory that have physical memory now; None for all reserved bytes.
            vLLM's sleep mode releases memory without the allocator's knowledge: torch still counts it, and ``owned``
            should not.
        shared: Phases in which another process works on the device, too. Their growth is not counted.
        unmoved: Phases that change nothing of what ``owned`` returns. At their end the last result is used again:
            ``owned`` may look at tens of thousands of tensors, which takes as long as sending them.
        probe: Source of the numbers; None for the device itself.
    """

    def __init__(
        self,
        device: torch.device,
        owned: Callable[[], Mapping[str, int]],
        *,
        mapped: Callable[[], int] | None = None,
        shared: Collection[Phase] = (),
        unmoved: Collection[Phase] = (),
        probe: Probe | None = None,
    ) -> None:
        self._owned, self._shared, self._unmoved = owned, frozenset(shared), frozenset(unmoved)
        self._last_owned: dict[str, int] | None = None
        self._probe = CudaProbe(device) if probe is None else probe
        self._mapped = self._probe.reserved if mapped is None else mapped
        self._grown = {COMMUNICATORS: 0, CONTEXT: 0, OTHER: 0}
        self._before: int | None = None

    def begin(self, phase: Phase) -> None:
        """Records the memory outside torch's allocator, if its growth in this phase counts.

        If it is called several times before `end`, the first call counts. A worker that creates its CUDA context before
        its first phase calls it before both.
        """
        if self._before is None and phase not in self._shared:
            self._before = self._probe.used() - self._mapped()

    def end(self, phase: Phase) -> dict[str, int]:
        """Adds the growth since `begin` to the phase's owner, if `begin` succeeded.

        Returns:
            Bytes by owner, at least 0, and under ``FREE_BYTES`` the free bytes of the device.
        """
        before, self._before = self._before, None
        if phase not in self._unmoved:
            self._last_owned = None
        used = self._probe.used()  # once, because NVML takes its time
        if before is not None and phase not in self._shared:
            self._grown[GROWS.get(phase, OTHER)] += used - self._mapped() - before
        if self._last_owned is None:
            self._last_owned = dict(self._owned())
        inside = self._inside(self._last_owned)
        held = inside | {owner: inside.get(owner, 0) + max(0, grown) for owner, grown in self._grown.items()}
        return held | {FREE_BYTES: self._probe.total() - used}

    def _inside(self, owned: Mapping[str, int]) -> dict[str, int]:
        mapped = self._mapped()
        named = sum(owned.values())
        backed = self._probe.allocated() - (self._probe.reserved() - mapped)
        activations = max(0, backed - named)
        return {**owned, "activations": activations, "cache": max(0, mapped - named - activations)}


def megatron_owned(chunks: Sequence[Any], optimizer: Any, *, device_type: str = "cuda") -> dict[str, int]:
    """Returns the bytes of Megatron's state on the device: ``weights``, ``gradients`` and ``optimizer``.

    A storage that several tensors share counts once, for the first of these owners. An offloaded storage does not
    count.

    Args:
        chunks: Model chunks, wrapped in Megatron's DistributedDataParallel or not; may be empty.
        optimizer: Megatron's DistributedOptimizer, a chain of them, or None.
        device_type: Type of the device whose memory counts.
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
"""Cached parameters of each chunk. Walking a thousand modules takes as long as sending their weights."""


def _parameters(chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
    if chunk not in _PARAMETERS:
        _PARAMETERS[chunk] = list(chunk.parameters())
    return _PARAMETERS[chunk]


def _ddp_buffers(chunk: Any) -> list[Any]:
    # On an unwrapped chunk, `buffers` is a method of torch.nn.Module.
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
    """Returns the bytes of the storages not counted before. Skips values that are not tensors on the device."""
    added = 0
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type == device_type:
            storage = value.untyped_storage()
            if storage.nbytes() > 0 and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                added += storage.nbytes()
    return added
