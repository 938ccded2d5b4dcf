"""Checks of a run's configuration on the driver, before Ray is started, and what its workers are told."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from rl_safe_workers import env
from rl_safe_workers.adapters.job_processes import folder_of
from rl_safe_workers.adapters.verl import environment
from rl_safe_workers.adapters.verl.compatibility import check_verl
from rl_safe_workers.adapters.verl.settings import (
    NODE,
    STRATEGY,
    VerlSettings,
    engine_nodes,
    read_settings,
    read_sft_settings,
)
from rl_safe_workers.errors import ConfigError

MEGATRON_ENGINE = "verl.workers.config.McoreEngineConfig"
MODES = ("sync", "colocate_async", "separate_async")


def check_run(config: DictConfig) -> VerlSettings | None:
    """Returns the run's settings; None if our engines are not asked for, and verl is to run as it is.

    Raises:
        ConfigError: If the node has an unknown key or wrong value, verl lacks a name that the adapter relies on, or the
            run is of a kind that the adapter has nothing for.
    """
    settings = read_settings(config)
    if not _is_enabled(settings, entry="verl.trainer.main_ppo"):
        return None
    for node in engine_nodes(config):
        strategy = OmegaConf.select(config, f"{node}.strategy")
        if strategy != STRATEGY:
            raise ConfigError(
                f"{NODE}.enabled=true with {node}.strategy={strategy}: it must be {STRATEGY}; set "
                f"model_engine={STRATEGY}"
            )
    if not OmegaConf.select(config, "trainer.use_v1"):
        raise ConfigError(f"{NODE}.enabled=true with trainer.use_v1=false: verl's deprecated trainer is not supported")
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
    if mode not in MODES:
        raise ConfigError(f"{NODE}.enabled=true with trainer.v1.trainer_mode={mode}: use {' or '.join(MODES)}")
    return settings


def check_sft(config: DictConfig) -> VerlSettings | None:
    """As `check_run`, of verl's trainer for supervised fine-tuning.

    Raises:
        ConfigError: As `check_run`.
    """
    settings = read_sft_settings(config)
    if not _is_enabled(settings, entry="verl.trainer.sft_trainer"):
        return None
    # verl's node of Megatron's engine has no strategy: the class of the settings has it.
    target = OmegaConf.select(config, "engine._target_")
    strategy = OmegaConf.select(config, "engine.strategy") or (STRATEGY if target == MEGATRON_ENGINE else target)
    if strategy != STRATEGY:
        raise ConfigError(
            f"{NODE}.enabled=true with engine.strategy={strategy}: it must be {STRATEGY}; set engine={STRATEGY} "
            f"optim={STRATEGY}"
        )
    if OmegaConf.select(config, "checkpoint.async_save"):
        raise ConfigError(
            f"{NODE}.enabled=true with checkpoint.async_save=true: verl's trainer names a step before such a save is "
            "complete; set it to false"
        )
    return settings


def _is_enabled(settings: VerlSettings, *, entry: str) -> bool:
    """Returns True if our engines are asked for, and verl fits them.

    Args:
        settings: Of the adapter.
        entry: verl's own, for the error.

    Raises:
        ConfigError: If the environment asks for our engines and the settings do not, or verl lacks a name.
    """
    environment.check_loadable()
    if settings.enabled:
        check_verl()
    elif environment.is_wanted():
        raise ConfigError(
            f"{environment.ENGINE_VENDOR}={environment.VENDOR} is set, but {NODE}.enabled is not true: set both, "
            f"or run {entry} for the engines alone"
        )
    return settings.enabled


def prepare_job(config: DictConfig, settings: VerlSettings, run_id: str) -> dict[str, str]:
    """Adds what every process of the job needs to ``ray_kwargs.ray_init.runtime_env``; returns it.

    Args:
        config: The run's, which is changed.
        settings: Of the adapter.
        run_id: Marks the job's processes, so that they can be ended wherever they were forgotten.

    Raises:
        ConfigError: If the configuration or the job that this is submitted to says otherwise.
    """
    variables = {**environment.job_variables(settings), env.RUN_ID: run_id, env.HANG_DIR: str(folder_of(run_id))}
    with open_dict(config):
        ray_init: Any = config.ray_kwargs.ray_init
        runtime_env: Any = OmegaConf.to_container(ray_init.get("runtime_env") or OmegaConf.create({}), resolve=True)
        given: dict[str, Any] = runtime_env.setdefault("env_vars", {}) or {}
        for name, value in variables.items():
            if str(given.get(name, value)) != value:
                raise ConfigError(f"ray_kwargs.ray_init.runtime_env.env_vars.{name} says other than {NODE}: remove it")
        runtime_env["env_vars"] = {**given, **variables}
        ray_init.runtime_env = runtime_env
    return variables
