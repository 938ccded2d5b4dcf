"""Checks a machine's CPUs, memory, shared memory and limits. ``gpus.py`` checks GPUs."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl_safe_workers.doctor.check import GIB, MIB, Check, Fact, Report, Subject
from rl_safe_workers.findings import Finding, Severity
from rl_safe_workers.platforms.host_memory import host_memory

SHARED_MEMORY = Path("/dev/shm")
RDMA = Path("/sys/class/infiniband")
LOCAL_OBJECT_STORE_BYTES = 256 * MIB
"""Ray's shared memory in our own runs, as ``driver/cluster/cluster.py`` sets it."""
STORE_SHARE, STORE_SHARED_SHARE = 0.3, 0.95
"""The share of a node's free memory that Ray's store takes by default, and its largest share of free ``/dev/shm``."""
STORE_BYTES, STORE_MOST_BYTES = 10**10, 200 * 10**9
"""The lowest limit that a small ``/dev/shm`` puts on the store, and the largest size of the store on any node."""
NCCL_SHARED_BYTES = GIB
"""Shared memory that NCCL's guide recommends for a container."""
FEW_FILES, CLUSTER_FILES = 8192, 65536
TRAINER_BYTES, ROLLOUT_BYTES = int(0.59e9), int(1.8e9)
"""Host memory of a trainer and of a rollout process in the quickstart. Larger models take more."""
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Resources and limits of a machine; sizes are in bytes.

    Example: ``read_machine()``
    """

    cpus: int
    memory_total: int
    memory_free: int
    """Bytes that processes can still allocate, within a container's limit."""
    shared_total: int
    shared_free: int
    files_soft: int
    files_hard: int
    locked: int
    rdma: tuple[str, ...]
    """Names of RDMA devices."""


def read_machine() -> Machine:
    """Reads the resources and limits of this machine. Blocks for milliseconds."""
    memory, shared = host_memory(), psutil.disk_usage(str(SHARED_MEMORY))
    files_soft, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        cpus=len(os.sched_getaffinity(0)),
        memory_total=memory.total_bytes,
        memory_free=memory.free_bytes,
        shared_total=shared.total,
        shared_free=shared.free,
        files_soft=files_soft,
        files_hard=files_hard,
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        rdma=tuple(sorted(path.name for path in RDMA.iterdir())) if RDMA.is_dir() else (),
    )


def judge(machine: Machine, subject: Subject) -> Report:
    """Compares the machine with the needs of the run."""
    rdma = f"; RDMA devices {', '.join(machine.rdma)}" if machine.rdma else "; no RDMA devices"
    facts = (
        Fact(name="CPUs", value=f"{machine.cpus}{f', the run asks for {subject.cpus:g}' if subject.config else ''}"),
        Fact(name="memory", value=f"{_gib(machine.memory_free)} free of {_gib(machine.memory_total)}"),
        Fact(name="/dev/shm", value=f"{_gib(machine.shared_free)} free of {_gib(machine.shared_total)}"),
        Fact(name="open files", value=f"{_limit(machine.files_soft)}, at most {_limit(machine.files_hard)}"),
        Fact(name="locked memory", value=f"{_limit(machine.locked)} bytes{rdma}"),
    )
    checks = (_cpus, _memory, _shared, _files, _locked)
    return Report(facts=facts, findings=tuple(found for check in checks for found in check(machine, subject)))


def _cpus(machine: Machine, subject: Subject) -> Iterator[Finding]:
    # Sums of fractions such as 0.1 are not exact. Ray itself counts in ten-thousandths.
    if not subject.joins_cluster and subject.cpus > machine.cpus + 1e-4:
        yield Finding(
            code="cpus-short",
            severity=Severity.STOPS,
            text=f"the run asks for {subject.cpus:g} CPUs, and this process may use {machine.cpus}",
            since="always",
            evidence=("driver/inputs/preflight.py",),
            avoid="cluster.cpus_per_trainer, cluster.cpus_per_rollout, cluster.num_trainers or cluster.num_rollouts",
        )


def _memory(machine: Machine, subject: Subject) -> Iterator[Finding]:
    if subject.config is None or subject.joins_cluster:
        return
    cluster = subject.config.cluster
    needed = cluster.num_trainers * TRAINER_BYTES + cluster.num_rollouts * ROLLOUT_BYTES
    if machine.memory_free < needed:
        yield Finding(
            code="memory-short",
            severity=Severity.RISKS,
            text=f"{_gib(machine.memory_free)} of memory are free, and these processes take {_gib(needed)} with the "
            "smallest model: the kernel ends one of them, or Ray does",
            since="always",
            evidence=("measured on the quickstart: 0.59 GB a trainer, 1.8 GB a vLLM rank",),
            avoid="fewer of cluster.num_trainers and cluster.num_rollouts, or more memory",
        )


def cluster_store(machine: Machine) -> int:
    """Returns the size in bytes of Ray's object store on this machine, if Ray starts with its defaults."""
    most = min(STORE_MOST_BYTES, max(STORE_BYTES, int(STORE_SHARED_SHARE * machine.shared_free)))
    return min(int(STORE_SHARE * machine.memory_free), most)


def _shared(machine: Machine, subject: Subject) -> Iterator[Finding]:
    store = cluster_store(machine) if subject.joins_cluster else LOCAL_OBJECT_STORE_BYTES
    if machine.shared_free < store:
        yield Finding(
            code="shm-ray",
            severity=Severity.COSTS,
            text=f"/dev/shm has {_gib(machine.shared_free)} free and Ray's object store takes {_gib(store)}: Ray puts "
            "it on disk, and says so",
            since="Ray 2.60",
            evidence=(
                "ray/_private/utils.py, resolve_object_store_memory",
                "ray/_private/services.py, determine_plasma_store_config",
                "ray 11951",
            ),
            avoid="docker run --shm-size, or ray start --object-store-memory",
        )
    if subject.needs_gpus and machine.shared_total < NCCL_SHARED_BYTES:
        yield Finding(
            code="shm-nccl",
            severity=Severity.RISKS,
            text=f"/dev/shm has {_gib(machine.shared_total)}: NCCL, which keeps its proxies' buffers there, fails "
            'with "no space left on device" when it connects, or is killed by SIGBUS',
            since="every NCCL",
            evidence=("NCCL user guide, Troubleshooting, Shared memory", "pytorch/tutorials 2475"),
            avoid="docker run --shm-size=1g --ulimit memlock=-1",
        )


def _files(machine: Machine, subject: Subject) -> Iterator[Finding]:
    least = CLUSTER_FILES if subject.joins_cluster else FEW_FILES
    if machine.files_hard != UNLIMITED and machine.files_hard < least:
        yield Finding(
            code="open-files",
            severity=Severity.RISKS,
            text=f"a process may open {machine.files_hard} files: Ray, which asks for {CLUSTER_FILES} and wants "
            f"{least} here, loses connections once they are gone",
            since="every Ray",
            evidence=("ray 11239", "ray 12059", "ray 29696"),
            avoid=f"ulimit -n {CLUSTER_FILES}",
        )


def _locked(machine: Machine, subject: Subject) -> Iterator[Finding]:
    if machine.rdma and subject.may_use_gpus and machine.locked != UNLIMITED:
        yield Finding(
            code="locked-memory",
            severity=Severity.RISKS,
            text=f"a process may lock {machine.locked} bytes: NCCL cannot register its buffers with RDMA devices "
            '("ibv_reg_mr failed: cannot allocate memory")',
            since="every NCCL",
            evidence=("nccl-tests 206", "NCCL user guide, Troubleshooting, InfiniBand"),
            avoid="ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"


def _limit(value: int) -> str:
    return "unlimited" if value == UNLIMITED else str(value)


MACHINE = Check(name="machine", deadline_s=10, gather=lambda subject: read_machine(), judge=judge)
