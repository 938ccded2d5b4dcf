"""Each variable hurts where it does, and not where it is unset, harmless or nobody's."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_safe_workers.doctor.check import Subject
from rl_safe_workers.doctor.variables import VARIABLES, Surroundings, judge
from rl_safe_workers.env import ALL_ACTORS, USER_MAY_SET
from rl_safe_workers.findings import Severity
from rl_safe_workers.recipe import load_recipe

ROOT = Path(__file__).parents[2]
COLOCATED = ("cluster.colocated=true",)
TENSOR = ("cluster.num_trainers=2", "megatron.tensor_model_parallel_size=2")
JOINS = ("cluster.ray_address=auto",)


def run(recipe: str, *overrides: str) -> Subject:
    path = str(ROOT / "recipes" / recipe)
    return Subject(recipe=path, overrides=overrides, config=load_recipe(path, overrides))


CPU, GPU = run("quickstart.yaml"), run("quickstart_gpu.yaml")
CPU_JOINS, GPU_JOINS = run("quickstart.yaml", *JOINS), run("quickstart_gpu.yaml", *JOINS)
GPU_SHARED, GPU_TENSOR = run("quickstart_gpu.yaml", *COLOCATED), run("quickstart_gpu.yaml", *TENSOR)
ANY = Subject()


def found(environ: dict[str, str], subject: Subject, torch: str = "2.11.0") -> dict[str, Severity]:
    around = Surroundings(
        subject=subject, environ=environ, interfaces=frozenset({"lo", "eth0", "eth1"}), cpus=4, torch=torch
    )
    return {finding.code: finding.severity for finding in judge(around, subject).findings}


EXPANDABLE = "max_split_size_mb:512, expandable_segments:True"
HURT: list[tuple[str, dict[str, str], Subject]] = [
    ("env-gloo-socket-ifname", {"GLOO_SOCKET_IFNAME": "nonsense0"}, CPU),
    ("env-gloo-socket-ifname", {"GLOO_SOCKET_IFNAME": "eth0,nonsense0"}, CPU),
    ("env-gloo-socket-ifname", {"GLOO_SOCKET_IFNAME": "^lo"}, CPU),
    ("env-gloo-socket-ifname", {"GLOO_SOCKET_IFNAME": "eth"}, ANY),
    ("env-nccl-socket-ifname", {"NCCL_SOCKET_IFNAME": "ib"}, GPU),
    ("env-nccl-socket-ifname", {"NCCL_SOCKET_IFNAME": "=eth"}, GPU),
    ("env-gloo-loopback", {"GLOO_SOCKET_IFNAME": "lo"}, CPU_JOINS),
    ("env-nccl-loopback", {"NCCL_SOCKET_IFNAME": "=lo"}, GPU_JOINS),
    ("env-nccl-cumem-enable", {"NCCL_CUMEM_ENABLE": "0"}, GPU),
    ("env-nccl-p2p-disable", {"NCCL_P2P_DISABLE": "1"}, GPU),
    ("env-nccl-shm-disable", {"NCCL_SHM_DISABLE": "1"}, ANY),
    ("env-nccl-ib-disable", {"NCCL_IB_DISABLE": "1"}, GPU_JOINS),
    ("env-nccl-debug", {"NCCL_DEBUG": "info"}, GPU),
    ("env-nccl-debug", {"NCCL_DEBUG": "TRACE"}, GPU),
    ("env-nccl-proto", {"NCCL_PROTO": "LL128"}, GPU),
    ("env-nccl-nvls-enable", {"NCCL_NVLS_ENABLE": "1"}, GPU),
    ("env-nccl-runtime-connect", {"NCCL_RUNTIME_CONNECT": "0"}, GPU),
    ("env-nccl-buffsize", {"NCCL_BUFFSIZE": "8388608"}, GPU),
    ("env-torch-nccl-blocking-wait", {"TORCH_NCCL_BLOCKING_WAIT": "1"}, GPU),
    ("env-nccl-blocking-wait", {"NCCL_BLOCKING_WAIT": "1"}, GPU),
    ("env-torch-nccl-async-error-handling", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, GPU),
    ("env-nccl-async-error-handling", {"NCCL_ASYNC_ERROR_HANDLING": "0"}, GPU),
    ("env-torch-nccl-use-comm-nonblocking", {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}, GPU),
    ("env-torch-nccl-abort-in-destroy-pg", {"TORCH_NCCL_ABORT_IN_DESTROY_PG": "1"}, GPU),
    ("env-torch-distributed-debug", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, CPU),
    ("env-torch-dist-init-barrier", {"TORCH_DIST_INIT_BARRIER": "1"}, CPU),
    ("env-cuda-launch-blocking", {"CUDA_LAUNCH_BLOCKING": "1"}, GPU),
    ("env-cuda-device-max-connections", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, GPU_TENSOR),
    ("env-cuda-device-max-connections", {}, GPU_TENSOR),
    ("env-pytorch-cuda-alloc-conf", {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}, GPU_SHARED),
    ("env-pytorch-alloc-conf", {"PYTORCH_ALLOC_CONF": EXPANDABLE}, GPU_SHARED),
    ("env-omp-num-threads", {"OMP_NUM_THREADS": "2"}, CPU),
    ("env-ray-experimental-noset-cuda-visible-devices", {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, GPU),
    ("env-ray-memory-monitor-refresh-ms", {"RAY_memory_monitor_refresh_ms": "0"}, CPU),
    ("env-ray-object-store-allow-slow-storage", {"RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1"}, CPU),
    ("env-ray-grpc-enable-http-proxy", {"RAY_grpc_enable_http_proxy": "1", "http_proxy": "http://p:3128"}, CPU_JOINS),
]
"""Code, environment that has it, run."""
HARMLESS: list[tuple[dict[str, str], Subject]] = [
    ({}, CPU),
    ({}, GPU),
    ({}, CPU_JOINS),
    ({}, GPU_JOINS),
    ({}, GPU_SHARED),
    ({}, ANY),
    ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, CPU),
    ({"GLOO_SOCKET_IFNAME": "lo"}, CPU),
    ({"NCCL_SOCKET_IFNAME": "eth"}, GPU),
    ({"NCCL_SOCKET_IFNAME": "ib,eth"}, GPU),
    ({"NCCL_SOCKET_IFNAME": "=eth0"}, GPU),
    ({"NCCL_SOCKET_IFNAME": "^docker"}, GPU),
    ({"NCCL_SOCKET_IFNAME": "ib"}, CPU),
    ({"NCCL_CUMEM_ENABLE": "1", "NCCL_P2P_DISABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "WARN"}, GPU),
    ({"NCCL_CUMEM_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "1"}, CPU),
    ({"NCCL_NVLS_ENABLE": "2"}, GPU),
    ({"NCCL_NVLS_ENABLE": "2"}, ANY),
    ({"NCCL_NVLS_ENABLE": "1"}, CPU),
    ({"NCCL_IB_DISABLE": "1"}, GPU),
    ({"NCCL_BUFFSIZE": "4194304"}, GPU),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_BLOCKING_WAIT": "0"}, GPU),
    ({"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_DIST_INIT_BARRIER": "0"}, CPU),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, GPU_TENSOR),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, GPU),
    ({"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE, "PYTORCH_ALLOC_CONF": EXPANDABLE}, GPU),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, GPU_SHARED),
    ({"OMP_NUM_THREADS": "1"}, CPU),
    ({"OMP_NUM_THREADS": "64"}, ANY),
    ({"OMP_NUM_THREADS": "64"}, CPU_JOINS),
    ({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, CPU),
    ({"RAY_memory_monitor_refresh_ms": "250"}, CPU),
    ({"RAY_grpc_enable_http_proxy": "1", "http_proxy": "http://p:3128", "no_proxy": "10.0.0.0/8"}, CPU_JOINS),
    ({"http_proxy": "http://p:3128"}, CPU_JOINS),
    ({"LOCAL_RANK": "1"}, GPU),
]


@pytest.mark.parametrize(("code", "environ", "subject"), HURT)
def test_a_variable_that_hurts_is_found(code: str, environ: dict[str, str], subject: Subject) -> None:
    if subject is GPU_TENSOR:
        assert code in found(environ, subject)
    else:
        assert found(environ, subject).keys() == {code}


@pytest.mark.parametrize(("environ", "subject"), HARMLESS)
def test_what_hurts_nobody_is_not_found(environ: dict[str, str], subject: Subject) -> None:
    assert found(environ, subject) == {}


def test_nvlink_multicast_is_a_risk_only_if_forced() -> None:
    assert found({"NCCL_NVLS_ENABLE": "1"}, GPU) == {"env-nccl-nvls-enable": Severity.RISKS}
    assert found({"NCCL_NVLS_ENABLE": "2"}, GPU) == found({}, GPU) == {}


def test_a_local_rank_is_in_the_way_since_torch_2_15() -> None:
    assert found({"LOCAL_RANK": "1"}, GPU, torch="2.15.0+cu130") == {"env-local-rank": Severity.RISKS}
    assert found({"LOCAL_RANK": "0"}, GPU, torch="2.15.0+cu130") == {}


def test_an_interface_that_is_not_there_stops_the_run_and_is_named() -> None:
    around = Surroundings(
        subject=CPU, environ={"GLOO_SOCKET_IFNAME": "nonsense0"}, interfaces=frozenset({"lo"}), cpus=4
    )
    (finding,) = judge(around, CPU).findings
    assert finding.severity is Severity.STOPS
    assert finding.text.startswith("GLOO_SOCKET_IFNAME=nonsense0: ")


def test_every_row_has_a_case_and_every_code_one_row() -> None:
    around = {code for code, _, _ in HURT} | {"env-local-rank"}
    listed = [row.code or f"env-{row.name.lower().replace('_', '-')}" for row in VARIABLES]
    assert sorted(listed) == sorted(around)


def test_every_row_says_why_since_when_on_what_evidence_and_what_avoids_it() -> None:
    for row in VARIABLES:
        assert all([row.text, row.since, row.evidence, row.avoid]), row.name
        assert not row.text.endswith("."), row.name
        assert not row.avoid.endswith("."), row.name


def test_there_is_no_row_for_what_actors_are_given_whatever_the_driver_has() -> None:
    assert {row.name for row in VARIABLES} & (ALL_ACTORS.keys() - USER_MAY_SET) == set()
