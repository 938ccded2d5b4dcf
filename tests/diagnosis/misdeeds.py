"""Misdeeds of a rank, the same for every host. Needs nothing but Python, and torch for its own exceptions."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

VARIABLE = "RL_SAFE_TEST_MISDEED"
STORAGE = "storage.fifo"
"""A pipe that somebody has to open, so that the child ends."""
NOTED_S = 1.5
"""Longer than a rank takes to note where it is."""
LONG_S = 3600.0

_seen: Counter[str] = Counter()


def here(role: str, rank: int, phase: str, call: str = "") -> None:
    """Commits the run's misdeed if it is this rank's, and due now.

    Args:
        role: ``trainer`` or ``rollout``.
        rank: Within the role.
        phase: Where the rank is.
        call: The call that an engine is in, where a phase has several.
    """
    fault = json.loads(os.environ.get(VARIABLE) or "{}")
    if not fault or (role, rank, phase) != (fault["role"], fault["rank"], fault["phase"]):
        return
    if call != fault["call"]:
        return
    _seen[phase] += 1
    if _seen[phase] == fault["at"]:
        strike(fault["act"], fault["detail"], Path(fault["folder"]))


def strike(act: str, detail: str, folder: Path) -> None:
    """Commits a misdeed, and leaves in ``folder/struck`` when it did, in ``folder/culprit`` the process."""
    if act in ("kill", "stop", "exit", "crash"):
        time.sleep(NOTED_S)
    (folder / "culprit").write_text(str(os.getpid()))
    unfinished = folder / "striking"
    unfinished.write_text(str(time.time()))
    unfinished.rename(folder / "struck")
    ACTS[act](detail)


def hang(detail: str) -> None:
    time.sleep(LONG_S)


def fail(detail: str) -> NoReturn:
    raise RAISED[detail]()


def kill(detail: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(detail: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(NOTED_S)  # a signal to itself may come a few lines later


def leave(detail: str) -> NoReturn:
    os._exit(3)


def crash(detail: str) -> None:
    ctypes.string_at(0)


def wait_for_storage(detail: str) -> None:
    """Waits in state D, as for a file server that does not answer: for a child of vfork that opens a pipe."""
    pipe = f"{json.loads(os.environ[VARIABLE])['folder']}/{STORAGE}"
    os.mkfifo(pipe)
    actions = [(os.POSIX_SPAWN_OPEN, 0, pipe, os.O_RDONLY, 0)]
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions)


def _nccl() -> Exception:
    import torch

    return torch.distributed.DistBackendError(
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nLast error:\nFailed to CUDA calloc async 4194304 bytes"
    )


def _cuda_memory() -> Exception:
    import torch

    return torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 8.60 GiB. GPU 0 has a total capacity of 79.10 GiB of which 4.11 GiB is "
        "free."
    )


RAISED: dict[str, Callable[[], Exception]] = {
    "": lambda: ValueError("no such expert"),
    "nccl": _nccl,
    "cuda_memory": _cuda_memory,
    "optimizer": lambda: KeyError("optimizer"),
    "disk": lambda: OSError(28, "No space left on device", "/ckpt/__1_0.distcp"),
    "import": lambda: ModuleNotFoundError("No module named 'deep_ep'", name="deep_ep"),
    "deepep": lambda: RuntimeError("DeepEP error: timeout (dispatch CPU)"),
    "corrupt": lambda: ValueError("__1_0.distcp: 4096 bytes of tensor decoder.layers.3 are missing"),
}
TOLD = {
    "": "ValueError: no such expert",
    "nccl": "NCCL error in",
    "cuda_memory": "CUDA out of memory",
    "optimizer": "KeyError: 'optimizer'",
    "disk": "No space left on device",
    "import": "No module named 'deep_ep'",
    "deepep": "DeepEP error: timeout",
    "corrupt": "bytes of tensor decoder.layers.3 are missing",
}
"""Words of each exception that a verdict has to repeat."""
ACTS: dict[str, Callable[[str], None]] = {
    "hang": hang,
    "raise": fail,
    "kill": kill,
    "stop": stop,
    "exit": leave,
    "crash": crash,
    "storage": wait_for_storage,
}
