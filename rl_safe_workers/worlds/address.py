"""The address of a run's store. Pure Python, so that a driver can pass it on without torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """The address where the store listens, and the secret that signs its messages.

    Example: ``StoreAddress(host="127.0.0.1", port=40123, secret=new_secret())``
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    """The run's secret, 32 bytes. With it, a process can forge messages. Keep it out of logs, errors and variables."""
