"""Arguments that limit NCCL's channels for a plain script's groups; NCCL itself is tested in tests/gpu."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_safe_workers import channel_limits, standalone
from rl_safe_workers.adapters import hosting
from rl_safe_workers.comms import megatron_groups
from rl_safe_workers.config import BootstrapConfig
from rl_safe_workers.errors import ConfigError, LayoutError
from rl_safe_workers.topology.groups import KINDS, Features

EP2 = {"expert_model_parallel_size": 2}


@pytest.fixture
def has_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a GPU, as far as the function looks; torch's options of NCCL are a dictionary."""
    monkeypatch.setattr(standalone.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(standalone, "world_options", lambda limits: {"world": limits.get("world")})
    yield
    standalone._config_file.close()


def limits_in(arguments: standalone.ChannelLimits) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(arguments.megatron["nccl_communicator_config_path"]).read_text())
    return found


def test_groups_of_scalars_get_one_channel_and_groups_of_large_data_no_limit(has_gpu: None) -> None:
    made = channel_limits(world_size=2, **EP2)
    assert made.world == {"world": 1}
    assert made.megatron.items() >= EP2.items()
    limits = limits_in(made)
    assert limits["tp_dp_cp"] == limits["tp_ep_mp"] == {"max_ctas": 1}
    assert not {"ep", "dp_cp", "world"} & limits.keys()


def test_own_limits_win(has_gpu: None) -> None:
    assert limits_in(channel_limits(world_size=2, max_ctas={"ep": 16}, **EP2))["ep"] == {"max_ctas": 16}


def test_experts_take_the_tensor_parallel_size_as_in_megatron(has_gpu: None) -> None:
    features = Features(moe=True, moe_dispatcher="allgather")
    made = channel_limits(world_size=4, features=features, tensor_model_parallel_size=2, **EP2)
    # With one rank in each such group, Megatron would make it, and it would be limited.
    assert "ep_tp" not in limits_in(made)
    assert "expert_tensor_parallel_size" not in made.megatron


def test_a_second_call_removes_the_file_of_the_first(has_gpu: None) -> None:
    first = Path(channel_limits(world_size=2, **EP2).megatron["nccl_communicator_config_path"])
    assert first.stat().st_mode & 0o777 == 0o600
    channel_limits(world_size=2, **EP2)
    assert not first.exists()


def test_without_a_gpu_there_are_no_limits() -> None:
    assert channel_limits(world_size=2, **EP2) == standalone.ChannelLimits(world=None, megatron=EP2)


def test_the_number_of_ranks_is_torchruns(has_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LayoutError, match="3"):
        channel_limits(**EP2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"expert_size": 2, "world_size": 2}, "unknown key expert_size; the nearest known key is expert_model_p"),
        ({"tensor_model_parallel_size": 0, "world_size": 2}, "tensor_model_parallel_size"),
        ({"max_ctas": {"epp": 2}, "world_size": 2}, "^max_ctas.epp: there is no group of that name; did you mean "),
        ({"max_ctas": {"ep": 65}, "world_size": 2}, "^max_ctas.ep=65 must be from 1 to 64"),
        ({}, "WORLD_SIZE is not set"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=message):
        channel_limits(**arguments)


def test_limits_are_read_from_nccls_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    undefined = -(2**31)  # NCCL_CONFIG_UNDEF_INT
    live = [
        SimpleNamespace(kind=KINDS["WORLD"], group=1),
        SimpleNamespace(kind=KINDS["DATA_PARALLEL_GROUP_WITH_CP"], group=undefined),
        SimpleNamespace(kind=KINDS["EXPERT_MODEL_PARALLEL_GROUP"], group=16),
        SimpleNamespace(kind=None, group=1),
    ]
    nccl = lambda limit: SimpleNamespace(options=SimpleNamespace(config=SimpleNamespace(max_ctas=limit)))  # noqa: E731
    gloo = SimpleNamespace(options=SimpleNamespace())
    monkeypatch.setattr(megatron_groups, "live_groups", lambda: live)
    monkeypatch.setattr(megatron_groups.torch_groups, "backends_of", lambda limit: [gloo, nccl(limit)])
    assert megatron_groups.limits_of_groups() == {"world": 1, "ep": 16}


@pytest.mark.parametrize(
    ("stages", "budget", "has_gpu", "expected"),
    [
        (1, True, True, {"timeout": 5, "pg_options": {"world": 1}}),
        (2, True, True, {"timeout": 5}),
        (1, False, True, {"timeout": 5}),
        (1, True, False, {"timeout": 5}),
    ],
)
def test_a_hosts_default_group_is_limited_unless_it_may_carry_activations(
    stages: int, budget: bool, has_gpu: bool, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda **options: made.append(options))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(hosting, "world_options", lambda limits: limits)
    with hosting.limited_world(BootstrapConfig(budget=budget), stages=stages):
        dist.init_process_group(timeout=5)
    dist.init_process_group(backend="other")
    assert made == [expected, {"backend": "other"}]
