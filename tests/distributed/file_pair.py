"""A pair of a trainer and a rollout rank that share a file where GPUs would share memory."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch

from rl_safe_workers.worlds import gpu_pair
from rl_safe_workers.worlds.gpu_pair import GpuPair


class FilePair(GpuPair):
    """A pair whose shared memory is a file: CUDA IPC cannot share a CPU tensor."""

    folder: Path

    def _share(self, device: torch.device) -> torch.Tensor:
        file = self.folder / f"of_{self.joint_rank}"
        shared = self._open(file)
        self._mailbox.leave("memory", str(file).encode())
        return shared

    def _map(self, device: torch.device, timeout: timedelta) -> torch.Tensor:
        return self._open(Path(self._take("memory", timeout).decode()))

    def _open(self, file: Path) -> torch.Tensor:
        return torch.from_file(str(file), shared=True, size=2 * gpu_pair.HALF_BYTES, dtype=torch.uint8)
