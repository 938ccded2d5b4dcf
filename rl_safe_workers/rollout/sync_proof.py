"""Proves a weight sync: compares digests of the weights that the trainers sent with digests of an engine's weights.

Imports neither torch nor vLLM, so that the driver can import it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from rl_safe_workers.errors import WeightSyncError, in_short

logger = logging.getLogger(__name__)

SHOWN = 3
"""Number of wrong weights that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """The weights that one trainer sent in a sync.

    Example: ``SentWeights(digests={"lm_head.weight": -7}, seconds=0.01)``
    """

    digests: Mapping[str, int]
    """Digest of each weight by its HF name, taken before it was packed or sent; empty if the sync is not proved."""
    seconds: float
    """Seconds that the digests took."""


class HeldCut(NamedTuple):
    """The cut of a weight that a rank of a tensor-parallel engine holds.

    Example: ``HeldCut(name="lm_head.weight", digest=-7, first=64, length=64, whole_length=128)``
    """

    name: str
    """HF name of the weight."""
    digest: int
    """The cut's summand in the digest of the whole weight."""
    first: int
    """First row or column of the cut."""
    length: int
    """Number of rows or columns of the cut."""
    whole_length: int
    """Number of rows or columns of the whole weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """The weights that an engine, or a rank of an engine, holds after a sync.

    Example: ``HeldWeights(digests=(("lm_head.weight", -7),), converted=0, unread=(), faults=(), seconds=0.01)``
    """

    digests: tuple[tuple[str, int], ...] = ()
    """HF name and digest of each whole weight, at each of its places in the model."""
    cuts: tuple[HeldCut, ...] = ()
    """The cuts that a rank of a tensor-parallel engine holds, at each of their places."""
    converted: int
    """Number of these digests that were taken before vLLM converted the weight to the layout of its kernel."""
    unread: tuple[str, ...]
    """HF names of the weights that cannot be read back."""
    faults: tuple[str, ...]
    """One sentence for each fault, e.g. a parameter that gets no weight."""
    seconds: float
    """Seconds that the digests took."""

    @classmethod
    def of_workers(cls, answers: Sequence[Mapping[str, Any] | None]) -> HeldWeights | None:
        """Joins the answers of `proved_worker.ProvedWorker.rl_safe_held` of an engine's workers; None if all are None.

        Args:
            answers: The answers by rank. They may have come as JSON or msgpack, which turns tuples into lists.
        """
        if all(answer is None for answer in answers):
            return None
        ranks = [NOTHING_CAME if answer is None else cls._of_worker(**answer) for answer in answers]
        return ranks[0] if len(ranks) == 1 else cls.of_engine(ranks)

    @classmethod
    def _of_worker(cls, *, cuts: Sequence[Sequence[Any]], **others: Any) -> HeldWeights:
        return cls(cuts=tuple(HeldCut(*cut) for cut in cuts), **others)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields by name. Unlike ``dataclasses.asdict``, it does not copy the thousands of values."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def of_engine(cls, ranks: Sequence[HeldWeights]) -> HeldWeights:
        """Joins the weights that the ranks of one engine hold."""
        copies: dict[tuple[str, int], list[HeldCut]] = {}
        for held in ranks:
            seen: Counter[str] = Counter()
            for cut in held.cuts:
                # A weight may have several places.
                copies.setdefault((cut.name, seen[cut.name]), []).append(cut)
                seen[cut.name] += 1
        digests = [one for held in ranks for one in held.digests]
        unread = [name for held in ranks for name in held.unread]
        for (name, _), cuts in copies.items():
            parts = {cut.first: cut for cut in cuts}
            if sum(cut.length for cut in parts.values()) != cuts[0].whole_length:
                unread.append(name)  # a rank could not read its part
                continue
            # Ranks that hold copies of the same cut may differ. So the whole is computed once with each copy.
            wholes = (sum(cut.digest for cut in (parts | {one.first: one}).values()) for one in cuts)
            digests += [(name, whole) for whole in dict.fromkeys(map(_signed, wholes))]
        return cls(
            digests=tuple(digests),
            converted=sum(held.converted for held in ranks),
            unread=tuple(dict.fromkeys(unread)),
            faults=tuple(fault for held in ranks for fault in held.faults),
            seconds=max(held.seconds for held in ranks),
        )

    def differences(self, sent: Mapping[str, int]) -> list[str]:
        """Returns the faults, and a sentence for each weight that the engine does not hold as sent.

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
        found = [*dict.fromkeys(found)]  # ranks of an engine may hold copies of a weight
        return found + [f"{name}: sent, and not held" for name in sent if name not in answered]


NOTHING_CAME = HeldWeights(
    digests=(), converted=0, unread=(), faults=("no weights have come in this sync",), seconds=0.0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncProof:
    """The digests of one sync, from the trainers and from the engines."""

    sent: Sequence[SentWeights]
    """By training rank."""
    held: Sequence[HeldWeights]
    """By engine."""
    ranks: int = 1
    """Number of rollout ranks of an engine."""
    engines: Sequence[int] | None = None
    """Numbers of the engines in ``held``; None: from 0. Messages number the rollout ranks by them."""

    def differences(self) -> list[str]:
        """Returns a sentence for each weight that an engine does not hold as sent, with the engine's ranks."""
        sent = {name: digest for one in self.sent for name, digest in one.digests.items()}
        return [
            f"{self._who(engine)}: {text}" for engine, held in enumerate(self.held) for text in held.differences(sent)
        ]

    def _who(self, engine: int) -> str:
        first = (engine if self.engines is None else self.engines[engine]) * self.ranks
        return f"rollout rank {first}" if self.ranks == 1 else f"rollout ranks {first}-{first + self.ranks - 1}"

    @property
    def proved(self) -> int:
        """Number of weights whose digests were compared, over all engines."""
        return sum(len({name for name, _ in held.digests}) for held in self.held)

    @property
    def not_proved(self) -> int:
        """Number of weights that could not be read back, over all engines."""
        return sum(len(held.unread) for held in self.held)

    @property
    def seconds(self) -> float:
        """Seconds that the digests took: the slowest trainer's plus the slowest engine's."""
        return max(one.seconds for one in self.sent) + max(held.seconds for held in self.held)

    def __str__(self) -> str:
        """Returns the number of proved weights in words, and names one weight that is not proved."""
        unread = [name for held in self.held for name in held.unread]
        converted = sum(held.converted for held in self.held)
        before = f", {converted} of them before vLLM converted them for its kernels" if converted else ""
        without = f"; not proved: {len(unread)}, among them {unread[0]}" if unread else ""
        return f"{self.proved} weights are held as they were sent{before}{without}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvedSync:
    """A sync that has put the right weights into every engine."""

    proof: SyncProof
    redone: int
    """1 if the sync was wrong once and was redone; else 0."""
    seconds: float
    """Seconds that the digests took, including those of the wrong sync."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that a host logs."""
        return {
            "rl_safe/sync_proved": float(self.proof.proved),
            "rl_safe/sync_not_proved": float(self.proof.not_proved),
            "rl_safe/sync_redone": float(self.redone),
            "timing_s/rl_safe_sync_proof": self.seconds,
        }


class ProvedSyncs:
    """Chooses the syncs of a run that are proved. Redoes a sync that is found wrong, once."""

    def __init__(self, *, every: int) -> None:
        """Starts to count syncs.

        Args:
            every: Interval of proved syncs, the first one included; 0: only the first is proved, -1: none.
        """
        self._every, self._number = every, 0

    def run(
        self,
        sync: Callable[[bool], SyncProof | None],
        *,
        what: str = "the weight sync",
        before_redoing: Callable[[], object] = lambda: None,
        agree: Callable[[str], str] = lambda wrong: wrong,
    ) -> ProvedSync | None:
        """Runs the next sync. Proves it if a proof is due.

        Args:
            sync: Syncs once. Called with True if the sync must be proved; then it returns the digests.
            what: Name of the sync in messages.
            before_redoing: Called between a wrong sync and its repetition.
            agree: Called with the differences on this rank, empty if there are none. Returns the differences on any
                rank, if several ranks do the sync together.

        Returns:
            The proved sync; None if this sync was not to be proved.

        Raises:
            WeightSyncError: If an engine holds other weights than were sent, twice in a row.
        """
        every, number = self._every, self._number
        self._number += 1
        is_due = number == 0 if every == 0 else every > 0 and number % every == 0
        proof = sync(is_due)
        if proof is None:
            return None
        seconds, redone = proof.seconds, 0
        if wrong := agree(in_short(proof.differences(), shown=SHOWN)):
            logger.warning("%s is redone: %s", what, wrong)
            before_redoing()
            redone, proof = 1, sync(True)
            assert proof is not None, "it was asked for"
            seconds += proof.seconds
            if wrong := agree(in_short(proof.differences(), shown=SHOWN)):
                raise WeightSyncError(f"{what} has put wrong weights into an engine, twice: {wrong}")
        logger.log(logging.INFO if number == 0 else logging.DEBUG, "%s: %s", what, proof)
        return ProvedSync(proof=proof, redone=redone, seconds=seconds)


def _signed(digest: int) -> int:
    return (digest + 2**63) % 2**64 - 2**63


def _hex(digest: int) -> str:
    return f"{digest % 2**64:016x}"
