"""verl's ``main_ppo`` with our trainers: ``python -m rl_safe_workers.adapters.verl.main_ppo OVERRIDE ...``.

Accepts verl's whole command line, and also ``+rl_safe=enabled`` or ``+actor_rollout_ref.rl_safe.enabled=true``.
Without either of them it behaves as verl's own entry.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
import ray
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from rl_safe_workers import env
from rl_safe_workers.adapters.job_processes import (
    JobProcesses,
    answer_sigterm,
    ending_all_processes,
    exiting_at_once,
    folder_of,
    stopped_by,
)
from rl_safe_workers.adapters.verl.entry import check_run, prepare_job
from rl_safe_workers.adapters.verl.search_path import SafeSearchPath
from rl_safe_workers.adapters.verl.settings import VerlSettings
from rl_safe_workers.checkpoint.folders.claim import claimed
from rl_safe_workers.errors import RlSafeError

_CONFIG_PATH = ("--config-path", "-cp")


class _StartedLast:
    """Replaces the actor class of verl's task runner, to run code of ours just after verl has started Ray."""

    def __init__(self, actor_class: Any, processes: JobProcesses, settings: VerlSettings) -> None:
        self._actor_class, self._processes, self._settings = actor_class, processes, settings

    def options(self, **options: Any) -> _StartedLast:
        """Sets Ray's options for the actor."""
        return _StartedLast(self._actor_class.options(**options), self._processes, self._settings)

    def remote(self, *arguments: Any) -> Any:
        """Begins to watch the nodes, because Ray is up by now. Then creates the actor."""
        answer_sigterm()
        self._processes.watch_nodes(self._settings.timeouts.stopped)
        return self._actor_class.remote(*arguments)


def safe_task_runner(processes: JobProcesses, settings: VerlSettings) -> _StartedLast:
    """Returns the actor class of verl's task runner, changed to use our trainers.

    Args:
        processes: The job's processes.
        settings: The adapter's settings.
    """
    from verl.trainer.main_ppo import TaskRunnerV1

    plain: Any = TaskRunnerV1.__ray_actor_class__

    class SafeTaskRunner(plain):
        """Puts our trainers and agent loops in place, in the driver's actor."""

        def run(self, config: DictConfig) -> None:
            """Runs the training."""
            from rl_safe_workers.adapters.verl.agent_loops import use_agent_loops
            from rl_safe_workers.adapters.verl.trainers import use_trainers

            use_trainers()
            use_agent_loops()
            super().run(config)

    return _StartedLast(ray.remote(SafeTaskRunner), processes, settings)


def run(config: DictConfig) -> None:
    """Checks the configuration and runs verl's training, with our trainers if they are asked for.

    Raises:
        RlSafeError: If a check fails. The checks run before Ray starts.
    """
    from verl.trainer import main_ppo as stock

    settings = check_run(config)
    if settings is None:
        stock.main.__wrapped__(config)
        return
    stock.auto_set_device(config)
    stock.validate_config(
        config=config,
        use_reference_policy=stock.need_reference_policy(config),
        use_critic=stock.need_critic(config),
    )
    run_id = uuid.uuid4().hex[:12]
    prepare_job(config, settings, run_id)
    env.mark_run(run_id, hang_dir=folder_of(run_id))  # Ray inherits it, if this process starts Ray
    with claimed(_folders_of(config)), ending_all_processes(run_id) as processes:
        stock.run_ppo(config, task_runner_class=safe_task_runner(processes, settings))


def _folders_of(config: DictConfig) -> dict[str, Path]:
    """Returns the folder that the run saves to, by the key that sets it; empty if the run does not save."""
    trainer = config.trainer
    return {"trainer.default_local_dir": Path(trainer.default_local_dir).absolute()} if trainer.save_freq > 0 else {}


def beside_verls(arguments: Sequence[str]) -> list[str]:
    """Returns the command line with ``--config-path`` changed to mean the same folder as for verl's own entry.

    Hydra resolves a relative path from the folder of the entry's file, which is our file here. verl's examples pass
    ``config``.
    """
    found: list[str] = []
    for argument in arguments:
        option, _, value = argument.partition("=")
        if found and found[-1] in _CONFIG_PATH:
            found.append(_beside_verls(argument))
        else:
            found.append(f"{option}={_beside_verls(value)}" if value and option in _CONFIG_PATH else argument)
    return found


def _beside_verls(path: str) -> str:
    verl = find_spec("verl")  # imports nothing
    if verl is None or not verl.submodule_search_locations or "://" in path:
        return path
    return os.path.normpath(Path(verl.submodule_search_locations[0], "trainer", path))  # an absolute path stays


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def _main(config: DictConfig) -> None:
    try:
        run(config)
    except RlSafeError as error:
        # Hydra would print its own traceback and exit with 1. Ray has already shown where the error comes from.
        told = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        sys.stderr.write(f"rl_safe: {told}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        signum = stopped_by()
        sys.stderr.write(f"rl_safe: stopped by {signum.name}; what was started has ended\n")
        sys.exit(128 + signum)


def main() -> None:
    """Runs the command."""
    Plugins.instance().register(SafeSearchPath)
    sys.argv[1:] = beside_verls(sys.argv[1:])
    with exiting_at_once():
        _main()


if __name__ == "__main__":
    main()
