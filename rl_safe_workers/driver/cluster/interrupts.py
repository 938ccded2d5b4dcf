"""Handles SIGINT (Ctrl-C), SIGTERM and SIGHUP: records the signal at once, and acts on it where that is safe.

The handler only records the signal. An exception from a signal handler would surface inside Ray's compiled code, which
converts it to another one. Therefore every wait of the driver is split into short slices and calls `check` between
them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rl_safe_workers.errors import Interrupted

SLICE_S = 0.2
"""Longest time in seconds that a wait goes without a `check`."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Records the signal that asks the run to stop."""

    def __init__(self) -> None:
        self._signum: int | None = None

    def check(self) -> None:
        """Raises Interrupted if a signal has arrived."""
        if self._signum is not None:
            raise Interrupted(signum=self._signum)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Records signals while the body runs, then restores the previous handlers. Main thread only."""
        previous = {signum: signal.getsignal(signum) for signum in _SIGNALS}
        self.listen()
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def listen(self) -> None:
        """Installs the handler. Call it again after a library has installed its own, as Ray does for SIGTERM."""
        for signum in _SIGNALS:
            signal.signal(signum, self._take_note)

    def _take_note(self, signum: int, frame: FrameType | None) -> None:
        self._signum = signum
