"""Steps of a clean-up that must go on whatever one of them does."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rl_safe_workers.control.deadline import Deadline, DeadlineExceededError, run_bounded

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
    try:
        run_bounded(action, Deadline.after(timeout_s), name=what)
    except DeadlineExceededError:
        logger.warning("%s did not finish within %.0f s", what, timeout_s)
        return False
    except Exception as error:  # the process is ending: whatever it is, the other steps matter more
        logger.warning("%s failed: %s: %s", what, type(error).__name__, error)
        return False
    return True
