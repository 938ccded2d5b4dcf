"""Runs verl's trainer for supervised fine-tuning with our engines, under torchrun.

``torchrun ... -m rl_safe_workers.adapters.verl.main_sft engine=megatron optim=megatron +rl_safe=enabled OVERRIDE ...``
accepts the whole command line of ``verl.trainer.sft_trainer``. Without ``+rl_safe=enabled`` it runs verl's own trainer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import torch.distributed as dist
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from rl_safe_workers.adapters.host_settings import name_host_settings
from rl_safe_workers.adapters.verl import environment
from rl_safe_workers.adapters.verl.entry import check_sft
from rl_safe_workers.adapters.verl.main_ppo import beside_verls
from rl_safe_workers.adapters.verl.plugin import activate
from rl_safe_workers.adapters.verl.search_path import SafeSearchPath
from rl_safe_workers.adapters.verl.settings import SETTING
from rl_safe_workers.checkpoint.folders.claim import claimed
from rl_safe_workers.errors import ConfigError, RlSafeError

if TYPE_CHECKING:
    from rl_safe_workers.adapters.verl.process import TrainerProcess


def run(config: DictConfig) -> None:
    """Checks the configuration and trains on this rank. Collective over: all ranks of the launcher.

    Raises:
        ConfigError: If the configuration cannot be used, or if verl has chosen its own engine.
        CommunicatorError: If another rank has failed and this rank has not; names the other rank.
    """
    settings = check_sft(config)  # before verl's trainer is imported, which takes seconds
    if settings is not None:
        environment.use_engines(settings)
        activate()
        name_host_settings(SETTING, world=SETTING.format("timeouts.save"))  # see `read_sft_settings`
    from verl.trainer import sft_trainer as stock

    if settings is None:
        stock.main.__wrapped__(config)
        return
    stock.auto_set_device(config)
    folder = {"trainer.default_local_dir": Path(config.trainer.default_local_dir).absolute()}
    with claimed(folder) if os.environ.get("RANK", "0") == "0" else nullcontext():
        _make_world(timedelta(seconds=settings.nccl_timeout))
        with _ended():
            trainer = stock.SFTTrainer(config=config)
            if not hasattr(trainer.engine, "process"):
                raise ConfigError(f"verl has chosen {type(trainer.engine).__name__}, which is not ours")
            trainer.engine.process.meet_neighbours(stop_limit_s=settings.timeouts.stopped)
            trainer.engine.process.neighbours.speak_before_sigterm()
            trainer.fit()


def _make_world(timeout: timedelta) -> None:
    """Makes the default group as verl does (distributed.py:63), but with our timeout. verl's timeout is ten hours."""
    from verl.utils.distributed import initialize_global_process_group

    if environment.is_cpu():
        dist.init_process_group("gloo", timeout=timeout)
    else:
        initialize_global_process_group(timeout.total_seconds())


@contextmanager
def _ended() -> Iterator[None]:
    """Ends the groups after the body: together if no rank has failed, else without waiting.

    Raises:
        CommunicatorError: If another rank has failed and this rank has not; names the other rank.
    """
    try:
        yield
        if (process := _process()) is not None:
            process.leave()
    except BaseException as error:
        if (process := _process()) is not None:
            process.fail_with(error)
        raise


def _process() -> TrainerProcess | None:
    from rl_safe_workers.adapters.verl.process import existing_process

    return existing_process()


@hydra.main(config_path="pkg://verl.trainer.config", config_name="sft_trainer_engine", version_base=None)
def _main(config: DictConfig) -> Any:
    try:
        run(config)
    except RlSafeError as error:
        # Hydra would print its own traceback and exit with 1.
        sys.stderr.write(f"rl_safe: {error}\n")
        sys.exit(error.exit_code)


def main() -> None:
    """Runs the command."""
    Plugins.instance().register(SafeSearchPath)
    sys.argv[1:] = beside_verls(sys.argv[1:])
    _main()


if __name__ == "__main__":
    main()
