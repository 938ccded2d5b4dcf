"""Ctrl-C, SIGTERM and a closed terminal: noticed at once, acted on where it is safe.

The handler only takes note. An exception out of a signal handler would surface inside Ray's compiled code, which
turns it into something else; so every wait of the driver goes in short slices and calls `check` between them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rl_safe_workers.errors import Interrupted

SLICE_S = 0.2
"""Longest time that a wait goes without a `check`."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Notes requests to stop the run."""

    def __init__(self) -> None:
        self._signum: int | None = None

    def check(self) -> None:
        """Raises Interrupted if a signal has arrived."""
        if self._signum is not None:
            raise Interrupted(signum=self._signum)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes note of signals while the body runs, and until then nothing else handles them. Main thread only."""
        previous = {signum: signal.getsignal(signum) for signum in _SIGNALS}
        self.listen()
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def listen(self) -> None:
        """Installs the handler; again after a library has installed its own, as Ray does for SIGTERM."""
        for signum in _SIGNALS:
            signal.signal(signum, self._take_note)

    def _take_note(self, signum: int, frame: FrameType | None) -> None:
        self._signum = signum
