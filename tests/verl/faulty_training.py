"""A training rank that does something else in an update; `echo_rollout` installs it in the ranks of a whole job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VICTIM, CALL = 1, 2
"""The training rank, and its update by number, counted from 1."""


def install(file: Path) -> None:
    """Has an update go wrong.

    Args:
        file: Holds what happens: ``train killed``, ``train stopped``, ``train raises``, ``train elsewhere``; with any
            other text nothing does. The file beside it that ends in ``.since`` gets the time.
    """
    kind, _, misdeed = (file.read_text() if file.is_file() else "").partition(" ")
    if kind != "train" or int(os.environ["RANK"]) != VICTIM:
        return
    from rl_safe_workers.adapters.verl.engine import SafeEngineMixin

    stock, calls = SafeEngineMixin.train_batch, [0]

    def train_batch(engine: Any, data: Any, loss_function: Callable[..., Any]) -> Any:
        calls[0] += 1
        if calls[0] != CALL:
            return stock(engine, data, loss_function)
        Path(f"{file}.since").write_text(str(time.time()))
        if misdeed == "elsewhere":
            return engine.infer_batch(data, loss_function)

        def go_wrong(*args: Any, **kwargs: Any) -> Any:
            if misdeed == "raises":
                raise ValueError("no such expert")
            time.sleep(1.5)  # so that it has noted where it is
            os.kill(os.getpid(), signal.SIGKILL if misdeed == "killed" else signal.SIGSTOP)
            time.sleep(1.5)  # a signal to itself may come a few lines later
            return loss_function(*args, **kwargs)

        return stock(engine, data, go_wrong)

    SafeEngineMixin.train_batch = train_batch  # type: ignore[method-assign]
