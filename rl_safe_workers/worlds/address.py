"""Where the store of a run is. Pure Python, so that a driver can pass it on without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the store listens, e.g. ``StoreAddress(host="127.0.0.1", port=40123)``."""

    host: str
    port: int
