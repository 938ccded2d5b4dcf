"""Chooses the actors in Ray's table that can be looked at on this machine. Imports no Ray."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from rl_safe_workers.diagnostics import proc_facts
from rl_safe_workers.errors import UsageError
from rl_safe_workers.findings import counted

_TITLE = "ray::"
"""Beginning of the command line of a Ray worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenActors:
    """The actors that are looked at.

    Example: ``ChosenActors(classes={4711: "Trainer"}, notes=[])``
    """

    classes: Mapping[int, str]
    """The class of each, by process id."""
    notes: Sequence[str]
    """Sentences about actors that are not looked at."""


def choose(table: Sequence[Mapping[str, Any]], *, job: str | None) -> ChosenActors:
    """Chooses the actors of a job on this machine that have a process.

    An actor whose constructor still runs has one, too, in the states PENDING_CREATION and RESTARTING
    (gcs_actor_scheduler.cc, HandleWorkerLeaseGrantedReply). A run can stand still there, for example as it loads a
    model.

    Args:
        table: Ray's table of actors.
        job: Ray's hexadecimal id of the job; None: all jobs of the cluster.

    Raises:
        UsageError: If the cluster has no actor, or none of that job.
    """
    actors = [one for one in table if job is None or one["JobID"] == job]
    if not actors:
        jobs = sorted({str(one["JobID"]) for one in table})
        raise UsageError(
            "the cluster has no actor" if job is None else f"no actor of job {job}: the jobs are {', '.join(jobs)}"
        )
    here = _addresses()
    classes: dict[int, str] = {}
    elsewhere: dict[str, int] = {}
    notes = []
    for one in actors:
        name, address, pid = str(one["ActorClassName"]), str(one["Address"]["IPAddress"]), int(one["Pid"])
        if one["State"] == "DEAD":
            notes.append(f"dead: actor {name} (process {pid or 'unknown'} on node {address or 'unknown'})")
        elif address in here and pid and proc_facts.look_at(pid).command.startswith(_TITLE):
            classes[pid] = name
        elif one["State"] != "ALIVE":
            notes.append(f"not looked at: actor {name} is in state {one['State']}")
        else:
            elsewhere[address] = elsewhere.get(address, 0) + 1
    for address, number in sorted(elsewhere.items()):
        notes.append(
            f"not looked at: {counted(number, 'actor')} on node {address}; run `rl-safe explain --pid PID ...` there"
        )
    return ChosenActors(classes=classes, notes=notes)


def _addresses() -> set[str]:
    """Returns the addresses of this machine."""
    found = {one.address for addresses in psutil.net_if_addrs().values() for one in addresses}
    return found | {"127.0.0.1", socket.gethostname()}
