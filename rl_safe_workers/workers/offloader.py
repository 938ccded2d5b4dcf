"""Moves Megatron's state to the host before a rollout, and back after it, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rl_safe_workers.comms.nccl_suspend import can_suspend
from rl_safe_workers.comms.release import rebuild, releasable_groups, release
from rl_safe_workers.comms.suspend import Suspension
from rl_safe_workers.errors import LifecycleError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.platforms.device_memory import make_room, outside_torch
from rl_safe_workers.platforms.pinned import host_buffer
from rl_safe_workers.workers.communicators import Communicators
from rl_safe_workers.worlds.training_rank import Part, TrainingRank

USES_STATE = frozenset({Phase.CONVERT, Phase.LOAD, Phase.LOGPROB, Phase.TRAIN, Phase.SYNC, Phase.SAVE})
"""Phases that read or write parameters, gradients or optimizer state."""


_ALIGNMENT = 16
"""Alignment in bytes. It is enough for any dtype, and for loads of four floats at once."""


class _HostCopy:
    """Device tensors, and pinned host memory for their copies. The host memory is kept from cycle to cycle.

    At first, the tensors are scattered over many allocations. `give_back` makes them views of a single allocation.
    Later cycles copy and free this allocation, as long as the tensors are the same. Freeing thousands of allocations
    would cost more than the copy.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._places: list[tuple[int, int]] = []
        """Offset and size of each tensor, in bytes."""
        stop = 0
        for tensor in tensors:
            self._places.append((stop, tensor.nbytes))
            stop += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._host = host_buffer(stop, pinned=bool(tensors) and tensors[0].is_cuda)
        self._device = torch.empty(0, dtype=torch.uint8)
        """The single allocation behind the tensors, after `give_back`."""

    def holds(self, tensors: list[torch.Tensor]) -> bool:
        """Returns True if these are the tensors of this object, with unchanged sizes."""
        sizes = [size for _, size in self._places]
        return len(tensors) == len(sizes) and all(
            a is b and a.nbytes == size for a, b, size in zip(tensors, self.tensors, sizes, strict=True)
        )

    def copy(self) -> None:
        """Copies the tensors to the host."""
        if self._is_whole():
            self._host.copy_(self._device, non_blocking=True)
        else:
            for tensor, place in zip(self.tensors, self._views(self._host), strict=True):
                place.copy_(tensor, non_blocking=True)
        _synchronize(self.tensors)

    def release(self) -> int:
        """Frees the tensors' memory; returns its bytes."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.tensors}
        freed = sum(storage.nbytes() for storage in storages.values())
        for storage in storages.values():
            storage.resize_(0)
        return freed

    def give_back(self) -> None:
        """Brings the tensors back to the device."""
        if not self.tensors:
            return
        self._device = torch.empty(self._host.nbytes, dtype=torch.uint8, device=self.tensors[0].device)
        self._device.copy_(self._host, non_blocking=True)
        for tensor, view in zip(self.tensors, self._views(self._device), strict=True):
            tensor.data = view
        _synchronize(self.tensors)

    def _is_whole(self) -> bool:
        """Returns True if the tensors are still views of the allocation that `give_back` made."""
        start = self._device.data_ptr()
        return self._device.nbytes > 0 and all(
            tensor.data_ptr() == start + offset for tensor, (offset, _) in zip(self.tensors, self._places, strict=True)
        )

    def _views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        for tensor, (start, size) in zip(self.tensors, self._places, strict=True):
            yield flat[start : start + size].view(tensor.dtype).view(tensor.shape)


def _synchronize(tensors: list[torch.Tensor]) -> None:
    if tensors and tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()


class Offloader(Part):
    """Moves parameters and optimizer state to host memory and frees gradients, as ``megatron.*_offload`` says.

    The storage of Megatron's buffers is resized in place, so that every view into them stays valid. Optimizer state
    keeps its tensor objects.

    Attributes:
        is_offloaded: Whether the state is in host memory.
        releases_comms: Whether an offload also frees the communicators' memory.
    """

    def __init__(self, rank: TrainingRank, comms: Communicators, *, releases_comms: bool) -> None:
        super().__init__(rank)
        self._comms = comms
        self.is_offloaded, self.releases_comms = False, releases_comms
        self._host_params: Sequence[torch.Tensor] = ()
        """Pinned copies of the parameter buffers, kept from cycle to cycle."""
        self._host_optimizer: _HostCopy | None = None
        self._suspension: Suspension | None = None
        self._given_up_bytes = 0
        """Device memory that the last release or suspension of the communicators freed."""

    @property
    def suspends_comms(self) -> bool:
        """True if an offload suspends the communicators.

        If this is False and ``releases_comms`` is True, an offload releases them. Then the groups must have a backend
        of ``comms.releasable``.
        """
        return (
            self.releases_comms
            and not releasable_groups()
            and can_suspend(self.rank.device, sends_unbatched=self._comms.plan().sends_unbatched)
        )

    def before(self, phase: Phase) -> None:
        """Refuses a phase that uses offloaded state.

        Raises:
            LifecycleError: If the state is not back on the device.
        """
        if self.is_offloaded and phase in USES_STATE:
            raise LifecycleError(
                f"phase {phase} on training rank {self.rank.training_rank}: its state is in host memory; "
                "call onload() first"
            )

    def offload(self) -> int:
        """Frees device memory before a rollout. Collective over: the training world. Idempotent.

        With ``releases_comms`` it also frees the communicators' memory. It suspends them if NCCL can do that. Otherwise
        it releases them. The world must then have a backend of ``comms.releasable``. `onload` restores them.

        Returns:
            Bytes of device memory freed on this rank.

        Raises:
            LifecycleError: If the bootstrap has not run.
            CommunicatorError: On every rank, if one could not free its communicators; names it. On this rank alone, if
                a sum after suspend and resume differs from the sum before.
            PhaseTimeoutError: If a rank does not come in time; names it.
        """
        with self.rank.phase(Phase.OFFLOAD):
            if self.is_offloaded:
                return 0
            freed = self._offload()
            return freed + (self.release_comms() if self.releases_comms else 0)

    def release_comms(self, *, phase: Phase = Phase.OFFLOAD, missing_call: str = "onload()") -> int:
        """Suspends the communicators, or releases those of releasable groups. Collective over: the training world.

        It is a step of `offload`, in the same phase, or of a host's own offload.

        Args:
            phase: The phase that this is part of.
            missing_call: The call that makes the groups usable again. The error of a caller that uses a group too early
                names it.

        Returns:
            Bytes of device memory freed on this rank.

        Raises:
            CommunicatorError: On every rank, if a rank failed; names it.
            PhaseTimeoutError: If a rank does not come in time; names it.
        """
        if self.suspends_comms:
            self._given_up_bytes = self._suspend_comms(phase)
            return self._given_up_bytes
        report = release(
            control=self.rank.control,
            timeout=self.rank.remaining(),
            phase=phase,
            missing_call=missing_call,
            used_bytes=outside_torch(self.rank.device),
        )
        self._given_up_bytes = report.freed_bytes
        return report.freed_bytes

    def _suspend_comms(self, phase: Phase) -> int:
        if self._suspension is None:
            self._suspension = Suspension(self.rank.control, device=self.rank.device)
            if not self._suspension.prove(timeout=self.rank.remaining(), phase=phase):
                self.releases_comms = False
        if not self.releases_comms:
            return 0
        probe = outside_torch(self.rank.device)
        before = probe() if probe is not None else 0
        self._suspension.suspend(self._comms.is_connected, timeout=self.rank.remaining(), phase=phase)
        return before - probe() if probe is not None else 0

    def rebuild_comms(self, *, phase: Phase = Phase.ONLOAD) -> None:
        """Restores the communicators. Collective over: the training world. A step of `onload`, in its phase.

        Args:
            phase: The phase that this is part of.

        Raises:
            CommunicatorError: As `release_comms`.
            PhaseTimeoutError: As `release_comms`.
        """
        make_room(self.rank.device, self._given_up_bytes, "the communicators")
        if self._suspension is not None:
            self._suspension.resume(timeout=self.rank.remaining(), phase=phase)
            return
        rebuild(
            control=self.rank.control,
            timeout=self.rank.remaining(),
            phase=phase,
            bootstrap=lambda patience: self._comms.connect_all(
                outside_torch(self.rank.device), phase=phase, timeout=patience
            ),
            used_bytes=outside_torch(self.rank.device),
        )

    def _offload(self) -> int:
        freed = 0
        buffers = list(self._ddp_buffers())
        # Make all copies before anything is freed: if host memory is short, nothing is lost.
        if self.rank.megatron.param_offload:
            self._copy_params([buffer.param_data for buffer in buffers])
        if self.rank.megatron.optimizer_offload:
            self._copy_optimizer()
        self.is_offloaded = True
        if self.rank.megatron.param_offload:
            freed += sum(self._release(buffer.param_data) for buffer in buffers)
        if self.rank.megatron.grad_offload:
            freed += sum(self._release(buffer.grad_data) for buffer in buffers)
        if self.rank.megatron.optimizer_offload and self._host_optimizer is not None:
            freed += self._host_optimizer.release()
        if self.rank.device.type == "cuda":
            # cuBLAS workspaces of 32 MiB lie in large blocks. A single one keeps gigabytes from being freed.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        return freed

    def _copy_optimizer(self) -> None:
        tensors = self._optimizer_tensors()
        if self._host_optimizer is None or not self._host_optimizer.holds(tensors):
            self._host_optimizer = None  # free the old copy before the new one takes memory
            self._host_optimizer = _HostCopy(tensors)
        self._host_optimizer.copy()

    def _copy_params(self, params: list[torch.Tensor]) -> None:
        if [(p.shape, p.dtype) for p in params] != [(p.shape, p.dtype) for p in self._host_params]:
            self._host_params = [host_buffer(p.nbytes, pinned=p.is_cuda).view(p.dtype).view(p.shape) for p in params]
        for host, param in zip(self._host_params, params, strict=True):
            host.copy_(param, non_blocking=True)
        _synchronize(params)

    def onload(self) -> None:
        """Brings everything back to the device, gradients as zeros. Collective over: the training world. Idempotent.

        Raises:
            CommunicatorError: On every rank, if one could not restore its communicators; names it.
            PhaseTimeoutError: If a rank does not come in time; names it.
        """
        with self.rank.phase(Phase.ONLOAD):
            if not self.is_offloaded:
                return
            if self.releases_comms:
                # Communicators come first: NCCL allocates from the device itself, which torch may fill below.
                self.rebuild_comms()
            buffers = list(self._ddp_buffers())
            if self.rank.megatron.param_offload:
                for buffer, host in zip(buffers, self._host_params, strict=True):
                    self._allocate(buffer.param_data)
                    buffer.param_data.copy_(host, non_blocking=True)
            if self.rank.megatron.grad_offload:
                for buffer in buffers:
                    self._allocate(buffer.grad_data)
                    buffer.grad_data.zero_()
            if self.rank.megatron.optimizer_offload and self._host_optimizer is not None:
                self._host_optimizer.give_back()
            _synchronize([buffer.param_data for buffer in buffers])
            self.is_offloaded = False

    def _ddp_buffers(self) -> Iterator[Any]:
        for chunk in self.rank.host.chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    def _optimizer_tensors(self) -> list[torch.Tensor]:
        """Returns the main parameters and the moments.

        Leaves out main parameters that are views of the parameter buffers, as in fp32.
        """
        in_buffers = {buffer.param_data.untyped_storage().data_ptr() for buffer in self._ddp_buffers()}
        tensors: list[torch.Tensor] = []
        for part in getattr(self.rank.host.optimizer, "chained_optimizers", [self.rank.host.optimizer]):
            if part.optimizer is None:
                continue  # Megatron's stub, on a rank without parameters of this kind
            main = [param for group in part.optimizer.param_groups for param in group["params"]]
            tensors += [p for p in main if p.untyped_storage().data_ptr() not in in_buffers]
            for state in part.optimizer.state.values():
                tensors += [v for v in state.values() if isinstance(v, torch.Tensor) and v.dim() > 0]
        return tensors

    @staticmethod
    def _release(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        size: int = storage.nbytes()
        storage.resize_(0)
        return size

    @staticmethod
    def _allocate(tensor: torch.Tensor) -> None:
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        tensor.untyped_storage().resize_(int(needed))
