"""An error names a timeout as the users of the job's host write it, and the host takes that key."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from omegaconf import OmegaConf

from rl_safe_workers.adapters.host_settings import HostSettings, name_host_timeouts
from rl_safe_workers.adapters.nemo_rl import nemo_rl_settings
from rl_safe_workers.adapters.swift import swift_settings
from rl_safe_workers.adapters.verl import settings as verl_settings
from rl_safe_workers.config import TimeoutsConfig
from rl_safe_workers.lifecycle import Phase, name_timeouts, timeout_setting
from rl_safe_workers.recipe import load_recipe
from tests.integration.runs import RECIPES


@pytest.fixture(autouse=True)
def named() -> Iterator[None]:
    yield
    name_timeouts("rl_safe.timeouts.{}", {})


def read_swift(key: str) -> HostSettings:
    (path, phase), variable = key.split(" in ")[0].split("."), key.split(" in ")[1]
    assert variable == swift_settings.VARIABLE
    return swift_settings.job_settings({variable: json.dumps({path: {phase: 17}})})


def read_nemo_rl(key: str) -> HostSettings:
    node = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}=17"]))
    return nemo_rl_settings.NemoRlSettings.read(node[nemo_rl_settings.NODE], source=nemo_rl_settings.NODE)


def read_verl(key: str) -> HostSettings:
    return verl_settings._read(OmegaConf.from_dotlist([f"{verl_settings.NODE}.enabled=true", f"{key}=17"]), {})


@pytest.mark.parametrize(
    ("pattern", "read"),
    [
        (swift_settings.TIMEOUT, read_swift),
        (nemo_rl_settings.TIMEOUT, read_nemo_rl),
        (verl_settings.TIMEOUT, read_verl),
    ],
)
def test_a_host_takes_the_key_that_an_error_names(pattern, read) -> None:
    name_host_timeouts(pattern)
    for phase in type(read(timeout_setting(Phase.SAVE)).timeouts).model_fields:
        assert getattr(read(timeout_setting(phase)).timeouts, phase) == 17
    assert read(timeout_setting(Phase.GROUPS)).timeouts.bootstrap == 17


def test_the_built_in_trainer_takes_the_key_that_an_error_names() -> None:
    for phase in TimeoutsConfig.model_fields:
        config = load_recipe(RECIPES / "quickstart.yaml", [f"{timeout_setting(phase)}=17"])
        assert getattr(config.rl_safe.timeouts, phase) == 17


def test_another_name_takes_the_place_of_the_pattern() -> None:
    name_host_timeouts(verl_settings.TIMEOUT, world=verl_settings.TAKEN["nccl_timeout"])
    assert timeout_setting(Phase.WORLD) == "actor_rollout_ref.nccl_timeout"
    assert timeout_setting(Phase.SAVE) == "actor_rollout_ref.rl_safe.timeouts.save"
