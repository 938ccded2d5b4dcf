"""The environment that actors are launched with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rl_safe_workers.env import (
    actor_env,
    actor_of,
    become_gpuless,
    belongs_to_run,
    hang_dir,
    local_rank,
    marked,
    use_ray_token,
)
from rl_safe_workers.ranks import Role

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def no_variables_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", *INTERFACES, "VLLM_LOGGING_LEVEL", "HF_HUB_OFFLINE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_every_actor_is_offline_silent_and_single_threaded() -> None:
    for role in Role:
        variables = actor_env(role, "run-1", 1.0)
        assert (variables["HF_HUB_OFFLINE"], variables["TRANSFORMERS_OFFLINE"]) == ("1", "1")
        assert (variables["RAY_USAGE_STATS_ENABLED"], variables["OMP_NUM_THREADS"]) == ("0", "1")


def test_only_rollout_actors_get_variables_of_vllm() -> None:
    assert not any(name.startswith("VLLM") for name in actor_env(Role.TRAINER, "run-1", 1.0))
    assert actor_env(Role.ROLLOUT, "run-1", 1.0)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize("role", [Role.TRAINER, Role.ROLLOUT])
@pytest.mark.parametrize("device", ["cpu", "cuda", None])
def test_only_trainers_on_cpu_go_without_a_compiler(role: Role, device: str | None) -> None:
    has_none = actor_env(role, "run-1", 1.0, device=device).get("TORCHDYNAMO_DISABLE") == "1"
    assert has_none == (role is Role.TRAINER and device == "cpu")


@pytest.mark.parametrize(("gib", "expected"), [(1.0, "1"), (4, "4"), (0.25, None), (1.5, None), (0.0, None)])
def test_the_kv_cache_is_set_in_whole_gib_or_not_at_all(gib: float, expected: str | None) -> None:
    assert actor_env(Role.ROLLOUT, "run-1", gib).get("VLLM_CPU_KVCACHE_SPACE") == expected


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("role", list(Role))
def test_gloo_and_nccl_stay_on_the_loopback_interface_of_one_machine(role: Role, interface: str) -> None:
    assert actor_env(role, "run-1", 1.0)[interface] == "lo"
    assert interface not in actor_env(role, "run-1", 1.0, interface=None)


@pytest.mark.parametrize("interface", INTERFACES)
def test_the_user_may_choose_an_interface(monkeypatch: pytest.MonkeyPatch, interface: str) -> None:
    monkeypatch.setenv(interface, "eth3")
    variables = actor_env(Role.TRAINER, "run-1", 1.0)
    assert {name: variables[name] for name in INTERFACES} == dict.fromkeys(INTERFACES, "lo") | {interface: "eth3"}


def test_an_interface_of_the_driver_s_machine_is_not_another_node_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eno1")
    assert actor_env(Role.TRAINER, "run-1", 1.0, interface="ib0")["GLOO_SOCKET_IFNAME"] == "ib0"


def test_temporary_files_go_where_the_run_says() -> None:
    assert actor_env(Role.ROLLOUT, "run-1", 1.0, temp_dir=Path("/x"))["TMPDIR"] == "/x"
    assert "TMPDIR" not in actor_env(Role.ROLLOUT, "run-1", 1.0)


def test_the_user_may_choose_threads_but_not_leave_offline_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    variables = actor_env(Role.TRAINER, "run-1", 1.0)
    assert (variables["OMP_NUM_THREADS"], variables["HF_HUB_OFFLINE"]) == ("8", "1")


def test_processes_are_found_by_their_run() -> None:
    variables = actor_env(Role.TRAINER, "run-1", 1.0)
    assert belongs_to_run(variables, "run-1")
    assert not belongs_to_run(variables, "run-2")
    assert not belongs_to_run({}, "run-1")


@pytest.mark.parametrize("role", list(Role))
def test_processes_are_known_by_their_role_and_rank(role: Role) -> None:
    assert actor_of(actor_env(role, "run-1", 1.0, rank=3)) == (role, 3)
    assert actor_of(actor_env(role, "run-1", 1.0)) is None
    assert actor_of({}) is None


def test_trainers_record_their_collectives_and_can_be_asked_for_them(tmp_path: Path) -> None:
    variables = actor_env(Role.TRAINER, "run-1", 1.0, hang_dir=tmp_path)
    assert variables["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert variables["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == f"{tmp_path}/flight_nccl_"
    assert variables["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == f"{tmp_path}/request_nccl_"
    assert hang_dir(variables) == tmp_path


def test_a_pipe_is_made_only_for_a_trainer_that_will_be_asked(tmp_path: Path) -> None:
    for variables in (
        actor_env(Role.TRAINER, "run-1", 1.0),
        actor_env(Role.ROLLOUT, "run-1", 1.0, hang_dir=tmp_path),
    ):
        assert not any(name.startswith("TORCH_NCCL") for name in variables)


def test_a_folder_of_another_machine_is_none_here(tmp_path: Path) -> None:
    assert hang_dir(actor_env(Role.TRAINER, "run-1", 1.0, hang_dir=tmp_path / "elsewhere")) is None
    assert hang_dir({}) is None


def test_a_process_without_gpus_hides_all_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "0,1", "PATH": "/bin"})
    become_gpuless()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert (os.environ["HF_HUB_OFFLINE"], os.environ["PATH"]) == ("1", "/bin")


@pytest.mark.parametrize(
    ("value", "expected"), [("0", 0), ("11", 11), (None, None), ("", None), ("-1", None), ("1.5", None), ("x", None)]
)
def test_the_local_rank_is_a_whole_number_or_not_set(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: int | None
) -> None:
    if value is not None:
        monkeypatch.setenv("LOCAL_RANK", value)
    assert local_rank() == expected


def test_a_ray_of_our_own_asks_for_the_runs_token_whatever_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/of/another/cluster")
    use_ray_token(Path("/run/ray_token"))
    assert {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")} == {
        "RAY_AUTH_TOKEN_PATH": "/run/ray_token"
    }


def test_processes_of_ours_read_text_as_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUTF8", "0")
    assert actor_env(Role.TRAINER, "run-1", 1.0)["PYTHONUTF8"] == "1"
    assert marked("run-1")["PYTHONUTF8"] == "1"
