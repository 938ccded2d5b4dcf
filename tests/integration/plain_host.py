"""A host of four plain processes, without Ray and without a driver of ours: it starts them and asks who is to blame.

``plain_host.py FATES SECONDS FOLDER [serves]``, e.g. ``waits,killed,waits,waits 60 /tmp/x``; prints the diagnosis as
JSON. With ``serves`` rank 0 owns the store, else this process does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.without_driver import forbid_driver

forbid_driver()

import psutil  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

from rl_safe_workers.control.plane import ControlPlane  # noqa: E402
from rl_safe_workers.control.seal import new_secret  # noqa: E402
from rl_safe_workers.diagnostics.answering import last_noted_s  # noqa: E402
from rl_safe_workers.diagnostics.diagnosis import diagnose  # noqa: E402
from rl_safe_workers.diagnostics.inquiry import RankProcess  # noqa: E402
from rl_safe_workers.ranks import trainer_id, trainer_ids  # noqa: E402

RANK = "tests.integration.plain_rank"


def main(fates: list[str], patience_s: float, folder: Path, options: list[str]) -> None:
    secret = new_secret()
    (folder / "secret").touch(mode=0o600)
    (folder / "secret").write_bytes(secret)
    store = None if options else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free_port() if store is None else store.port
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", RANK, str(port), str(rank), fate, str(patience_s), str(folder), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank, fate in enumerate(fates)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for rank in range(4):
            await_note(folder, rank, processes[rank])
        store = store or TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        plane = ControlPlane(store, world="training world", rank=-1, members=trainer_ids(range(4)), secret=secret)
        for process, fate in zip(processes, fates, strict=True):
            meet(fate, process, ends_itself=patience_s < 10)
        ranks = [
            RankProcess(rank_id=trainer_id(rank), pid=process.pid, folder=folder, poll=process.poll)
            for rank, process in enumerate(processes)
        ]
        found = diagnose(ranks, reports=plane.reported_failures, patience_s=8.0, evidence=folder / "hang")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = {
        "verdict": found.verdict,
        "culprits": sorted(one.rank for one in found.culprits),
        "ranks": [found.ranks[trainer_id(rank)] for rank in range(4)],
    }
    sys.stdout.write(json.dumps(told))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def await_note(folder: Path, rank: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until a rank has noted twice where it is, so that the second note is of where it stays, or has ended."""
    for _ in range(2):
        noted_s = last_noted_s(folder, trainer_id(rank))
        while last_noted_s(folder, trainer_id(rank)) in (None, noted_s) and process.poll() is None:
            time.sleep(0.05)


def meet(fate: str, process: subprocess.Popen[bytes], *, ends_itself: bool) -> None:
    """Lets a rank meet its fate, and waits until it has."""
    if fate == "killed":
        process.send_signal(signal.SIGKILL)
    if fate == "stopped":
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
    if fate in ("killed", "raises") or (fate == "waits" and ends_itself):
        process.wait(60)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(sys.argv[1].split(","), float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
