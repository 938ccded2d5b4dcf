"""Owns the environment variables that this package reads, or sets for the processes that it launches.

No other module touches ``os.environ``. Variables are written only into the environment of a new process, because most
libraries read theirs once, while they are imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rl_safe_workers.ranks import RankId, Role

RUN_ID = "RL_SAFE_RUN_ID"
"""Mark on every process of a run. It finds processes that were left behind, even if their process ids are lost."""
ROLE = "RL_SAFE_ROLE"
"""Role of an actor, a value of ``ranks.Role``. Child processes inherit it."""
RANK = "RL_SAFE_RANK"
"""Rank of an actor within its role. Child processes inherit it."""
NODE = "RL_SAFE_NODE"
"""Ray's id of the actor's node. Child processes inherit it. It tells apart the processes of two nodes that are on one
machine."""
HANG_DIR = "RL_SAFE_HANG_DIR"
"""Folder on the actor's machine for the diagnostics that the driver asks for when the run hangs."""
BASE_DIR = "RL_SAFE_BASE_DIR"
"""Read only: base folder for relative paths of outputs, checkpoints and the seeded model, instead of the working
directory. For jobs whose working directory is a copy that Ray has made."""
RAY_ADDRESS = "RAY_ADDRESS"
"""Read only, a variable of Ray: the address of the cluster that a submitted job belongs to."""

OMP_NUM_THREADS = "OMP_NUM_THREADS"
"""Threads per process. The processes of a run share the cores; torch's default gives all cores to each process, which
makes them slow each other down."""
TOKENIZERS_PARALLELISM = "TOKENIZERS_PARALLELISM"
"""``false``: the thread pool of tokenizers deadlocks, or logs warnings, in a process that forks after using it."""
HF_HUB_OFFLINE = "HF_HUB_OFFLINE"
"""``1``: models are local directories. A misspelt path fails at once, without a lookup on the network."""
TRANSFORMERS_OFFLINE = "TRANSFORMERS_OFFLINE"
"""``1``: the same, for requests that transformers makes by itself."""
PYTHONUTF8 = "PYTHONUTF8"
"""``1``: text is UTF-8 in any locale. torch reads files of its own that an ASCII locale cannot decode."""
RAY_USAGE_STATS_ENABLED = "RAY_USAGE_STATS_ENABLED"
"""``0``: no usage report leaves the machine."""
LOOPBACK_INTERFACE = "lo"
GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
"""The interface of the node's address in the Ray cluster; ``lo`` if all processes are on this machine. By default gloo
binds to the interface of the host's name. That interface may be public, and in a container the name may not resolve."""
NCCL_SOCKET_IFNAME = "NCCL_SOCKET_IFNAME"
"""``lo`` if all processes are on this machine. NCCL's ranks find each other over this interface."""
NCCL_CUMEM_ENABLE = "NCCL_CUMEM_ENABLE"
"""Read only: with ``0``, NCCL does not map its memory itself and cannot release it."""
GLOBAL_RANK = "RANK"
"""Read only: the number of this process among all processes that its launcher or host framework has started."""
LOCAL_RANK = "LOCAL_RANK"
"""Read only: the number of this process on its host. It selects the GPU if the launcher leaves all GPUs visible."""
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""Read only: number of ranks that the launcher has started on this host."""
CUBLAS_WORKSPACE_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
"""``:4096:8``: cuBLAS gives bitwise the same results each time."""
VLLM_NO_USAGE_STATS = "VLLM_NO_USAGE_STATS"
"""``1``: no usage report leaves the machine."""
VLLM_LOGGING_LEVEL = "VLLM_LOGGING_LEVEL"
"""``ERROR``: hides vLLM's messages about tuning its CPU backend, which would bury the progress of the run."""
VLLM_ENABLE_V1_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""``0``: the engine lives in the actor's own process. Weights reach it directly, and it dies with the actor."""
VLLM_CPU_KVCACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""KV cache in whole GiB, CPU backend only. If it is set, vLLM ignores the engine's ``kv_cache_memory_bytes``."""
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Empty for a process that only asks Megatron for shapes, on a host whose GPUs may be busy."""
TORCH_FR_BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""Number of collectives that torch's Flight Recorder keeps in each process."""
TORCH_NCCL_DEBUG_INFO_TEMP_FILE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Prefix of the file to which torch writes the Flight Recorder's records of NCCL groups. The rank is appended."""
TORCH_NCCL_DEBUG_INFO_PIPE_FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""Prefix of a pipe that torch creates, ``<prefix><rank>.pipe``. A write to the pipe makes torch write that file."""
TMPDIR = "TMPDIR"
"""Folder for the temporary files of libraries: a folder of the run, removed with it. vLLM leaves a file at every
start."""

RAY_ENABLE_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""``0``: a local Ray stays on the loopback interface. By default Ray replaces 127.0.0.1 with an address that other
hosts can reach, except on a platform that it considers to have no clusters."""

RAY_AUTH_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
"""File with the token by which the processes of a local Ray authenticate each other. By default Ray keeps one token for
all clusters of a user below ``HOME``, which may not be writable."""
RAY_AUTH_TOKEN, RAY_AUTH_MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"
"""Settings that a user may have made for another cluster: a token, which would win over the file, and the mode of
authentication."""

ALL_ACTORS: Mapping[str, str] = {
    OMP_NUM_THREADS: "1",
    TOKENIZERS_PARALLELISM: "false",
    HF_HUB_OFFLINE: "1",
    TRANSFORMERS_OFFLINE: "1",
    RAY_USAGE_STATS_ENABLED: "0",
    PYTHONUTF8: "1",
}
"""Defaults for every actor."""
ROLLOUT_ACTORS: Mapping[str, str] = {
    VLLM_NO_USAGE_STATS: "1",
    VLLM_LOGGING_LEVEL: "ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING: "0",
}
"""Defaults for rollout actors, on top of `ALL_ACTORS`."""
TRAINER_ACTORS: Mapping[str, str] = {TORCH_FR_BUFFER_SIZE: "2000"}
"""Defaults for trainers, on top of `ALL_ACTORS`."""
CPU_TRAINERS: Mapping[str, str] = {"TORCHDYNAMO_DISABLE": "1"}
"""Further variables of trainers on CPU. Nothing is compiled there. Megatron's import then takes a second less of CPU
time, because torch does not load its compiler."""
NCCL_FLIGHTS, NCCL_REQUESTS = "flight_nccl_", "request_nccl_"
"""Prefixes in ``HANG_DIR``: of NCCL's Flight Recorder files, and of the pipes that request them."""
DETERMINISTIC: Mapping[str, str] = {CUBLAS_WORKSPACE_CONFIG: ":4096:8"}
"""Variables for processes that call `platforms.cuda.make_deterministic`."""
USER_MAY_SET = frozenset({OMP_NUM_THREADS, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, VLLM_LOGGING_LEVEL})
"""Variables whose value in the driver's own environment wins. A run needs all others at our values."""


def actor_env(
    role: str,
    run_id: str,
    kv_cache_gib: float,
    *,
    rank: int | None = None,
    node: str | None = None,
    interface: str | None = LOOPBACK_INTERFACE,
    temp_dir: Path | None = None,
    hang_dir: Path | None = None,
    device: str | None = None,
) -> dict[str, str]:
    """Returns the environment variables to launch an actor with.

    Args:
        role: ``"trainer"`` or ``"rollout"``, as in ``ranks.Role``. Only trainers get the Flight Recorder's variables,
            only rollout actors those of vLLM.
        run_id: Id of the run, see ``RUN_ID``.
        kv_cache_gib: KV cache of a rollout actor in GiB. The variable takes whole GiB only. For a fraction it is left
            out, and the caller must pass ``kv_cache_memory_bytes`` to the engine.
        rank: The actor's rank within its role; None leaves ``RANK`` out.
        node: The value of ``NODE``; None leaves it out.
        interface: The network interface over which the other ranks reach the actor's node; None: the libraries choose.
        temp_dir: Folder on the actor's machine for its temporary files; None: the machine's default.
        hang_dir: Folder on the actor's machine for ``HANG_DIR``; None: the driver cannot ask the actor after a hang.
        device: ``"cpu"`` or ``"cuda"``; None counts as ``"cuda"``.
    """
    variables = dict(ALL_ACTORS)
    if interface is not None:
        variables[GLOO_SOCKET_IFNAME] = interface
    if interface == LOOPBACK_INTERFACE:  # on other interfaces NCCL chooses better than we do
        variables[NCCL_SOCKET_IFNAME] = interface
    if temp_dir is not None:
        variables[TMPDIR] = str(temp_dir)
    if hang_dir is not None:
        variables[HANG_DIR] = str(hang_dir)
    if role == "trainer":
        variables |= TRAINER_ACTORS
        if device == "cpu":
            variables |= CPU_TRAINERS
        if hang_dir is not None:
            variables |= _nccl_flights(hang_dir)
    if role == "rollout":
        variables |= ROLLOUT_ACTORS
        if kv_cache_gib >= 1 and float(kv_cache_gib).is_integer():
            variables[VLLM_CPU_KVCACHE_SPACE] = str(int(kv_cache_gib))
    # The name of an interface on the driver's machine may not exist on another machine.
    may_set = USER_MAY_SET if interface == LOOPBACK_INTERFACE else USER_MAY_SET - {GLOO_SOCKET_IFNAME}
    variables |= {name: os.environ[name] for name in may_set & variables.keys() & os.environ.keys()}
    variables |= {RUN_ID: run_id, ROLE: str(role)}
    if rank is not None:
        variables[RANK] = str(rank)
    if node is not None:
        variables[NODE] = node
    return variables


def _nccl_flights(folder: Path) -> dict[str, str]:
    return {
        TORCH_NCCL_DEBUG_INFO_TEMP_FILE: str(folder / NCCL_FLIGHTS),
        TORCH_NCCL_DEBUG_INFO_PIPE_FILE: str(folder / NCCL_REQUESTS),
    }


def record_collectives(folder: Path) -> None:
    """Makes torch's Flight Recorder write to a folder, in a trainer that a host has started.

    Call it before there is a process group. It keeps variables that are set already.

    Args:
        folder: The same as ``HANG_DIR``.
    """
    for name, value in {**TRAINER_ACTORS, **_nccl_flights(folder)}.items():
        os.environ.setdefault(name, value)


def base_dir() -> Path:
    """Returns the base folder for relative paths of a run's outputs: ``BASE_DIR``, or the working directory."""
    return Path(os.environ.get(BASE_DIR) or ".").absolute()


def has_base_dir() -> bool:
    """Returns True if ``BASE_DIR`` is set."""
    return bool(os.environ.get(BASE_DIR))


def submitted_to() -> str | None:
    """Returns the address, ``host:port``, of the cluster that this job was submitted to; None outside a job.

    A value with ``://`` is for ``ray job submit``, which reads the variable as a web address. It counts as None.
    """
    address = os.environ.get(RAY_ADDRESS, "").strip()
    return address if address and "://" not in address else None


def gloo_interface() -> str | None:
    """Returns the value of ``GLOO_SOCKET_IFNAME``; None if it is not set."""
    return os.environ.get(GLOO_SOCKET_IFNAME) or None


def mark_run(run_id: str, *, hang_dir: Path | None = None) -> None:
    """Sets the mark of a run in this process, for children that a library launches, such as Ray's own processes.

    Args:
        run_id: Id of the run.
        hang_dir: The value of ``HANG_DIR``; None leaves it out.
    """
    os.environ[RUN_ID] = run_id
    if hang_dir is not None:
        os.environ[HANG_DIR] = str(hang_dir)


def run_id() -> str | None:
    """Returns the mark of the run that this process belongs to; None if it belongs to none."""
    return os.environ.get(RUN_ID) or None


def marked(run_id: str) -> dict[str, str]:
    """Returns this process's environment with the mark of a run, for a child that must end with the run."""
    return {**os.environ, PYTHONUTF8: "1", RUN_ID: run_id}


def unmarked() -> dict[str, str]:
    """Returns this process's environment without the mark of a run, for a child that must outlive the run."""
    return {name: value for name, value in os.environ.items() if name != RUN_ID}


def keep_ray_on_loopback() -> None:
    """Sets ``RAY_ENABLE_CLUSTER`` for the processes that Ray will launch."""
    os.environ[RAY_ENABLE_CLUSTER] = "0"


def use_ray_token(file: Path) -> None:
    """Makes the Ray that this process will start, and all processes that it launches, use the token in a file."""
    for name in (RAY_AUTH_TOKEN, RAY_AUTH_MODE):
        os.environ.pop(name, None)
    os.environ[RAY_AUTH_TOKEN_PATH] = str(file)


def become_gpuless() -> None:
    """Sets `ALL_ACTORS` in this process and hides all GPUs. Call it before any library is imported."""
    os.environ.update({**ALL_ACTORS, CUDA_VISIBLE_DEVICES: ""})


def global_rank() -> int | None:
    """Returns this process's number among all processes of its launch; None if no launcher has set it."""
    value = os.environ.get(GLOBAL_RANK)
    return int(value) if value and value.isdecimal() else None


def local_rank() -> int | None:
    """Returns this process's number among the ranks of its host; None if no launcher has set it."""
    value = os.environ.get(LOCAL_RANK)
    return int(value) if value and value.isdecimal() else None


def local_world_size() -> int | None:
    """Returns the number of ranks that torchrun, or a similar launcher, has started on this machine; None if unset."""
    value = os.environ.get(LOCAL_WORLD_SIZE)
    return int(value) if value is not None and value.isdecimal() else None


def nccl_cumem_is_off() -> bool:
    """Returns True if ``NCCL_CUMEM_ENABLE`` forbids NCCL to map its memory itself."""
    return os.environ.get(NCCL_CUMEM_ENABLE) == "0"


def belongs_to_run(environ: Mapping[str, str], run_id: str, node: str | None = None) -> bool:
    """Returns True if the run has launched the process with this environment. If given, ``node`` must match, too."""
    return environ.get(RUN_ID) == run_id and node in (None, environ.get(NODE))


def actor_of(environ: Mapping[str, str]) -> RankId | None:
    """Returns the id of the actor that a process is, or is a child of; None for any other process."""
    role, rank = environ.get(ROLE), environ.get(RANK, "")
    return RankId(Role(role), int(rank)) if role in tuple(Role) and rank.isdecimal() else None


def wanted_hang_dir() -> Path | None:
    """Returns the folder of ``HANG_DIR``, which need not exist yet; None if it is not set."""
    value = os.environ.get(HANG_DIR)
    return Path(value) if value else None


def hang_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """Returns the folder of ``HANG_DIR``, if it is set and exists on this machine; else None.

    Args:
        environ: The environment to read; None: this process's.
    """
    value = (os.environ if environ is None else environ).get(HANG_DIR)
    return Path(value) if value and Path(value).is_dir() else None
