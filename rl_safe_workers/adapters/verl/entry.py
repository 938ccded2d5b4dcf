"""Checks a run's configuration on the driver before Ray starts, and prepares the variables for its workers."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from rl_safe_workers import env
from rl_safe_workers.adapters.job_processes import folder_of
from rl_safe_workers.adapters.verl import environment
from rl_safe_workers.adapters.verl.compatibility import check_engines, check_verl
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
_ROLLOUT = "actor_rollout_ref.rollout"
_TENSOR_PARALLEL = "an engine's ranks must be tensor-parallel to be read back"
_Fits = tuple[tuple[str, tuple[Any, ...], str], ...]
"""Keys of verl's configuration, the values with which a feature works, and the reason for the limit."""


def _on_trainers_gpus(what: str) -> _Fits:
    """Returns the limits that proved and packed syncs share.

    Args:
        what: Word for the reasons: ``proved`` or ``packed``.
    """
    place = f"only syncs to engines on the trainers' GPUs are {what}"
    return (
        ("trainer.v1.trainer_mode", ("sync", "colocate_async"), place),
        (f"{_ROLLOUT}.name", ("vllm",), f"only syncs to vLLM's engines are {what}"),
        (f"{_ROLLOUT}.checkpoint_engine.backend", ("naive",), place),
        (f"{_ROLLOUT}.quantization", (), f"only syncs to engines that are not quantised are {what}"),
    )


_PROVED: _Fits = (
    *_on_trainers_gpus("proved"),
    (f"{_ROLLOUT}.data_parallel_size", (1,), _TENSOR_PARALLEL),
    (f"{_ROLLOUT}.pipeline_model_parallel_size", (1,), _TENSOR_PARALLEL),
    (f"{_ROLLOUT}.disaggregation.enabled", (False,), _TENSOR_PARALLEL),
)
_PACKED: _Fits = (
    *_on_trainers_gpus("packed"),
    (f"{_ROLLOUT}.disaggregation.enabled", (False,), "only syncs to whole engines are packed"),
)
MODES = ("sync", "colocate_async", "separate_async")


def check_run(config: DictConfig) -> VerlSettings | None:
    """Checks a run and returns its settings; None if the run does not ask for our engines. Then verl runs unchanged.

    Raises:
        ConfigError: If the node has an unknown key or wrong value, if verl lacks a name that the adapter needs, or if
            the adapter does not support this kind of run.
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
    if settings.prove_sync_freq >= 0:
        _check_fits(config, f"prove_sync_freq={settings.prove_sync_freq}", "prove_sync_freq=-1", _PROVED)
    if settings.packed_sync:
        _check_fits(config, "packed_sync=true", "packed_sync=false", _PACKED)
    return settings


def _check_fits(config: DictConfig, feature: str, off: str, fits: _Fits) -> None:
    """Refuses a run that does not suit a feature of our vLLM workers.

    Args:
        config: The run's configuration.
        feature: The setting that asks for the feature.
        off: The same setting, turned off.
        fits: The limits of the feature.

    Raises:
        ConfigError: If a key has an unsuitable value, or verl lacks a name; names it.
    """
    check_engines()
    for key, suitable, reason in fits:
        value = OmegaConf.select(config, key)
        if value is not None and value not in suitable:
            raise ConfigError(f"{NODE}.{feature} with {key}={value}: {reason}; set {NODE}.{off}")
    model: Any = OmegaConf.to_container(config.actor_rollout_ref.model)
    lora = model.get("lora") or {}
    if (model.get("lora_rank") or lora.get("rank")) and not lora.get("merge"):
        raise ConfigError(f"{NODE}.{feature} with LoRA adapters: it needs syncs of whole weights; set {NODE}.{off}")


def check_sft(config: DictConfig) -> VerlSettings | None:
    """Does the same as `check_run`, for verl's trainer for supervised fine-tuning.

    Raises:
        ConfigError: As `check_run`.
    """
    settings = read_sft_settings(config)
    if not _is_enabled(settings, entry="verl.trainer.sft_trainer"):
        return None
    if settings.packed_sync:
        raise ConfigError(f"{NODE}.packed_sync=true: supervised fine-tuning has no weight syncs; set it to false")
    # verl's node for Megatron's engine has no key ``strategy``: it is a default of the settings' class.
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
    """Returns True if the settings ask for our engines. Then it also checks that verl has every name that they need.

    Args:
        settings: The adapter's settings.
        entry: verl's own entry, for the error.

    Raises:
        ConfigError: If the environment asks for our engines but the settings do not, or if verl lacks a name.
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
    """Adds the variables that every process of the job needs to ``ray_kwargs.ray_init.runtime_env``; returns them.

    Args:
        config: The run's configuration, which is changed.
        settings: The adapter's settings.
        run_id: The mark of the job's processes, by which leftover processes are found and ended.

    Raises:
        ConfigError: If the configuration or the submitted job sets one of the variables to another value.
    """
    variables = {**environment.job_variables(settings), env.RUN_ID: run_id, env.HANG_DIR: str(folder_of(run_id))}
    with open_dict(config):
        ray_init: Any = config.ray_kwargs.ray_init
        runtime_env: Any = OmegaConf.to_container(ray_init.get("runtime_env") or OmegaConf.create({}), resolve=True)
        given: dict[str, Any] = runtime_env.setdefault("env_vars", {}) or {}
        for name, value in variables.items():
            if str(given.get(name, value)) != value:
                raise ConfigError(f"ray_kwargs.ray_init.runtime_env.env_vars.{name} differs from {NODE}: remove it")
        runtime_env["env_vars"] = {**given, **variables}
        ray_init.runtime_env = runtime_env
    return variables
