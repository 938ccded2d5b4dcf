"""One rank of a run without Ray and without a driver of ours: it comes to a barrier, or to its fate.

The run's secret is in ``FOLDER/secret``. With ``serves`` rank 0 owns the store.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.diagnostics.answering import answer_when_asked
from rl_safe_workers.diagnostics.rank_files import read_place
from rl_safe_workers.ranks import trainer_id, trainer_ids

SIZE = 4


def sleep(folder: Path, rank: int) -> None:
    """Is ready once it is noted that it sleeps: it may be killed then."""

    def tell() -> None:
        while "(sleep)" not in (read_place(folder, trainer_id(rank)) or ""):
            time.sleep(0.05)
        say("ready")

    threading.Thread(target=tell).start()
    time.sleep(300)  # where a sleeping, a killed and a stopped rank are


def fail() -> None:
    say("ready")
    raise ValueError("no such expert")  # where a raising rank fails


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main(port: int, rank: int, fate: str, patience_s: float, folder: Path, *, serves: bool) -> None:
    store = TCPStore(
        "127.0.0.1", port, is_master=serves and rank == 0, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    secret = (folder / "secret").read_bytes()
    plane = ControlPlane(store, world="training world", rank=rank, members=trainer_ids(range(SIZE)), secret=secret)
    answer_when_asked(folder, trainer_id(rank))
    try:
        if fate == "raises":
            fail()
        elif fate != "waits":
            sleep(folder, rank)
        say("ready")
        plane.barrier("train", Deadline.after(patience_s))
    except Exception as error:
        plane.report_failure(error, phase="train")
        raise
