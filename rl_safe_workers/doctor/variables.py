"""Lists environment variables that cause problems: the reason, the versions, and the reports of each.

The rows are for processes of a run on this machine, because a local Ray and a driver pass on their environment. A
variable has no row if `rl_safe_workers.env` always sets it for the actors, whatever its value in the driver is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from rl_safe_workers import env
from rl_safe_workers.doctor.check import Check, Fact, Report, Subject
from rl_safe_workers.findings import Finding, Severity
from rl_safe_workers.versions import version_of

_NCCL_GUIDE = "NCCL user guide, Environment variables"
_TORCH_NCCL = "PyTorch, ProcessGroupNCCL environment variables"
_LOOPBACKS = ("lo", "=lo")
_EVERY_NCCL = "every NCCL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The context in which a variable's value is judged.

    Example: ``Surroundings(subject=subject, environ={"NCCL_DEBUG": "INFO"}, interfaces=frozenset({"lo"}), cpus=2)``
    """

    subject: Subject
    environ: Mapping[str, str]
    interfaces: frozenset[str]
    """Names of this machine's network interfaces."""
    cpus: int
    """Number of CPUs that this process may use."""
    torch: str = ""
    """Version of torch; empty if unknown."""

    @property
    def gpus(self) -> bool:
        """True if the run uses GPUs, or may use them."""
        return self.subject.may_use_gpus

    @property
    def several_nodes(self) -> bool:
        """True if the run may have processes on other machines."""
        return self.subject.joins_cluster

    @property
    def colocated(self) -> bool:
        """True if trainers and vLLM use the same GPUs in turn."""
        return self.subject.config is not None and self.subject.config.cluster.colocated

    @property
    def tensor(self) -> int:
        """Size of tensor parallelism."""
        config = self.subject.config
        return 1 if config is None else config.megatron.tensor_model_parallel_size


Hurts = Callable[[str, Surroundings], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable, and the condition under which it causes a problem.

    Example: see ``VARIABLES``
    """

    name: str
    hurts: Hurts
    """Returns True if a value causes a problem; takes ``""`` if the variable is not set."""
    severity: Severity
    text: str
    """The consequence. The finding's text puts the name and value before it."""
    since: str
    evidence: tuple[str, ...]
    avoid: str
    code: str = ""
    """Code of the finding, for a second row with the same name; empty: made from the name."""

    def find(self, around: Surroundings) -> Finding | None:
        """Returns a finding if the variable causes a problem in these surroundings; else None."""
        value = around.environ.get(self.name, "")
        if not self.hurts(value, around):
            return None
        shown = f"{self.name}={value}" if self.name in around.environ else f"{self.name} is not set"
        return Finding(
            code=self.code or f"env-{self.name.lower().strip('_').replace('_', '-')}",
            severity=self.severity,
            text=f"{shown}: {self.text}",
            since=self.since,
            evidence=self.evidence,
            avoid=self.avoid,
        )


def _on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "y", "on", "t")


def _gpu_on(value: str, around: Surroundings) -> bool:
    return around.gpus and _on(value)


def _gpu_zero(value: str, around: Surroundings) -> bool:
    return around.gpus and value.strip() == "0"


def _gpu_set(value: str, around: Surroundings) -> bool:
    return around.gpus and bool(value)


def _far(value: str, around: Surroundings) -> bool:
    return around.gpus and around.several_nodes and _on(value)


def _expandable(value: str, around: Surroundings) -> bool:
    return around.colocated and "expandable_segments:true" in value.lower().replace(" ", "")


def _max_connections(value: str, around: Surroundings) -> bool:
    return around.subject.needs_gpus and around.tensor > 1 and value != "1"


def _many_threads(value: str, around: Surroundings) -> bool:
    processes = around.subject.processes
    return not around.several_nodes and value.isdecimal() and processes * int(value) > max(around.cpus, processes)


def _gloo_elsewhere(value: str, around: Surroundings) -> bool:
    return any(name not in around.interfaces for name in value.split(",")) if value else False


def _nccl_elsewhere(value: str, around: Surroundings) -> bool:
    """Returns True if the value selects no interface of this machine.

    NCCL uses interfaces whose names begin with a given name. After ``=``, the names must be equal. After ``^``, it uses
    all other interfaces.
    """
    if not around.gpus or not value or value.startswith("^"):
        return False
    exactly, names = value.startswith("="), value.removeprefix("=").split(",")
    return not any(
        there == name if exactly else there.startswith(name) for name in names for there in around.interfaces
    )


def _loopback(value: str, around: Surroundings) -> bool:
    return around.several_nodes and value in _LOOPBACKS


def _nccl_loopback(value: str, around: Surroundings) -> bool:
    return around.gpus and _loopback(value, around)


def _proxied(value: str, around: Surroundings) -> bool:
    """Returns True if Ray's gRPC is told to use a proxy, there is a proxy, and no address is exempt from it."""
    proxies = any(around.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy"))
    excepted = any(around.environ.get(name) for name in ("no_grpc_proxy", "no_proxy"))
    return around.several_nodes and _on(value) and proxies and not excepted


def _local_rank(value: str, around: Surroundings) -> bool:
    return around.gpus and value not in ("", "0") and around.torch.startswith("2.15")


def _all_visible(value: str, around: Surroundings) -> bool:
    return around.subject.gpus > 1 and _on(value)


VARIABLES = (
    Variable(
        name="GLOO_SOCKET_IFNAME",
        hurts=_gloo_elsewhere,
        severity=Severity.STOPS,
        text="no interface of this machine has that name; gloo fails when the world is made («Unable to find address "
        "for»). It takes names in full, and none of NCCL's ^",
        since="every torch",
        evidence=("Megatron-LM 436", "Primus 1063", "aws-do-eks 51"),
        avoid="unset it, or name an interface that is there",
    ),
    Variable(
        name="NCCL_SOCKET_IFNAME",
        hurts=_nccl_elsewhere,
        severity=Severity.STOPS,
        text="no interface of this machine is meant by that; NCCL finds none and fails when the first communicator is "
        "connected",
        since="every NCCL",
        evidence=("nccl 1837", _NCCL_GUIDE),
        avoid="unset it, or name an interface that is there",
    ),
    Variable(
        name="GLOO_SOCKET_IFNAME",
        code="env-gloo-loopback",
        hurts=_loopback,
        severity=Severity.RISKS,
        text="ranks of other machines cannot be reached over the loopback interface",
        since="every torch",
        evidence=("nccl 286",),
        avoid="name the interface between the nodes, or unset it",
    ),
    Variable(
        name="NCCL_SOCKET_IFNAME",
        code="env-nccl-loopback",
        hurts=_nccl_loopback,
        severity=Severity.RISKS,
        text="ranks of other machines cannot be reached over the loopback interface",
        since=_EVERY_NCCL,
        evidence=("nccl 286",),
        avoid="name the interface between the nodes, or unset it",
    ),
    Variable(
        name="NCCL_CUMEM_ENABLE",
        hurts=_gpu_zero,
        severity=Severity.COSTS,
        text="a ring takes 784 MiB where it takes 484, connects when a communicator is made, and gives nothing back if "
        "it is suspended",
        since="NCCL 2.28, as measured",
        evidence=("verl 6408", "nccl init.cc:1563", "measured on 4 x H200"),
        avoid="unset it in trainers and in rollouts: both sides of a joint group must agree",
    ),
    Variable(
        name="NCCL_P2P_DISABLE",
        hurts=_gpu_on,
        severity=Severity.COSTS,
        text="GPUs do not read each other's memory over NVLink or PCIe: everything goes through host memory",
        since=_EVERY_NCCL,
        evidence=(_NCCL_GUIDE,),
        avoid="unset it",
    ),
    Variable(
        name="NCCL_SHM_DISABLE",
        hurts=_gpu_on,
        severity=Severity.COSTS,
        text="what does not go from GPU to GPU goes over the network, on one machine too",
        since=_EVERY_NCCL,
        evidence=(_NCCL_GUIDE,),
        avoid="unset it",
    ),
    Variable(
        name="NCCL_IB_DISABLE",
        hurts=_far,
        severity=Severity.COSTS,
        text="between nodes NCCL takes IP sockets and leaves InfiniBand and RoCE alone",
        since=_EVERY_NCCL,
        evidence=(_NCCL_GUIDE,),
        avoid="unset it, if the nodes have either",
    ),
    Variable(
        name="NCCL_DEBUG",
        hurts=lambda value, around: around.gpus and value.upper() in ("INFO", "TRACE"),
        severity=Severity.COSTS,
        text="every process writes lines for each communicator, and with TRACE for each call",
        since=_EVERY_NCCL,
        evidence=(_NCCL_GUIDE,),
        avoid="NCCL_DEBUG=WARN, or NCCL_DEBUG_FILE beside it",
    ),
    Variable(
        name="NCCL_PROTO",
        hurts=_gpu_set,
        severity=Severity.RISKS,
        text="a protocol is forced on every collective; LL128 on a platform that does not have it corrupts data",
        since=_EVERY_NCCL,
        evidence=(_NCCL_GUIDE,),
        avoid="unset it",
    ),
    Variable(
        name="NCCL_NVLS_ENABLE",
        hurts=lambda value, around: around.gpus and value.strip() == "1",
        severity=Severity.RISKS,
        text="NCCL takes NVLink multicast without asking the GPUs whether they have it: where they do not, or it does "
        "not work, a communicator may fail instead of going on without",
        since="NCCL 2.18",
        evidence=("nccl 2.28.9 nvls.cc:169, nvls.cc:283",),
        avoid="unset it: the default, 2, asks; or NCCL_NVLS_ENABLE=0, if memory is short",
    ),
    Variable(
        name="NCCL_RUNTIME_CONNECT",
        hurts=_gpu_zero,
        severity=Severity.COSTS,
        text="rings and trees are connected when a communicator is made, also those that it will not use",
        since="NCCL 2.22",
        evidence=("nccl init.cc:61", "nccl init.cc:1563"),
        avoid="unset it",
    ),
    Variable(
        name="NCCL_BUFFSIZE",
        hurts=lambda value, around: around.gpus and value.isdecimal() and int(value) > 2**22,
        severity=Severity.COSTS,
        text="each channel takes more than the 4 MiB that predictions count with",
        since=_EVERY_NCCL,
        evidence=("nccl transport/p2p.cc:406", "docs/benchmarks.md#comms"),
        avoid="unset it",
    ),
    Variable(
        name="TORCH_NCCL_BLOCKING_WAIT",
        hurts=_gpu_on,
        severity=Severity.COSTS,
        text="the host waits for each collective and launches nothing meanwhile; torch's watchdog is off",
        since="torch 2.2",
        evidence=("ray 29419", "pytorch 138001"),
        avoid="unset it: phases have timeouts of their own",
    ),
    Variable(
        name="NCCL_BLOCKING_WAIT",
        hurts=_gpu_set,
        severity=Severity.COSTS,
        text="an old name of TORCH_NCCL_BLOCKING_WAIT, which torch reads with a warning: the host waits for each "
        "collective",
        since="torch 2.2",
        evidence=("ray 29419", "ultralytics 9448"),
        avoid="unset it",
    ),
    Variable(
        name="TORCH_NCCL_ASYNC_ERROR_HANDLING",
        hurts=_gpu_zero,
        severity=Severity.RISKS,
        text="an error of NCCL, or a collective past its timeout, is left alone: ranks wait until the driver's "
        "deadline",
        since="torch 2.2",
        evidence=(_TORCH_NCCL,),
        avoid="unset it: the default, 3, ends the process",
    ),
    Variable(
        name="NCCL_ASYNC_ERROR_HANDLING",
        hurts=_gpu_zero,
        severity=Severity.RISKS,
        text="an old name of TORCH_NCCL_ASYNC_ERROR_HANDLING: errors of NCCL are left alone",
        since="torch 1.7",
        evidence=("pytorch 46879", _TORCH_NCCL),
        avoid="unset it",
    ),
    Variable(
        name="TORCH_NCCL_USE_COMM_NONBLOCKING",
        hurts=_gpu_on,
        severity=Severity.RISKS,
        text="communicators are made in NCCL's non-blocking mode, which has hung and failed («NCCL Error 7»)",
        since="every torch that reads it",
        evidence=("pytorch 153960", "pytorch 154055", "torchft 320"),
        avoid="unset it: the bootstrap has a deadline of its own",
    ),
    Variable(
        name="TORCH_NCCL_ABORT_IN_DESTROY_PG",
        hurts=_gpu_set,
        severity=Severity.COSTS,
        text="no torch since 2.8 reads it: an end that relies on it waits",
        since="torch 2.8 at the latest",
        evidence=("pytorch 124334",),
        avoid="unset it: rl_safe_workers.teardown has a deadline",
    ),
    Variable(
        name="TORCH_DISTRIBUTED_DEBUG",
        hurts=lambda value, around: value.upper() == "DETAIL",
        severity=Severity.COSTS,
        text="before every collective all ranks of its group compare it over gloo",
        since="torch 1.9",
        evidence=("pytorch ProcessGroupWrapper.cpp", "pytorch 124447"),
        avoid="unset it, but to look for a mismatch",
    ),
    Variable(
        name="TORCH_DIST_INIT_BARRIER",
        hurts=lambda value, around: value.strip() == "1",
        severity=Severity.RISKS,
        text="each new group waits at the store for every rank of the world: slow in a large one, and in a carved "
        "world rollout ranks never come",
        since="torch 2.1",
        evidence=("torch/distributed/distributed_c10d.py",),
        avoid="unset it",
    ),
    Variable(
        name="LOCAL_RANK",
        hurts=_local_rank,
        severity=Severity.RISKS,
        text="an actor sees one GPU, as 0, and inherits this rank, to which torch 2.15 binds new groups",
        since="torch 2.15",
        evidence=("torchrec 4666",),
        avoid="unset it where the driver starts",
    ),
    Variable(
        name="CUDA_LAUNCH_BLOCKING",
        hurts=_gpu_on,
        severity=Severity.COSTS,
        text="the host waits for every kernel: nothing overlaps",
        since="every CUDA",
        evidence=("CUDA C++ programming guide, Environment variables",),
        avoid="unset it, but to find a failing kernel",
    ),
    Variable(
        name="CUDA_DEVICE_MAX_CONNECTIONS",
        hurts=_max_connections,
        severity=Severity.COSTS,
        text="before Blackwell Megatron relies on 1 for the communication of tensor parallelism to start before the "
        "computation that is to hide it; results are the same",
        since="every version of megatron-core",
        evidence=("Megatron-LM 533", "Megatron-LM 5105", "verl 6976"),
        avoid="CUDA_DEVICE_MAX_CONNECTIONS=1 on Hopper",
    ),
    Variable(
        name="PYTORCH_CUDA_ALLOC_CONF",
        hurts=_expandable,
        severity=Severity.RISKS,
        text="vLLM's sleep needs a memory pool that cannot have expandable segments: older ones refuse to start, later "
        "ones turn them off while they fill the pool",
        since="vLLM of March 2025; without a refusal since that of April 2026",
        evidence=("vllm 14189", "vllm 40812", "pytorch 147851"),
        avoid="leave expandable_segments out",
    ),
    Variable(
        name="PYTORCH_ALLOC_CONF",
        hurts=_expandable,
        severity=Severity.RISKS,
        text="vLLM's sleep needs a memory pool that cannot have expandable segments, and not every vLLM looks at this "
        "name: then sleep gives nothing back",
        since="torch 2.10",
        evidence=("trl 5794", "OpenRLHF 1274", "pytorch 147851"),
        avoid="leave expandable_segments out",
    ),
    Variable(
        name="OMP_NUM_THREADS",
        hurts=_many_threads,
        severity=Severity.COSTS,
        text="that many threads in each process of the run are more than there are cores, and keep each other from "
        "them",
        since="always",
        evidence=("env.py", "PyTorch, CPU threading"),
        avoid="unset it: actors take 1",
    ),
    Variable(
        name="RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        hurts=_all_visible,
        severity=Severity.STOPS,
        text="Ray leaves every GPU visible to every actor: a rank that sees several and has no LOCAL_RANK refuses to "
        "choose one",
        since="Ray 2",
        evidence=("ray/_private/accelerators/nvidia_gpu.py", "platforms/cuda.py"),
        avoid="unset it where Ray is started",
    ),
    Variable(
        name="RAY_memory_monitor_refresh_ms",
        hurts=lambda value, around: value.strip() == "0",
        severity=Severity.RISKS,
        text="Ray does not look at memory: when it is gone the kernel ends whatever it likes, Ray itself included",
        since="every Ray with a memory monitor",
        evidence=("Ray, Out-Of-Memory Prevention",),
        avoid="unset it",
    ),
    Variable(
        name="RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE",
        hurts=lambda value, around: bool(value),
        severity=Severity.COSTS,
        text="Ray puts an object store on disk that has no room in /dev/shm, and does not refuse to",
        since="Ray 2",
        evidence=("ray/_private/services.py",),
        avoid="unset it, and give /dev/shm more",
    ),
    Variable(
        name="RAY_grpc_enable_http_proxy",
        hurts=_proxied,
        severity=Severity.STOPS,
        text="Ray's own calls between nodes go through the proxy that http_proxy or https_proxy names, and no_proxy "
        "excepts none of them",
        since="Ray 2",
        evidence=("ray/_private/ray_constants.py", "ray 37757", "ray 23865"),
        avoid="unset it, or list the nodes' addresses in no_proxy",
    ),
)
"""The rows, ordered by topic: interfaces, NCCL, torch, CUDA, processes, Ray."""


def _gather(subject: Subject) -> Surroundings:
    return Surroundings(
        subject=subject,
        environ=env.unmarked(),
        interfaces=frozenset(psutil.net_if_addrs()),
        cpus=len(psutil.Process().cpu_affinity()),
        torch=version_of("torch"),
    )


def judge(around: Surroundings, subject: Subject) -> Report:
    """Returns the findings of all rows, and the set variables as facts."""
    names = dict.fromkeys(row.name for row in VARIABLES)
    given = [f"{name}={around.environ[name]}" for name in names if name in around.environ]
    facts = (
        Fact(name="interfaces", value=", ".join(sorted(around.interfaces))),
        Fact(name="variables", value=f"{', '.join(given) or 'none'} set, of {len(names)} that can hurt"),
    )
    found = [finding for row in VARIABLES if (finding := row.find(around)) is not None]
    return Report(facts=facts, findings=tuple(found))


ENVIRONMENT = Check(name="variables", deadline_s=10, gather=_gather, judge=judge)
