"""Computes digests of the weights that a trainer sends, on the weights' own device."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from rl_safe_workers.rollout.digest import Sizes, digests_of
from rl_safe_workers.rollout.sync_proof import SentWeights

AT_ONCE_BYTES = 64 * 2**20
"""Bytes of weights that are held until they are digested and sent. Views take no memory, but merged shards do."""


class SentDigests:
    """Takes digests of the weights of one sync."""

    def __init__(self) -> None:
        """Starts without digests."""
        self._names: list[str] = []
        """Name of the weight of each digest."""
        self._known: set[str] = set()
        self._digests: list[torch.Tensor] = []
        self._held: list[tuple[Collection[str], Sequence[torch.Tensor], Sizes]] = []
        """Weights whose digests are taken later; see `hold`."""
        self._seconds = 0.0

    def __contains__(self, name: str) -> bool:
        """Returns True if a weight has a digest."""
        return name in self._known

    def add(self, names: Collection[str], take: Callable[[], torch.Tensor], *, started_s: float | None = None) -> None:
        """Takes digests of weights. Does not wait for a GPU.

        Args:
            names: HF names of the weights. An empty collection changes nothing.
            take: Returns their digests in this order: int64, ``[number of names]``.
            started_s: When the work for these digests began, in seconds of the monotonic clock; None: now.
        """
        if not names:
            return  # an empty tensor of digests is on the CPU, and `sent` could not join it
        started_s = time.monotonic() if started_s is None else started_s
        self._digests.append(take())
        self._names += names
        self._known.update(names)
        self._seconds += time.monotonic() - started_s

    def hold(self, names: Collection[str], tensors: Sequence[torch.Tensor], sizes: Sizes) -> None:
        """Holds weights, to take the digests of many weights at once later.

        A launch for every few weights would take longer than reading them. At most `AT_ONCE_BYTES` and the tensors of
        one call are held. The tensors must not change meanwhile.

        Args:
            names: HF names of the weights.
            tensors: Tensors in whose memory they are, one after another.
            sizes: Bytes of the weights in each tensor, as for `digest.digests_of`.
        """
        self._held.append((names, tensors, sizes))
        self._known.update(names)
        if sum(tensor.nbytes for _, held, _ in self._held for tensor in held) > AT_ONCE_BYTES:
            self.digest_held()

    def digest_held(self) -> None:
        """Takes the digests of the weights that are held. Does not wait for a GPU."""
        held, self._held = self._held, []
        tensors = [tensor for _, some, _ in held for tensor in some]
        sizes = [parts for _, _, some in held for parts in some]
        if tensors:
            self.add([name for names, _, _ in held for name in names], partial(digests_of, tensors, sizes=sizes))

    def passing(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, at_once_bytes: int = AT_ONCE_BYTES
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Takes the digests of weights, then yields the weights unchanged. Reads ahead, to digest many weights at once.

        Args:
            weights: Name and tensor of each weight.
            at_once_bytes: Weights are read ahead until they exceed this number of bytes.
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

    def passing_on_their_streams(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, at_once_bytes: int = AT_ONCE_BYTES
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields weights unchanged as they come. Takes their digests later, on the GPU stream that each weight came on.

        It is for hosts that send weights from several streams. Such a host would send a weight that was read ahead from
        another stream than the one that made it. The host must take all weights. It must not change them before the
        iterator has ended. The digests are then complete.

        Args:
            weights: Name and tensor of each weight.
            at_once_bytes: Weights are held until they exceed this number of bytes. Then one call takes their digests.
        """
        held: list[tuple[str, torch.Tensor]] = []
        held_bytes, of_held = 0, None
        used: list[torch.cuda.Stream] = []
        for name, tensor in weights:
            stream = _stream_of(tensor)
            if held and (stream != of_held or held_bytes > at_once_bytes):
                self._note_on(of_held, held)
                held, held_bytes = [], 0
            if stream is not None and stream not in used:
                used.append(stream)
            held.append((name, tensor))
            held_bytes, of_held = held_bytes + tensor.nbytes, stream
            yield name, tensor
        self._note_on(of_held, held)
        for stream in used:
            stream.synchronize()

    def _note_on(self, stream: torch.cuda.Stream | None, weights: list[tuple[str, torch.Tensor]]) -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self._noted(weights)

    def _noted(self, weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        self.add([name for name, _ in weights], partial(digests_of, [tensor for _, tensor in weights]))
        return weights

    def sent(self) -> SentWeights:
        """Returns the digests. Waits for the device."""
        self.digest_held()
        started_s = time.monotonic()
        if self._digests and self._digests[0].is_cuda:
            torch.cuda.synchronize(self._digests[0].device)  # the host may have sent weights from other streams
        found = torch.cat(self._digests).tolist() if self._digests else []
        by_name = dict(zip(self._names, found, strict=True))
        return SentWeights(digests=by_name, seconds=self._seconds + time.monotonic() - started_s)


def _stream_of(tensor: torch.Tensor) -> torch.cuda.Stream | None:
    """Returns the current stream of a tensor's device; None for a CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
