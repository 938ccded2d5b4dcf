"""NCCL's channels of groups that several engines share, and of those that verl sends changes of weights over."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_safe_workers.adapters.host_settings import name_host_settings
from rl_safe_workers.adapters.verl.features import features_of
from rl_safe_workers.adapters.verl.process import TrainerProcess, VerlComms
from rl_safe_workers.adapters.verl.settings import SETTING, VerlSettings
from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.setting_names import name_settings
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.workers import communicators
from rl_safe_workers.workers.safe_trainer import SafeTrainer

MOE = Features(moe=True, moe_dispatcher="alltoall")
EXCHANGED = "tp_ep_mp"
"""Carries scalars with one dispatcher, and tokens with the other."""


def process(node: dict[str, Any] | None = None, *, features: Features = MOE, pipeline: int = 1) -> TrainerProcess:
    """One that has taken no world: TP2 EP2."""
    found = TrainerProcess.__new__(TrainerProcess)
    found.settings = VerlSettings.read(node, source="rl_safe")
    sizes = MegatronConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )
    found._trainer = SafeTrainer(
        training_rank=0,
        training_size=8,
        rl_safe=found.settings.rl_safe(),
        megatron=sizes,
        features=features,
        device=torch.device("cpu"),
        host_comms=VerlComms(found.settings),
    )
    return found


def limits_of(*args: Any, **kwargs: Any) -> dict[str, int]:
    """Returns the limits that such a process would make groups with."""
    return process(*args, **kwargs).trainer.comms.wanted_limits()


def test_an_engine_alone_limits_what_carries_scalars_for_its_dispatcher() -> None:
    assert limits_of()[EXCHANGED] == 1
    assert EXCHANGED not in limits_of(features=Features(moe=True, moe_dispatcher="allgather"))


@pytest.mark.parametrize("own", ["alltoall", "allgather"])
def test_a_group_is_limited_only_if_it_carries_scalars_for_every_engine_of_the_job(own) -> None:
    limits = limits_of({"dispatchers": ["allgather", "alltoall"]}, features=Features(moe=True, moe_dispatcher=own))
    assert EXCHANGED not in limits
    assert limits["mp"] == 1


def test_limits_that_were_set_hold_for_every_engine_and_without_a_budget() -> None:
    node = {"bootstrap": {"max_ctas": {EXCHANGED: 8, "ep": 4}}, "dispatchers": ["allgather", "alltoall"]}
    limits = limits_of(node)
    assert (limits[EXCHANGED], limits["ep"]) == (8, 4)
    assert limits_of({"bootstrap": {"budget": False, "max_ctas": {"ep": 4}}}) == {"ep": 4}


@pytest.mark.parametrize("made", [None, 1])
def test_the_default_group_keeps_the_limit_that_it_was_made_with(made, monkeypatch) -> None:
    monkeypatch.setattr(communicators.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(communicators, "limit_of", lambda group: made)
    assert limits_of().get("world") == made


def test_groups_that_changes_of_weights_are_gathered_over_have_no_limit() -> None:
    assert EXCHANGED not in limits_of({"delta_weights": True})
    staged = limits_of({"delta_weights": True}, pipeline=2)
    assert staged[EXCHANGED] == 1, "with stages they go over the default group"
    node = {"delta_weights": True, "bootstrap": {"max_ctas": {EXCHANGED: 8}}}
    assert limits_of(node)[EXCHANGED] == 8


def test_a_group_that_is_not_in_the_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="inter_ep_dp: Megatron creates none in this layout"):
        limits_of({"bootstrap": {"max_ctas": {"inter_ep_dp": 8}}})


@pytest.fixture
def named_as_under_verl() -> Iterator[None]:
    """Settings have the names that verl's plugin gives them."""
    name_host_settings(SETTING)
    yield
    name_settings("rl_safe.{}", timeouts={})


@pytest.mark.usefixtures("named_as_under_verl")
def test_an_engine_that_finds_groups_too_narrow_says_what_to_set(caplog) -> None:
    first = process()
    first.trainer.comms.limits = first.trainer.comms.wanted_limits()
    first._check_limits()
    assert caplog.text == ""
    first.trainer.features = Features(moe=True, moe_dispatcher="allgather")
    first._check_limits()
    assert "fewer channels than it needs: tp_ep_mp; set actor_rollout_ref.rl_safe.bootstrap.max_ctas.tp_ep_mp=64" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("overrides", "pattern", "expected"),
    [({}, None, {"p2p"}), ({"cp_comm_type": "a2a"}, None, {"a2a"}), ({}, "MEM*", {"p2p", "a2a"})],
)
def test_how_context_parallel_ranks_exchange(
    overrides: dict[str, str], pattern: str | None, expected: set[str]
) -> None:
    engine = SimpleNamespace(
        override_transformer_config=overrides,
        override_ddp_config=None,
        use_distributed_optimizer=True,
        virtual_pipeline_model_parallel_size=None,
    )
    assert features_of(SimpleNamespace(hybrid_override_pattern=pattern), engine).context_exchange == expected
