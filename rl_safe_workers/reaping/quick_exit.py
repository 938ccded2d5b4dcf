"""The end of a process that has failed, without what the interpreter and C++ libraries do at an exit."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def exit_at_once(status: int) -> NoReturn:
    """Runs what is registered for the exit, then ends this process.

    The interpreter would take every module apart, of which torch and a host have thousands. That takes seconds, on a
    busy machine many. It would wait for threads that never end. And C++ libraries would free what a thread still uses
    that is stuck in them: after a failure, one may be stuck in NCCL.

    Args:
        status: The exit status.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
