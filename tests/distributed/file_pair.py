"""A pair of a trainer and a rollout rank that share a file where GPUs would share memory."""

from __future__ import annotations

from pathlib import Path

import torch

from rl_safe_workers.worlds.gpu_pair import GpuPair


class FilePair(GpuPair):
    """A pair whose shared memory is a file: CUDA IPC cannot share a CPU tensor."""

    folder: Path

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        return _open(self._file, size_bytes)

    def _offer(self, shared: torch.Tensor) -> None:
        self._send("memory", str(self._file).encode())

    def _map(self, size_bytes: int) -> torch.Tensor:
        return _open(Path(self._receive("memory").decode()), size_bytes)

    @property
    def _file(self) -> Path:
        return self.folder / f"of_{self.joint_rank}"


def _open(file: Path, size_bytes: int) -> torch.Tensor:
    return torch.from_file(str(file), shared=True, size=size_bytes, dtype=torch.uint8)
