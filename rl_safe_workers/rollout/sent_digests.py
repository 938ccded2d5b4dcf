"""Computes digests of the weights that a trainer sends, on the weights' own device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import torch

from rl_safe_workers.rollout.digest import digests
from rl_safe_workers.rollout.sync_proof import SentWeights

AT_ONCE_BYTES = 64 * 2**20
"""Bytes of weights that are held until they are digested and sent. Views take no memory; merged shards do."""


class SentDigests:
    """Takes digests of the weights of one sync, in the order of sending.

    Attributes:
        names: Names of the weights that have passed.
    """

    def __init__(self) -> None:
        """Has seen no weight yet."""
        self.names: list[str] = []
        self._digests: list[torch.Tensor] = []
        self._seconds = 0.0

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes digests of the next weights. Does not wait for a GPU."""
        started_s = time.monotonic()
        self._digests.append(digests(tensors))
        self._seconds += time.monotonic() - started_s

    def passing(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, at_once_bytes: int = AT_ONCE_BYTES
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields weights unchanged, after it has taken their digests. Reads some weights ahead, to digest many at once.

        Args:
            weights: Name and tensor of each weight.
            at_once_bytes: Bytes to read ahead. 0 for a host that sends weights from several streams of a GPU, because
                each digest must be computed on the stream that sends the weight.
        """
        waiting: list[tuple[str, torch.Tensor]] = []
        waiting_bytes = 0
        for name, tensor in weights:
            waiting.append((name, tensor))
            waiting_bytes += tensor.nbytes
            if waiting_bytes > at_once_bytes:
                yield from self._noted(waiting)
                waiting, waiting_bytes = [], 0
        yield from self._noted(waiting)

    def _noted(self, weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        self.names += [name for name, _ in weights]
        self.add([tensor for _, tensor in weights])
        return weights

    def sent(self, names: Sequence[str]) -> SentWeights:
        """Returns the digests. Waits for the device.

        Args:
            names: HF name of each weight, in the order of sending.
        """
        started_s = time.monotonic()
        if self._digests and self._digests[0].is_cuda:
            torch.cuda.synchronize(self._digests[0].device)  # the host may have sent weights from other streams
        found = torch.cat(self._digests).tolist() if self._digests else []
        by_name = dict(zip(names, found, strict=True))
        return SentWeights(digests=by_name, seconds=self._seconds + time.monotonic() - started_s)
