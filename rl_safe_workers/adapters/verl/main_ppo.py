"""verl's ``main_ppo`` with our trainers: ``python -m rl_safe_workers.adapters.verl.main_ppo OVERRIDE ...``.

Takes all of verl's command line, and ``+rl_safe=enabled`` or ``+actor_rollout_ref.rl_safe.enabled=true``. Without
either it is verl's own entry.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import hydra
import ray
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from rl_safe_workers import env
from rl_safe_workers.adapters.verl.entry import check_run, prepare_job
from rl_safe_workers.adapters.verl.search_path import SafeSearchPath
from rl_safe_workers.checkpoint.folders.claim import claimed
from rl_safe_workers.errors import RlSafeError
from rl_safe_workers.reaping.guardian import Guardian
from rl_safe_workers.reaping.ipc_files import Moment, remove_ipc_files, segments_of
from rl_safe_workers.reaping.processes import ended, reap, run_processes

_CONFIG_PATH = ("--config-path", "-cp")
KILL_AFTER_S = 10.0
"""Seconds that a process gets between being asked to end and being killed."""


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
    """Takes the path of Ctrl-C: of what a handler raises, a wait of Ray's passes on nothing else."""
    _signals.append(signal.Signals(signum))
    raise KeyboardInterrupt


_signals: list[signal.Signals] = []
"""Signals that were answered; not Ctrl-C, which Python answers."""


@contextmanager
def _taking_all_along(run_id: str) -> Iterator[None]:
    """Ends Ray, if it is ours, and every process of the run on this machine when the body is left or this process dies.

    Processes outlive the actors that had started them, e.g. the 32 workers with which each trainer compiles.
    """
    since = Moment.now()
    guardian = Guardian(run_id, since=since, kill_after_s=KILL_AFTER_S)
    try:
        yield
    finally:
        pids = {process.pid for process in run_processes(run_id)}
        segments = segments_of(pids)
        ray.shutdown()
        reap(run_id, kill_after_s=KILL_AFTER_S)
        remove_ipc_files(ended(pids), since=since, segments=segments)
        guardian.dismiss(timeout_s=KILL_AFTER_S)


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
    run_id = uuid.uuid4().hex[:12]
    prepare_job(config, settings, run_id)
    env.mark_run(run_id)  # for a Ray that this process starts
    with claimed(_folders_of(config)), _taking_all_along(run_id):
        stock.run_ppo(config, task_runner_class=safe_task_runner())


def _folders_of(config: DictConfig) -> dict[str, Path]:
    """Returns the folder that the run saves to, if it saves, by its key."""
    trainer = config.trainer
    return {"trainer.default_local_dir": Path(trainer.default_local_dir).absolute()} if trainer.save_freq > 0 else {}


def beside_verls(arguments: Sequence[str]) -> list[str]:
    """Returns a command line whose ``--config-path`` means what it does to verl's own entry.

    Hydra looks for a relative one beside the file that has the entry, which is ours; verl's examples pass ``config``.
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
    return os.path.normpath(Path(verl.submodule_search_locations[0], "trainer", path))  # an absolute one stays


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def _main(config: DictConfig) -> None:
    try:
        run(config)
    except RlSafeError as error:
        # Hydra would show a traceback of its own and exit with 1.
        sys.stderr.write(f"rl_safe: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        (signum,) = _signals[:1] or [signal.SIGINT]
        sys.stderr.write(f"rl_safe: stopped by {signum.name}; what was started has ended\n")
        sys.exit(128 + signum)


def main() -> None:
    """The command."""
    Plugins.instance().register(SafeSearchPath)
    sys.argv[1:] = beside_verls(sys.argv[1:])
    _main()


if __name__ == "__main__":
    main()
