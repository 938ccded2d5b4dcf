"""Tells which training ranks share a host in NCCL's view, and whether sockets connect the hosts."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import NO_OUTCOME, ControlPlane
from rl_safe_workers.lifecycle import Phase

_RDMA_DEVICES, _BOOT_ID = Path("/sys/class/infiniband"), Path("/proc/sys/kernel/random/boot_id")
_RDMA = "rdma"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The host of each training rank. Example: ``Hosts({0: "c1f0", 1: "c1f0", 2: "77ab"}).near(0, (0, 1, 2))`` is 2."""

    by_rank: Mapping[int, str]

    def near(self, rank: int, members: Sequence[int]) -> int | None:
        """Returns how many members of a group are on a rank's host; None if this does not determine the group's memory.

        Args:
            rank: One of the members.
            members: The group's training ranks.

        Returns:
            The number of members, the rank included. None if hosts are unknown, or if another network than sockets may
            connect them.
        """
        hosts = [self.by_rank.get(member, _RDMA) for member in members]
        if any(host.startswith(_RDMA) for host in hosts):
            return None
        return hosts.count(self.by_rank[rank])


NO_HOSTS = Hosts({})


def own_host() -> str:
    """Returns an id of this host. Ranks have the same id if NCCL takes them for ranks of one host.

    NCCL compares ``NCCL_HOSTID``, or the host name and the kernel's boot id (``getHostHash`` in its ``misc/utils.cc``).
    The id begins with ``rdma`` if NCCL may use another network than sockets between hosts.
    """
    name = os.environ.get("NCCL_HOSTID") or socket.gethostname() + _BOOT_ID.read_text(encoding="ascii")
    short = hashlib.sha256(name.encode()).hexdigest()[:8]
    return short if _uses_sockets() else _RDMA + short


def _uses_sockets() -> bool:
    if os.environ.get("NCCL_NET", "").lower() == "socket":
        return True
    if os.environ.get("NCCL_NET_PLUGIN", "none") != "none":
        return False
    if os.environ.get("NCCL_IB_DISABLE") == "1":
        return True
    return not _RDMA_DEVICES.is_dir() or not any(_RDMA_DEVICES.iterdir())


def hosts_of_ranks(control: ControlPlane, *, phase: Phase, timeout: timedelta) -> Hosts:
    """Returns the host of every rank. Collective over: the training world.

    Args:
        control: This rank's place in the training world.
        phase: For errors.
        timeout: Longest wait. A rank that does not come in time has no host.
    """
    operation = control.begin("hosts", phase=phase)
    found = operation.exchange("own", own_host(), Deadline.after(timeout))
    return Hosts({rank: host for rank, host in found.items() if host != NO_OUTCOME})
