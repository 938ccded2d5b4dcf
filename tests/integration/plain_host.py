"""A host of four plain processes, without Ray and without a driver of ours: it starts them and asks who is to blame.

``plain_host.py FATES SECONDS FOLDER [serves]``, e.g. ``waits,killed,waits,waits 60 /tmp/x``; prints the diagnosis as
JSON. With ``serves`` rank 0 owns the store, else this process does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rl_safe_workers.ports import port_to_listen_on
from tests.integration.without_driver import forbid_driver

forbid_driver()

import psutil  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

from rl_safe_workers.control.plane import ControlPlane  # noqa: E402
from rl_safe_workers.control.seal import new_secret  # noqa: E402
from rl_safe_workers.diagnostics.diagnosis import diagnose  # noqa: E402
from rl_safe_workers.diagnostics.inquiry import RankProcess  # noqa: E402
from rl_safe_workers.diagnostics.rank_files import last_alive_s  # noqa: E402
from rl_safe_workers.ranks import trainer_id, trainer_ids  # noqa: E402
from tests.integration import plain_rank  # noqa: E402


def main(fates: list[str], patience_s: float, folder: Path, options: list[str]) -> None:
    secret = new_secret()
    (folder / "secret").touch(mode=0o600)
    (folder / "secret").write_bytes(secret)
    port, processes = port_to_listen_on("127.0.0.1"), []
    is_ready, ready = os.pipe()
    try:
        for rank, fate in enumerate(fates):
            # Forked, so that the imports are done once. No thread runs yet.
            process = multiprocessing.get_context("fork").Process(
                target=live, args=(ready, port, rank, fate, patience_s, folder), kwargs={"serves": bool(options)}
            )
            process.start()
            processes.append(process)
        store = TCPStore("127.0.0.1", port, is_master=not options, wait_for_workers=False)
        with os.fdopen(is_ready) as lines:
            for _ in fates:
                assert lines.readline() == "ready\n"
        for rank in range(4):
            await_note(folder, rank, processes[rank])
        plane = ControlPlane(store, world="training world", rank=-1, members=trainer_ids(range(4)), secret=secret)
        for process, fate in zip(processes, fates, strict=True):
            meet(fate, process, ends_itself=patience_s < 10)
        ranks = [
            RankProcess(rank_id=trainer_id(rank), pid=pid_of(process), folder=folder, poll=partial(exit_code, process))
            for rank, process in enumerate(processes)
        ]
        found = diagnose(ranks, reports=plane.reported_failures, patience_s=8.0, evidence=folder / "hang")
    finally:
        for process in processes:
            process.kill()
            process.join()
    told = {
        "verdict": found.verdict,
        "culprits": sorted(one.rank for one in found.culprits),
        "ranks": [found.ranks[trainer_id(rank)] for rank in range(4)],
    }
    sys.stdout.write(json.dumps(told))


def live(ready: int, *arguments: Any, **options: Any) -> None:
    """The life of a rank, which says on ``ready`` that it is where it will stay."""
    sys.stdout = os.fdopen(ready, "w")
    plain_rank.main(*arguments, **options)


def pid_of(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


def exit_code(process: BaseProcess) -> int | None:
    return process.exitcode


def await_note(folder: Path, rank: int, process: BaseProcess) -> None:
    """Waits until a rank has noted twice where it is, so that the second note is of where it stays, or has ended."""
    for _ in range(2):
        alive_s = last_alive_s(folder, trainer_id(rank))
        while last_alive_s(folder, trainer_id(rank)) in (None, alive_s) and process.exitcode is None:
            time.sleep(0.05)


def meet(fate: str, process: BaseProcess, *, ends_itself: bool) -> None:
    """Lets a rank meet its fate, and waits until it has."""
    if fate == "killed":
        process.kill()
    if fate == "stopped":
        os.kill(pid_of(process), signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
    if fate in ("killed", "raises") or (fate == "waits" and ends_itself):
        process.join(60)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(sys.argv[1].split(","), float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
