"""Handles environment variables: those that make verl find our engines, and the one that carries a job's settings.

No other module of the adapter touches ``os.environ``, except that `main_sft` reads torchrun's ``RANK``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.metadata import entry_points

from rl_safe_workers import env
from rl_safe_workers.adapters.verl.settings import NODE, VerlSettings
from rl_safe_workers.errors import ConfigError

PLUGIN = "rl_safe_workers.adapters.verl.plugin"
VENDOR = "rl_safe"
"""Our key in verl's engine registry."""
CPU_PLATFORM = "rl_safe_cpu"

ENGINE_VENDOR = "VERL_ENGINE_VENDOR"
"""verl's variable: the vendor whose engines its registry prefers."""
EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"
"""verl's variable: modules that ``import verl`` imports, separated by commas. A missing module is an error."""
EXTERNAL_PLUGINS = "VERL_USE_EXTERNAL_PLUGINS"
"""verl's variable: the entry points that ``import verl`` loads: ``auto``, ``none``, or names separated by commas."""
PLATFORM = "VERL_PLATFORM"
"""verl's variable: the name of the device platform. Without it, verl detects the platform."""
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's variable: the configuration that a job was submitted with, as JSON."""
LOG_LEVELS = ("SAGEMAKER_CONTAINER_LOG_LEVEL", "LOG_LEVEL")
"""Variables of ``model_hosting_container_standards``: the root logger's level. The first one that is set counts."""
SETTINGS = "RL_SAFE_VERL"
"""Our variable: the settings as JSON, e.g. ``{"timeouts": {"save": 600}}``."""


def is_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Returns True if verl is told to use our engines.

    Args:
        environ: The environment; None: this process's.
    """
    return (os.environ if environ is None else environ).get(ENGINE_VENDOR) == VENDOR


def is_cpu() -> bool:
    """Returns True if verl is told to use our CPU platform."""
    return os.environ.get(PLATFORM, "").strip().lower() == CPU_PLATFORM


def settings() -> VerlSettings:
    """Returns the settings that the driver gave this process; the defaults if it gave none.

    Raises:
        ConfigError: If the variable cannot be read.
    """
    return VerlSettings.from_json(os.environ.get(SETTINGS) or "{}", source=SETTINGS)


def keep_warnings() -> None:
    """Keeps warnings visible in this process and its children, unless the user has set a level.

    vLLM 0.25 imports ``model_hosting_container_standards``, and under verl also in trainers. By default, that import
    raises the level of the root logger and of its handlers to ERROR (logging_config.py:42).
    """
    if not os.environ.get(LOG_LEVELS[0], os.environ.get(LOG_LEVELS[1])):
        os.environ[LOG_LEVELS[0]] = "WARNING"


def check_packed_sync() -> None:
    """Checks that our entry has started the job, if the settings ask for packed weight syncs.

    Raises:
        ConfigError: If it has not. Then verl's own vLLM workers would take buckets for weights.
    """
    if settings().packed_sync and env.RUN_ID not in os.environ:
        raise ConfigError(
            f"{NODE}.packed_sync=true needs our entry, which gives vLLM our workers: start the job with "
            "rl_safe_workers.adapters.verl.main_ppo"
        )


def job_variables(wanted: VerlSettings, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the variables that a job needs and does not have yet. Every process of the job inherits them.

    Args:
        wanted: The settings for the workers.
        environ: The driver's environment; None: this process's.

    Raises:
        ConfigError: If the job was submitted with other values, which a driver cannot change in Ray.
    """
    environ = os.environ if environ is None else environ
    given = environ.get(EXTERNAL_MODULES, "")
    modules = [name.strip() for name in given.split(",") if name.strip()]
    if modules and PLUGIN not in modules:
        raise ConfigError(f"{EXTERNAL_MODULES}={given} lacks {PLUGIN}: add it, separated by a comma")
    if environ.get(ENGINE_VENDOR, VENDOR) != VENDOR:
        raise ConfigError(
            f"{ENGINE_VENDOR}={environ[ENGINE_VENDOR]} with {NODE}.enabled=true: set it to {VENDOR}, or not at all"
        )
    text = wanted.to_json()
    if SETTINGS in environ and VerlSettings.from_json(environ[SETTINGS], source=SETTINGS) != wanted:
        raise ConfigError(f"{SETTINGS} differs from {NODE}: remove {SETTINGS}, and set only {NODE}")
    needed = {EXTERNAL_MODULES: given or PLUGIN, ENGINE_VENDOR: VENDOR, SETTINGS: text}
    # Leave out variables that the job was submitted with: Ray refuses them. Pass all others, because the workers of a
    # running Ray do not inherit this environment.
    submitted = json.loads(environ.get(JOB_CONFIG) or "{}").get("runtime_env", {}).get("env_vars", {})
    return {name: value for name, value in needed.items() if name not in submitted}


def use_engines(wanted: VerlSettings) -> None:
    """Makes this process and its children use our engines. Call it in a process that torchrun or the like has started.

    Raises:
        ConfigError: If the environment already has other values.
    """
    os.environ.update(job_variables(wanted))


def check_loadable(environ: Mapping[str, str] | None = None) -> None:
    """Checks that ``import verl`` loads the plugin in every process that inherits this environment.

    Raises:
        ConfigError: If our engines are wanted but nothing loads the plugin. verl would silently use its own engines.
    """
    environ = os.environ if environ is None else environ
    if not is_wanted(environ):
        return
    modules = [name.strip() for name in environ.get(EXTERNAL_MODULES, "").split(",")]
    policy = environ.get(EXTERNAL_PLUGINS, "auto").strip().lower()
    ours = {entry.name for entry in entry_points(group="verl.plugins") if entry.value == PLUGIN}
    allowed = ours if policy == "auto" else ours & {name.strip() for name in policy.split(",")}
    if PLUGIN not in modules and not allowed:
        raise ConfigError(
            f"{ENGINE_VENDOR}={VENDOR} is set, and nothing loads the plugin: set {EXTERNAL_MODULES}={PLUGIN}"
        )
