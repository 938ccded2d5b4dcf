"""verl's ``main_ppo`` with our trainers: ``python -m rl_safe_workers.adapters.verl.main_ppo OVERRIDE ...``.

Takes all of verl's command line, and ``+rl_safe=enabled`` or ``+actor_rollout_ref.rl_safe.enabled=true``. Without
either it is verl's own entry.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any, NoReturn

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


class _Stopped(KeyboardInterrupt):
    """SIGTERM, as `ray job stop` sends it: takes the path of Ctrl-C, the only one that a wait of Ray's leaves whole."""


class _StartedLast:
    """A class of Ray actors of which verl makes one, right after it has started Ray."""

    def __init__(self, actor_class: Any) -> None:
        self._actor_class = actor_class

    def options(self, **options: Any) -> _StartedLast:
        """As Ray's."""
        return _StartedLast(self._actor_class.options(**options))

    def remote(self, *arguments: Any) -> Any:
        """As Ray's. From now on SIGTERM is ours: Ray's handler would end this process and show its own stack."""
        signal.signal(signal.SIGTERM, _stop)
        return self._actor_class.remote(*arguments)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise _Stopped


def safe_task_runner() -> _StartedLast:
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

    return _StartedLast(ray.remote(SafeTaskRunner))


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
    except KeyboardInterrupt as interrupt:
        signum = signal.SIGTERM if isinstance(interrupt, _Stopped) else signal.SIGINT
        sys.stderr.write(f"rl_safe: stopped by {signum.name}; what was started has ended\n")
        sys.exit(128 + signum)


def main() -> None:
    """The command."""
    Plugins.instance().register(_SearchPath)
    _main()


if __name__ == "__main__":
    main()
