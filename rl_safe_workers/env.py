"""Environment variables: the ones this package sets for the processes that it launches, or reads.

Nothing else in the package touches ``os.environ``. Variables are written only into the environment of a new process,
because most libraries look at theirs once, while being imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rl_safe_workers.ranks import RankId, Role

RUN_ID = "RL_SAFE_RUN_ID"
"""Marks every process of a run, so that leftovers are found even when nobody remembers their process ids."""
ROLE = "RL_SAFE_ROLE"
"""Role of an actor, as in ``lifecycle.Role``; its children inherit it."""
RANK = "RL_SAFE_RANK"
"""An actor's rank within its role; its children inherit it."""
NODE = "RL_SAFE_NODE"
"""Ray's id of the node that an actor is on; its children inherit it, so that what one node has left is told from what
another has, should both be on one machine."""
HANG_DIR = "RL_SAFE_HANG_DIR"
"""Folder on the actor's machine where it leaves what it is asked for when the run hangs."""
BASE_DIR = "RL_SAFE_BASE_DIR"
"""Read only: where relative paths of a run's outputs, checkpoints and seeded model start, instead of at the working
directory; for jobs whose working directory is Ray's copy of somebody's folder."""
RAY_ADDRESS = "RAY_ADDRESS"
"""Read only: Ray's own, the address of the cluster that a submitted job belongs to."""

OMP_NUM_THREADS = "OMP_NUM_THREADS"
"""Threads per process. The processes of a run share the cores: torch's default, all cores for each, thrashes."""
TOKENIZERS_PARALLELISM = "TOKENIZERS_PARALLELISM"
"""``false``: tokenizers' thread pool deadlocks, or warns at length, in a process that forks after using it."""
HF_HUB_OFFLINE = "HF_HUB_OFFLINE"
"""``1``: models are local directories; a misspelt one fails at once and is not looked up on a network."""
TRANSFORMERS_OFFLINE = "TRANSFORMERS_OFFLINE"
"""``1``: the same, for what transformers asks on its own."""
PYTHONUTF8 = "PYTHONUTF8"
"""``1``: text is UTF-8 whatever the locale. torch itself reads files of its own that an ASCII locale cannot decode."""
RAY_USAGE_STATS_ENABLED = "RAY_USAGE_STATS_ENABLED"
"""``0``: no usage report leaves the machine."""
LOOPBACK_INTERFACE = "lo"
GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
"""The interface of the node's address in the Ray cluster, ``lo`` when all processes are on this machine: gloo otherwise
binds to the interface of the host's name, which may be public, or resolve to nothing in a container."""
NCCL_SOCKET_IFNAME = "NCCL_SOCKET_IFNAME"
"""``lo`` when all processes are on this machine, for the connections over which NCCL's ranks find each other."""
NCCL_CUMEM_ENABLE = "NCCL_CUMEM_ENABLE"
"""Read only: ``0`` keeps NCCL from mapping its memory itself, and so from giving it back."""
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""Which of the visible GPUs is this process's, where a launcher leaves all of them visible."""
CUBLAS_WORKSPACE_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
"""``:4096:8``: cuBLAS gives the same bits each time."""
VLLM_NO_USAGE_STATS = "VLLM_NO_USAGE_STATS"
"""``1``: no usage report leaves the machine."""
VLLM_LOGGING_LEVEL = "VLLM_LOGGING_LEVEL"
"""``ERROR``: vLLM's advice on tuning its CPU backend would bury the progress of the run."""
VLLM_ENABLE_V1_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""``0``: the engine lives in the actor's own process; weights reach it without another hop, and it dies with it."""
VLLM_CPU_KVCACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""KV cache in whole GiB, CPU backend only. Where it is set, vLLM ignores the engine's ``kv_cache_memory_bytes``."""
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Empty for a process that only asks Megatron about shapes, on a host whose GPUs may be busy."""
TORCH_FR_BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""Collectives that torch's Flight Recorder remembers, of each process."""
TORCH_NCCL_DEBUG_INFO_TEMP_FILE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Where torch writes what the Flight Recorder has of NCCL's groups: a prefix, which the rank follows."""
TORCH_NCCL_DEBUG_INFO_PIPE_FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""Prefix of a pipe that torch makes, ``<prefix><rank>.pipe``; writing to it asks for that file."""
TMPDIR = "TMPDIR"
"""Where libraries put temporary files: a folder of the run, removed with it. vLLM leaves a file at every start."""

RAY_ENABLE_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""``0``: a local Ray stays on the loopback interface. Ray otherwise replaces 127.0.0.1 by an address that other hosts
can reach, unless it believes to be on a platform without clusters."""

RAY_AUTH_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
"""File with the token that the processes of a run's own Ray know each other by. Ray otherwise keeps one for all of a
user's clusters below ``HOME``, which may not be writable."""
RAY_AUTH_TOKEN, RAY_AUTH_MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"
"""Variables that a user may have set for another cluster: a token that would win over the file, and the mode."""

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
"""Defaults for rollout actors, beside those for all."""
TRAINER_ACTORS: Mapping[str, str] = {TORCH_FR_BUFFER_SIZE: "2000"}
"""Defaults for trainers, beside those for all."""
NCCL_FLIGHTS, NCCL_REQUESTS = "flight_nccl_", "request_nccl_"
"""Prefixes of NCCL's Flight Recorder files, and of the pipes that ask for them, in ``HANG_DIR``."""
DETERMINISTIC: Mapping[str, str] = {CUBLAS_WORKSPACE_CONFIG: ":4096:8"}
"""For processes that `platforms.cuda.make_deterministic` is called in."""
USER_MAY_SET = frozenset({OMP_NUM_THREADS, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, VLLM_LOGGING_LEVEL})
"""Where the value in the driver's own environment wins; the rest is needed as it is."""


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
) -> dict[str, str]:
    """Returns the environment variables to launch an actor with.

    Args:
        role: ``"trainer"`` or ``"rollout"``, as in ``lifecycle.Role``; only the former gets the Flight Recorder's
            variables, only the latter vLLM's.
        run_id: Identifies the run, see ``RUN_ID``.
        kv_cache_gib: KV cache of a rollout actor in GiB. A fraction cannot be said here: the variable is left out
            then, and the engine must be given ``kv_cache_memory_bytes``.
        rank: The actor's rank within its role; None leaves it unmarked.
        node: For ``NODE``; None leaves it unmarked.
        interface: The network interface over which the other ranks reach the actor's node; None: libraries find one.
        temp_dir: Folder of the actor's machine for its temporary files; None: the machine's own.
        hang_dir: Folder of the actor's machine for ``HANG_DIR``; None: the actor will not be asked.
    """
    variables = dict(ALL_ACTORS)
    if interface is not None:
        variables[GLOO_SOCKET_IFNAME] = interface
    if interface == LOOPBACK_INTERFACE:  # elsewhere NCCL knows better which of several to use
        variables[NCCL_SOCKET_IFNAME] = interface
    if temp_dir is not None:
        variables[TMPDIR] = str(temp_dir)
    if hang_dir is not None:
        variables[HANG_DIR] = str(hang_dir)
    if role == "trainer":
        variables |= TRAINER_ACTORS
        if hang_dir is not None:
            variables[TORCH_NCCL_DEBUG_INFO_TEMP_FILE] = str(hang_dir / NCCL_FLIGHTS)
            variables[TORCH_NCCL_DEBUG_INFO_PIPE_FILE] = str(hang_dir / NCCL_REQUESTS)
    if role == "rollout":
        variables |= ROLLOUT_ACTORS
        if kv_cache_gib >= 1 and float(kv_cache_gib).is_integer():
            variables[VLLM_CPU_KVCACHE_SPACE] = str(int(kv_cache_gib))
    # An interface of the driver's machine says nothing of another one's.
    may_set = USER_MAY_SET if interface == LOOPBACK_INTERFACE else USER_MAY_SET - {GLOO_SOCKET_IFNAME}
    variables |= {name: os.environ[name] for name in may_set & variables.keys() & os.environ.keys()}
    variables |= {RUN_ID: run_id, ROLE: str(role)}
    if rank is not None:
        variables[RANK] = str(rank)
    if node is not None:
        variables[NODE] = node
    return variables


def base_dir() -> Path:
    """Where relative paths of what a run writes start: the folder of ``BASE_DIR``, or the working directory."""
    return Path(os.environ.get(BASE_DIR) or ".").absolute()


def has_base_dir() -> bool:
    """Returns True if ``BASE_DIR`` is set."""
    return bool(os.environ.get(BASE_DIR))


def submitted_to() -> str | None:
    """The cluster that this process's job was submitted to, ``host:port``; None outside of a job.

    ``ray job submit`` itself reads the variable as the address of a web server, which says nothing of this process.
    """
    address = os.environ.get(RAY_ADDRESS, "").strip()
    return address if address and "://" not in address else None


def gloo_interface() -> str | None:
    """The interface that gloo is told to use, if it is."""
    return os.environ.get(GLOO_SOCKET_IFNAME) or None


def mark_run(run_id: str) -> None:
    """Marks this process's environment, for the children that a library will launch: Ray's own processes."""
    os.environ[RUN_ID] = run_id


def marked(run_id: str) -> dict[str, str]:
    """Returns this process's environment with the mark of a run, for a process of ours that is to end with it."""
    return {**os.environ, PYTHONUTF8: "1", RUN_ID: run_id}


def unmarked() -> dict[str, str]:
    """Returns this process's environment without the mark of a run, for a process that is to outlive it."""
    return {name: value for name, value in os.environ.items() if name != RUN_ID}


def keep_ray_on_loopback() -> None:
    """Sets ``RAY_ENABLE_CLUSTER`` for the processes that Ray will launch."""
    os.environ[RAY_ENABLE_CLUSTER] = "0"


def use_ray_token(file: Path) -> None:
    """Makes the Ray that this process will start, and all that it launches, ask for the token in a file."""
    for name in (RAY_AUTH_TOKEN, RAY_AUTH_MODE):
        os.environ.pop(name, None)
    os.environ[RAY_AUTH_TOKEN_PATH] = str(file)


def become_gpuless() -> None:
    """Sets what an actor's environment has, and hides all GPUs; for a process that has imported no library yet."""
    os.environ.update({**ALL_ACTORS, CUDA_VISIBLE_DEVICES: ""})


def local_rank() -> int | None:
    """This process's place among those of its host, if a launcher has set it."""
    value = os.environ.get(LOCAL_RANK)
    return int(value) if value and value.isdecimal() else None


def local_world_size() -> int | None:
    """Returns how many ranks torchrun, or who does as it does, has started on this machine; None if not told."""
    value = os.environ.get(LOCAL_WORLD_SIZE)
    return int(value) if value is not None and value.isdecimal() else None


def nccl_cumem_is_off() -> bool:
    """Returns True if ``NCCL_CUMEM_ENABLE`` forbids NCCL to map its memory itself."""
    return os.environ.get(NCCL_CUMEM_ENABLE) == "0"


def belongs_to_run(environ: Mapping[str, str], run_id: str, node: str | None = None) -> bool:
    """Returns True if the run launched the process with this environment, on ``node`` if that is given."""
    return environ.get(RUN_ID) == run_id and node in (None, environ.get(NODE))


def actor_of(environ: Mapping[str, str]) -> RankId | None:
    """The actor that a process is, or is a child of; None for any other process."""
    role, rank = environ.get(ROLE), environ.get(RANK, "")
    return RankId(Role(role), int(rank)) if role in tuple(Role) and rank.isdecimal() else None


def hang_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder of ``HANG_DIR``, if it is set and exists on this machine; of this process unless told."""
    value = (os.environ if environ is None else environ).get(HANG_DIR)
    return Path(value) if value and Path(value).is_dir() else None
