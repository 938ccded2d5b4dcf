"""verl's ``main_ppo`` with our trainers: ``python -m rl_safe_workers.adapters.verl.main_ppo OVERRIDE ...``.

Takes all of verl's command line, and ``+rl_safe=enabled`` or ``+actor_rollout_ref.rl_safe.enabled=true``. Without
either it is verl's own entry.
"""

from __future__ import annotations

import sys
from typing import Any

import hydra
import ray
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from rl_safe_workers.adapters.verl.entry import check_run, prepare_job
from rl_safe_workers.errors import RlSafeError

CONF = "pkg://rl_safe_workers.adapters.verl.conf"


class _SearchPath(SearchPathPlugin):
    """Lets Hydra find our config group."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Appends it: verl's own files come first."""
        search_path.append("rl_safe_workers", CONF)


def safe_task_runner() -> Any:
    """Returns verl's task runner, a Ray actor, made to choose among our trainers."""
    from verl.trainer.main_ppo import TaskRunnerV1

    plain: Any = TaskRunnerV1.__ray_actor_class__

    class SafeTaskRunner(plain):
        """In the driver's actor."""

        def run(self, config: DictConfig) -> None:
            """Runs the training."""
            from rl_safe_workers.adapters.verl.trainers import use_trainers

            use_trainers()
            super().run(config)

    return ray.remote(SafeTaskRunner)


def run(config: DictConfig) -> None:
    """Checks the configuration and runs verl's training, with our trainers if they are asked for.

    Raises:
        RlSafeError: Of ours, before Ray is started.
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
    prepare_job(config, settings)
    try:
        stock.run_ppo(config, task_runner_class=safe_task_runner())
    finally:
        # Else processes of a local Ray outlive the driver's last line, and their noise follows it.
        ray.shutdown()


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def _main(config: DictConfig) -> None:
    try:
        run(config)
    except RlSafeError as error:
        # Hydra would show a traceback of its own and exit with 1.
        sys.stderr.write(f"rl_safe: {error}\n")
        sys.exit(error.exit_code)


def main() -> None:
    """The command."""
    Plugins.instance().register(_SearchPath)
    _main()


if __name__ == "__main__":
    main()
