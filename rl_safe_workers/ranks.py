"""Owns `RankId`, the identity of a process in a run: its role and its rank in that role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

TRAINING_WORLD = "training world"
"""The name of the world of all training ranks, in errors and in keys of the store."""
MOST_RANKS = 2**17
"""Most ranks that a text may name."""


class Role(StrEnum):
    """The role of a process in a run."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"
    AGENT_LOOP = "agent_loop"
    """Hands prompts to rollout engines for a host framework."""
    REWARD = "reward"
    """Rewards responses for a host framework."""

    @property
    def noun(self) -> str:
        """The noun for such a process in a sentence, without its number.

        >>> Role.TRAINER.noun, Role.AGENT_LOOP.noun
        ('training rank', 'agent loop worker')
        """
        if self is Role.TRAINER:
            return "training rank"
        return f"{self.replace('_', ' ')} worker" if self in HELPERS else f"{self} rank"


HELPERS = frozenset({Role.AGENT_LOOP, Role.REWARD})
"""Roles of a host framework's processes that neither train nor generate: a rollout waits for them."""


class RankId(NamedTuple):
    """One rank of a run. Trainers sort before all others, which sort by rank.

    >>> str(RankId(Role.TRAINER, 1))
    'training rank 1'
    >>> min(RankId(Role.ROLLOUT, 0), RankId(Role.TRAINER, 3)).role.value
    'trainer'
    """

    role: Role
    rank: int
    """The rank within its role."""

    def __str__(self) -> str:
        return f"{self.role.noun} {self.rank}"

    def __lt__(self, other: tuple[Any, ...]) -> bool:
        return _place(self) < _place(other)

    def __le__(self, other: tuple[Any, ...]) -> bool:
        return _place(self) <= _place(other)

    def __gt__(self, other: tuple[Any, ...]) -> bool:
        return _place(self) > _place(other)

    def __ge__(self, other: tuple[Any, ...]) -> bool:
        return _place(self) >= _place(other)


def _place(rank_id: tuple[Any, ...]) -> tuple[bool, int]:
    role, rank = rank_id
    return role != Role.TRAINER, rank


def trainer_id(training_rank: int) -> RankId:
    """Returns the id of a training rank."""
    return RankId(Role.TRAINER, training_rank)


def trainer_ids(training_ranks: Iterable[int]) -> tuple[RankId, ...]:
    """Returns the ids of training ranks, in their order."""
    return tuple(map(trainer_id, training_ranks))


def joint_ids(*, trainers: int, size: int, rollout_ranks: Sequence[int] | None = None) -> tuple[RankId, ...]:
    """Returns the ids of a joint group's members by joint rank: the trainers first, then the rollout ranks.

    Args:
        trainers: Number of trainers.
        size: Number of trainers and rollout ranks.
        rollout_ranks: Rollout ranks in it, ascending; None: all, from 0.
    """
    present = range(size - trainers) if rollout_ranks is None else rollout_ranks
    return (*trainer_ids(range(trainers)), *(RankId(Role.ROLLOUT, rank) for rank in present))


def format_ranks(ranks: Iterable[int]) -> str:
    """Returns ranks as text, with consecutive ones as ranges.

    >>> format_ranks([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def ranks_of(text: str) -> Iterator[int]:
    """Yields the ranks that `format_ranks` has written.

    >>> list(ranks_of("0-2, 5"))
    [0, 1, 2, 5]

    Raises:
        ValueError: If the text has another format, or names more than `MOST_RANKS` ranks.
    """
    left = MOST_RANKS
    for span in text.split(", ") if text else ():
        first, dash, last = span.partition("-")
        ranks = range(int(first), int(last if dash else first) + 1)
        if (left := left - max(0, ranks.stop - ranks.start)) < 0:  # len() refuses what is too large for a machine word
            raise ValueError(f"more than {MOST_RANKS} ranks")
        yield from ranks


def name_ranks(ranks: Iterable[RankId]) -> str:
    """Returns the names of ranks as text, by role, trainers first.

    >>> name_ranks([RankId(Role.ROLLOUT, 1), RankId(Role.TRAINER, 3), RankId(Role.TRAINER, 2)])
    'training rank 2-3, rollout rank 1'
    """
    ranks = list(ranks)
    by_role = [(role, [one.rank for one in ranks if one.role == role]) for role in Role]
    return ", ".join(f"{role.noun} {format_ranks(of_role)}" for role, of_role in by_role if of_role)
