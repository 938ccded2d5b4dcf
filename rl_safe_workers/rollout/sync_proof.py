"""The proof of a weight sync: digests of what the trainers sent, against digests of what an engine holds.

Imports neither torch nor vLLM, so that the driver can import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """The weights that one trainer sent in a sync.

    Example: ``SentWeights(digests={"lm_head.weight": -7}, seconds=0.01)``
    """

    digests: Mapping[str, int]
    """Digest of each weight by its HF name, taken before it was packed; empty if the sync is not proved."""
    seconds: float
    """Seconds that this took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """The weights that an engine holds after a sync.

    Example: ``HeldWeights(digests=(("lm_head.weight", -7),), converted=0, unread=(), faults=(), seconds=0.01)``
    """

    digests: tuple[tuple[str, int], ...]
    """HF name and digest of each weight, at each of its places in the model."""
    converted: int
    """Number of these digests that were taken before vLLM converted the weight to the layout of its kernel."""
    unread: tuple[str, ...]
    """HF names of the weights that cannot be read back."""
    faults: tuple[str, ...]
    """Parts of the model for which nothing is sent."""
    seconds: float
    """Seconds that this took."""

    def differences(self, sent: Mapping[str, int]) -> list[str]:
        """Returns a sentence for each weight that is not held as it was sent, and the faults.

        Args:
            sent: Digest of each weight that the trainers sent, by HF name.
        """
        found = list(self.faults)
        for name, digest in self.digests:
            if name not in sent:
                found.append(f"{name}: held, and not sent")
            elif digest != sent[name]:
                found.append(f"{name}: sent {_hex(sent[name])}, held {_hex(digest)}")
        answered = {name for name, _ in self.digests} | set(self.unread)
        return found + [f"{name}: sent, and not held" for name in sent if name not in answered]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncProof:
    """The digests of one sync."""

    sent: Sequence[SentWeights]
    """By training rank."""
    held: Sequence[HeldWeights]
    """By rollout rank."""

    def differences(self) -> list[str]:
        """Returns a sentence for each weight that a rollout rank does not hold as it was sent; names the rank."""
        sent = {name: digest for one in self.sent for name, digest in one.digests.items()}
        return [
            f"rollout rank {rank}: {text}" for rank, held in enumerate(self.held) for text in held.differences(sent)
        ]

    @property
    def proved(self) -> int:
        """Number of digests that were compared, over all rollout ranks."""
        return sum(len(held.digests) for held in self.held)

    @property
    def not_proved(self) -> int:
        """Number of weights that could not be read back, over all rollout ranks."""
        return sum(len(held.unread) for held in self.held)

    @property
    def seconds(self) -> float:
        """Seconds that the digests took: those of the slowest trainer and of the slowest rollout rank."""
        return max(one.seconds for one in self.sent) + max(held.seconds for held in self.held)

    def __str__(self) -> str:
        """Says how much is proved, and names a weight that is not."""
        unread = [name for held in self.held for name in held.unread]
        converted = sum(held.converted for held in self.held)
        before = f", {converted} of them before vLLM converted them for its kernels" if converted else ""
        without = f"; not proved: {len(unread)}, among them {unread[0]}" if unread else ""
        return f"{self.proved} weights are held as they were sent{before}{without}"


def _hex(digest: int) -> str:
    return f"{digest % 2**64:016x}"
