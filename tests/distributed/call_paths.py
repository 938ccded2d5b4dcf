"""Follows the calls of one rank's life with ``sys.setprofile``, and keeps the modules between call and work."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from rl_safe_workers.config import RunConfig
from rl_safe_workers.rollout.protocol import plan_buckets
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.joint_group import JointGroup, joint_world
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.worker import Worker, control_plane

TRAINERS, BUCKET_BYTES, MOST = 2, 200_000, 3
PATIENCE = timedelta(seconds=60)
PACKAGE = "rl_safe_workers."
NOT_COUNTED = ("control", "errors")
WORK = {
    "bootstrap": {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"},
    "sync": {"broadcast"},
    "save": {"sharded_state_dict", "torch.save", "fsync of a shard", "finish", "rename of the checkpoint"},
    "load": {"open of a shard", "preadv"},
    "exit": {"shutdown", "destroy_process_group"},
}
"""The calls that do the work of each operation. Where a name alone says too little, its caller is part of it."""
Path_ = tuple[str, ...]


def modules(frame: FrameType | None) -> list[str]:
    """Modules of ours on a stack, outermost first."""
    found = []
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(PACKAGE) and not name.removeprefix(PACKAGE).startswith(NOT_COUNTED):
            found.append(name.removeprefix(PACKAGE))
        frame = frame.f_back
    return found[::-1]


def name_of(function: str, caller: str) -> str:
    """Names a foreign call by what it is for, which its caller tells."""
    match function, caller:
        case "save", "checkpoint.save.writer":
            return "torch.save"
        case "fsync", "checkpoint.save.writer":
            return "fsync of a shard"
        case "rename", "checkpoint.folders.retention":
            return "rename of the checkpoint"
    return function


class Follower:
    """Notes by which modules of ours each foreign call is reached, as a context manager."""

    def __init__(self) -> None:
        self.paths: dict[str, set[Path_]] = {}
        self._before = threading.local()
        """The path to the start of this thread."""

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            caller, name = frame, function.__name__
        elif event == "call" and frame.f_globals.get("__name__", "").startswith(("torch.", "megatron.")):
            if frame.f_back is None:
                return
            caller, name = frame.f_back, frame.f_code.co_name
        else:
            return
        path = tuple(dict.fromkeys((*getattr(self._before, "path", ()), *modules(caller))))
        if path:
            file = caller.f_locals.get("path")
            is_shard = name == "open" and isinstance(file, Path) and file.suffix == ".distcp"
            self.paths.setdefault("open of a shard" if is_shard else name_of(name, path[-1]), set()).add(path)

    def __enter__(self) -> Follower:
        self._start, self._run = threading.Thread.start, threading.Thread.run
        follower = self

        def start(thread: threading.Thread) -> None:
            before = getattr(follower._before, "path", ())
            thread.path_before = (*before, *modules(sys._getframe(1)))  # type: ignore[attr-defined]
            follower._start(thread)

        def run(thread: threading.Thread) -> None:
            follower._before.path = getattr(thread, "path_before", ())
            follower._run(thread)

        threading.Thread.start, threading.Thread.run = start, run  # type: ignore[method-assign]
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        threading.Thread.start, threading.Thread.run = self._start, self._run  # type: ignore[method-assign]


def follow(operation: str, call: Callable[[], Any]) -> tuple[dict[str, set[Path_]], Any]:
    with Follower() as follower:
        value = call()
    return {name: paths for name, paths in follower.paths.items() if name in WORK[operation]}, value


def life(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[str, dict[str, set[Path_]]]:
    if rank == TRAINERS:
        return receive(address)
    worker = Worker(config, rank=rank, size=TRAINERS)
    worker.init_world(address, backend="gloo")
    worker.init_groups(seed=0)
    found = {}
    found["bootstrap"], _ = follow("bootstrap", worker.bootstrap)
    worker.convert()
    worker.safe.store.set(f"specs/{rank}", pickle.dumps(worker.weight_specs()))
    worker.join(TRAINERS + 1)
    found["sync"], _ = follow("sync", lambda: worker.send_weights(bucket_bytes=BUCKET_BYTES))
    found["save"], path = follow(
        "save", lambda: worker.save_checkpoint(root, step=1, fingerprint="f", layout={}, driver_state={})
    )
    found["load"], _ = follow("load", lambda: worker.load_checkpoint(path, fingerprint="f", layout={}))
    found["exit"], verdict = follow("exit", worker.teardown)
    assert verdict == {}
    return found


def receive(address: StoreAddress) -> dict[str, dict[str, set[Path_]]]:
    store = connect_store(address, timeout=PATIENCE)
    control = control_plane(address, rank=TRAINERS, size=TRAINERS + 1, trainers=TRAINERS, world=joint_world(0))
    group = JointGroup(control, generation=0, timeout=PATIENCE, device=torch.device("cpu"))
    for bucket in plan_buckets(pickle.loads(store.get("specs/0")), bucket_bytes=BUCKET_BYTES):
        group.broadcast(torch.empty(bucket.size_bytes, dtype=torch.uint8), source=bucket.source)()
    return {}
