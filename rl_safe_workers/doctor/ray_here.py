"""Checks that Ray can start on this machine, for a run that starts its own Ray."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl_safe_workers.doctor.check import Check, Fact, Report, Subject
from rl_safe_workers.findings import Finding, Severity
from rl_safe_workers.reaping.temp_folder import LONGEST_SOCKET, SOCKET

LOOPBACK = "127.0.0.1"
FULL_SHARE = 0.95
"""If more than this share of the temporary folder's file system is used, Ray creates no objects on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The conditions for a start of Ray.

    Example: ``Start(temp=Path("/tmp"), writable=True, used_share=0.5, loopback="")``
    """

    temp: Path
    writable: bool
    used_share: float
    loopback: str
    """Why this machine cannot listen on a port of the loopback interface; empty if it can."""


def _gather(subject: Subject) -> Start:
    temp = Path(tempfile.gettempdir())
    try:
        with socket.create_server((LOOPBACK, 0)):
            loopback = ""
    except OSError as error:
        loopback = error.strerror or str(error)
    return Start(
        temp=temp,
        writable=os.access(temp, os.W_OK | os.X_OK),
        loopback=loopback,
        used_share=psutil.disk_usage(str(temp)).percent / 100,
    )


def judge(start: Start, subject: Subject) -> Report:
    """Judges whether Ray will start."""
    fact = Fact(
        name="Ray", value=f"starts with the run, on {LOOPBACK}, in {start.temp} ({start.used_share:.0%} of it used)"
    )
    return Report(facts=(fact,), findings=(*_temp(start), *_loopback(start)))


def _temp(start: Start) -> Iterator[Finding]:
    length = len(f"{start.temp}{SOCKET}".encode())
    if length > LONGEST_SOCKET:
        yield Finding(
            code="ray-temp-long",
            severity=Severity.STOPS,
            text=f"Ray does not start: its sockets below {start.temp} have paths of {length} bytes, and Unix takes "
            f"{LONGEST_SOCKET}",
            since="every Ray",
            evidence=("ray/_private/utils.py, validate_socket_filepath",),
            avoid="a TMPDIR with a short path",
        )
    if not start.writable:
        yield Finding(
            code="ray-temp-unwritable",
            severity=Severity.STOPS,
            text=f"Ray does not start: {start.temp} cannot be written",
            since="every Ray",
            evidence=("ray/_private/node.py",),
            avoid="TMPDIR",
        )
    if start.used_share > FULL_SHARE:
        yield Finding(
            code="ray-temp-full",
            severity=Severity.RISKS,
            text=f"{start.temp} is {start.used_share:.0%} full: from {FULL_SHARE:.0%} on Ray puts no object there that "
            "its shared memory has no room for",
            since="Ray 2",
            evidence=("Ray, Object spilling, local_fs_capacity_threshold",),
            avoid="TMPDIR on another disk, or more space",
        )


def _loopback(start: Start) -> Iterator[Finding]:
    if start.loopback:
        yield Finding(
            code="ray-loopback",
            severity=Severity.STOPS,
            text=f"Ray does not start: nothing can listen on {LOOPBACK} ({start.loopback})",
            since="always",
            evidence=("driver/cluster/cluster.py",),
            avoid="bring the interface lo up: ip link set lo up",
        )


RAY_HERE = Check(name="Ray", deadline_s=10, gather=_gather, judge=judge)
