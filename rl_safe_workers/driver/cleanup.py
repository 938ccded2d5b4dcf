"""Steps of a clean-up that must go on whatever one of them does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


def attempt(what: str, action: Callable[[], object], *, timeout_s: float) -> bool:
    """Does one step of a clean-up: bounded in time, its failure logged, the next step never kept from running.

    Args:
        what: The step, for the log, e.g. ``"shutting down Ray"``.
        action: Runs on a thread of its own, which is left behind if it does not end in time.
        timeout_s: Longest wait, in seconds.

    Returns:
        Whether it succeeded in time.
    """
    failures: list[Exception] = []

    def run() -> None:
        try:
            action()
        except Exception as error:  # the process is ending: whatever it is, the other steps matter more
            failures.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        logger.warning("%s did not finish within %.0f s", what, timeout_s)
    for error in failures:
        logger.warning("%s failed: %s: %s", what, type(error).__name__, error)
    return not thread.is_alive() and not failures
