"""Who has come, in one key of a store: read with one request, however many ranks there are."""

from __future__ import annotations

from torch.distributed import Store


def attend(store: Store, key: str, rank: int) -> None:
    """Adds a rank to those that have come."""
    store.append(key, f"{rank} ")  # type: ignore[attr-defined]


def attendants(store: Store, key: str) -> frozenset[int]:
    """The ranks that have come. Does not wait."""
    return frozenset(map(int, store.get(key).split())) if store.check([key]) else frozenset()
