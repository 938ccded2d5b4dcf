"""Who has come, in one key of a store: read with one request, however many ranks there are."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed import Store


def attend(store: Store, key: str, rank: int) -> None:
    """Adds a rank to those that have come."""
    store.append(key, f"{rank} ")  # type: ignore[attr-defined]


def absentees(store: Store, key: str, ranks: Iterable[int]) -> list[int]:
    """Those of the ranks that have not come. Does not wait."""
    came = frozenset(map(int, store.get(key).split())) if store.check([key]) else frozenset()
    return [rank for rank in ranks if rank not in came]
