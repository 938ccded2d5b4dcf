"""Runs NeMo RL's own example script in the driver, with our worker instead of its Megatron policy worker."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import uuid
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import rl_safe_workers
from rl_safe_workers import env
from rl_safe_workers.adapters.job_processes import (
    JobProcesses,
    answer_sigterm,
    ending_all_processes,
    folder_of,
    stopped_by,
)
from rl_safe_workers.adapters.nemo_rl.contract import (
    JOINT_NAMES,
    JOINT_TEXTS,
    NAMES,
    PROOF_NAMES,
    PROOF_TEXTS,
    TEXTS,
    check_host,
)
from rl_safe_workers.adapters.nemo_rl.generation_setup import (
    BUILDER,
    BUILDER_MODULE,
    WORKERS,
    check_generation,
    own_refits,
    safe_builder,
)
from rl_safe_workers.adapters.nemo_rl.guarded_driver import GuardedDriver
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NODE, VARIABLE, NemoRlSettings
from rl_safe_workers.adapters.patches import replaced
from rl_safe_workers.checkpoint.folders.claim import claimed
from rl_safe_workers.errors import ConfigError

logger = logging.getLogger(__name__)

WORKER = "rl_safe_workers.adapters.nemo_rl.worker.SafeMegatronPolicyWorker"
HOST_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
FACTORY = "policy_factory"
"""An argument of NeMo RL's ``setup`` since commit 4454fa64e (2026-05-24)."""
KEY = "worker_extension_cls_fqn"
"""An argument of NeMo RL's ``Policy``; since PR 3809 also a key of the node ``policy``."""


def register() -> str:
    """Adds our worker to NeMo RL's registry, with the Python of NeMo RL's worker, so that no second venv is built.

    If the environment of NeMo RL's worker does not exist yet, this builds it under NeMo RL's name. For that, Ray must
    be running.

    Returns:
        The path of the workers' Python.

    Raises:
        ConfigError: If this NeMo RL lacks a name that the workers need.
    """
    import nemo_rl

    check_host(Path(nemo_rl.__file__).parents[1], [name for name in NAMES if name.file.startswith("nemo_rl/")])
    return _enter(WORKER, HOST_WORKER)


def _enter(worker: str, host_worker: str) -> str:
    """Adds one of our workers to NeMo RL's registry, with the Python of the worker that it replaces; see `register`."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY, get_actor_python_env

    if worker not in ACTOR_ENVIRONMENT_REGISTRY:
        python = get_actor_python_env(host_worker)
        if python.startswith("uv"):
            from nemo_rl.utils.venvs import create_local_venv_on_each_node

            python = create_local_venv_on_each_node(py_executable=python, venv_name=host_worker)
        ACTOR_ENVIRONMENT_REGISTRY[worker] = python
    return str(ACTOR_ENVIRONMENT_REGISTRY[worker])


def use_safe_engines(policy: Mapping[str, Any], ends: ExitStack, settings: NemoRlSettings) -> None:
    """Makes NeMo RL create our generation workers, if a setting needs them.

    Args:
        policy: NeMo RL's node ``policy``.
        ends: Must be closed when the run ends.
        settings: The settings.

    Raises:
        ConfigError: If our workers do not suit this run, or if this NeMo RL lacks a name that they need.
    """
    if (wants := own_refits(settings)) is None:
        return
    import nemo_rl

    check_generation(policy.get("generation"), settings)
    setting, remedy = wants
    advice = f"use v0.7.0 or a newer one, or set {remedy}"
    names, texts = PROOF_NAMES, PROOF_TEXTS
    if settings.refit_transport == "joint":
        names, texts = names + JOINT_NAMES, texts + JOINT_TEXTS
    check_host(Path(nemo_rl.__file__).parents[1], names, texts, advice=advice)
    for host_worker, worker in WORKERS.items():
        _enter(worker, host_worker)
    builder = functools.partial(safe_builder, setting=setting, remedy=remedy)
    ends.enter_context(replaced(importlib.import_module(BUILDER_MODULE), BUILDER, builder))


def share_package(environ: MutableMapping[str, str]) -> None:
    """Puts this package on the workers' ``PYTHONPATH``. Every node must be able to read the package's folder.

    NeMo RL passes the driver's environment to its workers. Their Python has only NeMo RL's packages.
    """
    root = str(Path(rl_safe_workers.__file__).parents[1])
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        environ["PYTHONPATH"] = os.pathsep.join([*paths, root])


def give_settings(policy: MutableMapping[str, Any], settings: NemoRlSettings) -> None:
    """Passes the settings to the policy's workers, in the node ``policy``.

    Raises:
        ConfigError: If the policy is not Megatron's, or if the user has given the workers other settings.
    """
    megatron = policy.get("megatron_cfg") or {}
    if not megatron.get("enabled", False):
        raise ConfigError(f"{NODE}.enabled=true needs policy.megatron_cfg.enabled=true: the worker is Megatron's")
    if policy.get("quant_cfg") is not None:
        raise ConfigError(
            f"{NODE}.enabled=true does not support policy.quant_cfg, which needs another worker: remove one of the two"
        )
    variables = dict(megatron.get("env_vars") or {})
    given = variables.get(VARIABLE)
    if given is not None and NemoRlSettings.from_json(given, source=VARIABLE) != settings:
        raise ConfigError(
            f"policy.megatron_cfg.env_vars.{VARIABLE} differs from {NODE}: remove it, and set only {NODE}"
        )
    megatron["env_vars"] = {**variables, VARIABLE: settings.to_json()}


def safe_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a factory that makes a policy of our workers.

    Args:
        factory: Makes a policy of NeMo RL's workers: ``Policy``, or the caller's own function.
    """
    by_argument = KEY in inspect.signature(_policy_class()).parameters

    def make(**kwargs: Any) -> Any:
        if by_argument:
            kwargs[KEY] = WORKER
        else:
            kwargs["config"][KEY] = WORKER
        return factory(**kwargs)

    return make


def _policy_class() -> Any:
    from nemo_rl.models.policy.lm_policy import Policy

    return Policy


def safe_setup(
    setup: Callable[..., Any], ends: ExitStack, *, on_ray: Callable[[NemoRlSettings], object] = lambda settings: None
) -> Callable[..., Any]:
    """Wraps ``nemo_rl.algorithms.grpo.setup``.

    The wrapped function uses our workers, claims the folder of checkpoints for this run, puts deadlines on the driver's
    waits, and ends the workers.

    Args:
        setup: NeMo RL's function.
        ends: Must be closed when the run ends. It releases the folder and ends the workers. How NeMo RL itself ends
            them depends on the version and the algorithm.
        on_ray: Is called with the settings once Ray is up, before anything is made.
    """

    @functools.wraps(setup)
    def wrapped(master_config: Any, *args: Any, policy_factory: Any = None, **kwargs: Any) -> Any:
        settings = NemoRlSettings.read(_node(master_config, NODE), source=NODE)
        on_ray(settings)
        if policy_factory is not None:
            kwargs[FACTORY] = policy_factory
        if not settings.enabled:
            return setup(master_config, *args, **kwargs)
        give_settings(_node(master_config, "policy"), settings)
        ends.enter_context(claimed(_folders_of(_node(master_config, "checkpointing"))))
        logger.info("policy workers are %s in %s", WORKER, register())
        use_safe_engines(_node(master_config, "policy"), ends, settings)
        module = sys.modules[setup.__module__]
        driver = GuardedDriver(
            settings.timeouts,
            ends,
            evidence=_evidence_of(master_config),
            prove_sync_freq=settings.prove_sync_freq,
            joins=settings.refit_transport == "joint",
        )
        driver.guard_setup(module)
        with ExitStack() as making:
            making.enter_context(driver.judging())
            if FACTORY in inspect.signature(setup).parameters:
                kwargs[FACTORY] = driver.making(safe_factory(policy_factory or _policy_class()))
            else:
                # Older versions look the class up in their module.
                making.enter_context(replaced(module, "Policy", lambda policy: driver.making(safe_factory(policy))))
            made = setup(master_config, *args, **kwargs)
        driver.policy, driver.generation = made[:2]
        driver.guard_loops(module)
        ends.enter_context(driver.ending())
        return made

    return wrapped


def _node(master_config: Any, name: str) -> Any:
    """Returns the value of a key of the configuration; None if it has no such key.

    In older NeMo RL the configuration is a mapping, in newer NeMo RL an object.
    """
    return master_config.get(name) if isinstance(master_config, Mapping) else getattr(master_config, name, None)


def _folders_of(checkpointing: Mapping[str, Any] | None) -> dict[str, Path]:
    """Returns the folder that the run saves to, by the key that sets it; empty if the run does not save."""
    if not checkpointing or not checkpointing["enabled"]:
        return {}
    return {"checkpointing.checkpoint_dir": Path(checkpointing["checkpoint_dir"]).absolute()}


def _evidence_of(master_config: Any) -> Path:
    """Returns the folder for the evidence of a failure, beside the run's logs."""
    logs = _node(_node(master_config, "logger"), "log_dir") or "logs"
    return Path(logs).absolute() / f"rl_safe_failure_{env.run_id() or os.getpid()}"


def load_script(source: Path, name: str = "run_grpo") -> ModuleType:
    """Loads one of NeMo RL's example scripts from its source.

    Raises:
        ConfigError: If the script does not exist, if its NeMo RL lacks a name that the adapter needs, or if the script
            makes its policy in another way.
    """
    path = source / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"there is no {path}: set NEMO_RL_SRC to a checkout of NeMo RL")
    check_host(source, texts=[text for text in TEXTS if source / text.file == path])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that the script can pickle objects of its own module
    spec.loader.exec_module(module)
    return module


class _Called:
    """A function that remembers whether it was called."""

    was_called = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        return self._function(*args, **kwargs)


def main() -> None:
    """Runs ``examples/run_grpo.py`` of the checkout in ``NEMO_RL_SRC``, with the script's own arguments.

    After a signal that stops it, the exit status is 128 plus the signal's number.

    Raises:
        ConfigError: If the script does not exist, if its NeMo RL lacks a name that the adapter needs, if the node
            ``rl_safe`` cannot be used, or if the script has ended without calling our ``setup``.
    """
    source = os.environ.get("NEMO_RL_SRC")
    if not source:
        raise ConfigError("NEMO_RL_SRC is not set: set it to a checkout of NeMo RL (in NVIDIA's image: /opt/nemo-rl)")
    share_package(os.environ)
    script = load_script(Path(source))
    run_id = uuid.uuid4().hex[:12]
    # NeMo RL passes this environment to its workers. If NeMo RL starts Ray, Ray inherits it, too.
    env.mark_run(run_id, hang_dir=folder_of(run_id))
    answer_sigterm()
    try:
        with ending_all_processes(run_id) as processes, ExitStack() as ends:
            _run(script, ends, processes)
    except KeyboardInterrupt:
        signum = stopped_by()
        sys.stderr.write(f"rl_safe: stopped by {signum.name}; what was started has ended\n")
        sys.exit(128 + signum)


def _run(script: Any, ends: ExitStack, processes: JobProcesses) -> None:
    def on_ray(settings: NemoRlSettings) -> None:
        answer_sigterm()
        processes.watch_nodes(settings.timeouts.stopped if settings.enabled else 0.0)

    setup = _Called(safe_setup(script.setup, ends, on_ray=on_ray))
    script.setup = setup
    script.main()
    if not setup.was_called:
        raise ConfigError(
            f"{script.__file__} ended without calling its setup(), so none of our workers ran: use a checkout whose "
            "run_grpo.py calls setup() in main()"
        )
