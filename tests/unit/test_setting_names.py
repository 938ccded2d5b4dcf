"""An error names a setting as the users of the job's host write it, and the host takes that key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from omegaconf import OmegaConf

from rl_safe_workers.adapters.host_settings import HostSettings, name_host_settings
from rl_safe_workers.adapters.nemo_rl import nemo_rl_settings
from rl_safe_workers.adapters.swift import swift_settings
from rl_safe_workers.adapters.verl import settings as verl_settings
from rl_safe_workers.config import TimeoutsConfig
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.recipe import load_recipe
from rl_safe_workers.setting_names import bootstrap_setting, name_settings, timeout_setting
from rl_safe_workers.topology.budget import check_overrides
from tests.integration.runs import RECIPES


@pytest.fixture(autouse=True)
def named() -> Iterator[None]:
    yield
    name_settings("rl_safe.{}", timeouts={})


def read_swift(key: str) -> HostSettings:
    path, variable = key.split(" in ")
    assert variable == swift_settings.VARIABLE
    given = OmegaConf.to_container(OmegaConf.from_dotlist([f"{path}=17"]))
    return swift_settings.job_settings({variable: json.dumps(given)})


def read_nemo_rl(key: str) -> HostSettings:
    node = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}=17"]))
    return nemo_rl_settings.NemoRlSettings.read(node[nemo_rl_settings.NODE], source=nemo_rl_settings.NODE)


def read_verl(key: str) -> HostSettings:
    return verl_settings._read(OmegaConf.from_dotlist([f"{verl_settings.NODE}.enabled=true", f"{key}=17"]), {})


@pytest.mark.parametrize(
    ("pattern", "read"),
    [
        (swift_settings.SETTING, read_swift),
        (nemo_rl_settings.SETTING, read_nemo_rl),
        (verl_settings.SETTING, read_verl),
    ],
)
def test_a_host_takes_the_key_that_an_error_names(pattern, read) -> None:
    name_host_settings(pattern)
    for phase in type(read(timeout_setting(Phase.SAVE)).timeouts).model_fields:
        assert getattr(read(timeout_setting(phase)).timeouts, phase) == 17
    assert read(timeout_setting(Phase.GROUPS)).timeouts.bootstrap == 17
    assert read(bootstrap_setting("max_ctas.ep")).bootstrap.max_ctas.ep == 17


def test_the_built_in_trainer_takes_the_key_that_an_error_names() -> None:
    for phase in TimeoutsConfig.model_fields:
        config = load_recipe(RECIPES / "quickstart.yaml", [f"{timeout_setting(phase)}=17"])
        assert getattr(config.rl_safe.timeouts, phase) == 17
    config = load_recipe(RECIPES / "quickstart.yaml", [bootstrap_setting("max_ctas.ep=17")])
    assert config.rl_safe.bootstrap.max_ctas.ep == 17


def test_another_name_takes_the_place_of_the_pattern() -> None:
    name_host_settings(verl_settings.SETTING, world=verl_settings.TAKEN["nccl_timeout"])
    assert timeout_setting(Phase.WORLD) == "actor_rollout_ref.nccl_timeout"
    assert timeout_setting(Phase.SAVE) == "actor_rollout_ref.rl_safe.timeouts.save"


@pytest.mark.parametrize(
    ("pattern", "setting"),
    [
        (swift_settings.SETTING, "bootstrap.max_ctas.inter_ep_dp in RL_SAFE_SWIFT"),
        (verl_settings.SETTING, "actor_rollout_ref.rl_safe.bootstrap.max_ctas.inter_ep_dp"),
    ],
)
def test_a_limit_of_no_group_is_named_as_the_host_writes_it(pattern, setting) -> None:
    name_host_settings(pattern)
    with pytest.raises(ConfigError, match=f"^{re.escape(setting)}: Megatron creates none in this layout"):
        check_overrides({"inter_ep_dp": 8}, keys=["ep"])
