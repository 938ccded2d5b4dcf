"""Ranks whose saves in the background are held until the test lets them go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_safe_workers.checkpoint.save import saver
from rl_safe_workers.config import RunConfig
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.worker import Worker

SIZE = 2
IDENTITY = {"fingerprint": "tiny", "layout": {"world_size": SIZE}}
FOR_EVER_S = 600.0
"""Longer than a test may take: who waits for a timeout of this does not get to the end."""


class HeldWriter:
    """Takes the place of the writer of shards on this rank, and writes when it is let."""

    def __init__(self) -> None:
        self._write, self._may_write = saver.write_items, threading.Event()
        self._writing = self.most_at_once = 0
        saver.write_items = self

    def __call__(self, path: Path, items: Any) -> Any:
        self._writing += 1
        self.most_at_once = max(self.most_at_once, self._writing)
        self._may_write.wait()
        self._writing -= 1
        return self._write(path, items)

    def hold(self) -> None:
        self._may_write.clear()

    def release_soon(self) -> None:
        """While this rank waits for something."""
        threading.Timer(0.3, self._may_write.set).start()


def saving_worker(rank: int, address: StoreAddress, config: RunConfig) -> Worker:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    worker.convert()
    return worker


def save_held(worker: Worker, root: Path, step: int) -> Path:
    driver_state = {"step": step}
    path = worker.save_checkpoint(root, step=step, driver_state=driver_state, **IDENTITY)
    driver_state["step"] = -1
    return path


def train_step(worker: Worker, seed: int = 0) -> None:
    worker.step(reference.random_batch(rows=8, seed=seed))


def poll_to_the_end(worker: Worker) -> None:
    while worker.poll_checkpoint():
        time.sleep(0.01)


def threads_of() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"]


def live_and_save(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[str, Any]:
    """Six saves, each written only once someone waits for it."""
    worker, writer, found = saving_worker(rank, address, config), HeldWriter(), {}
    train_step(worker)
    saved = worker.digest()
    path = save_held(worker, root, 1)
    found["exists at once"] = path.exists()
    found["polls"] = [worker.poll_checkpoint() for _ in range(3)]
    train_step(worker, seed=1)
    found["moved"] = worker.digest() != saved
    waits: dict[str, Callable[[], Any]] = {
        "offload": worker.offload,
        "the next save": lambda: save_held(worker, root, 10),
        "load": lambda: worker.load_checkpoint(root / "global_step_1", **IDENTITY),
        "finalize": worker.finalize_checkpoint,
        "teardown": worker.teardown,
    }
    for step, (name, wait) in enumerate(waits.items(), start=1):
        if step > 1:
            writer.hold()
            path = save_held(worker, root, step)
        before = path.exists()
        writer.release_soon()
        found[f"result of {name}"] = wait()
        found[name] = (before, path.exists())
        if name == "offload":
            worker.onload()
        if name == "load":
            found["comes back"] = worker.digest() == saved
    return {**found, "most at once": writer.most_at_once, "threads": threads_of()}


def of_ranks(lives: tuple[list[dict[str, Any]], Path], name: str) -> list[Any]:
    return [rank[name] for rank in lives[0]]
