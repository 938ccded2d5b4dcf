"""Patches ms-swift in this process, before any group exists."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
from types import TracebackType
from typing import Any

from rl_safe_workers.adapters.host_contract import package_root
from rl_safe_workers.adapters.host_settings import name_host_settings
from rl_safe_workers.adapters.swift.swift_contract import check_proved, check_ray_mode, check_swift
from rl_safe_workers.adapters.swift.swift_settings import SETTING, job_settings

logger = logging.getLogger(__name__)

_job: Any = None
_is_actor = False


def in_actor() -> None:
    """Notes that this process is a training worker of Ray mode."""
    global _is_actor
    _is_actor = True


def job() -> Any:
    """Returns this process's `SwiftJob`, or `RayWaits` in the driver; None if nothing is installed."""
    return _job


def install() -> None:
    """Replaces names that `swift_contract` lists. Idempotent. Does nothing in a data loader or without Megatron.

    Raises:
        ConfigError: If the settings cannot be used, or if ms-swift lacks something that we need; names it.
    """
    global _job
    if _job is not None or multiprocessing.parent_process() is not None:
        return
    is_ray = "swift.ray.megatron" in sys.modules
    if is_ray and not _is_actor and "RAY_SWIFT_GROUP" in os.environ:
        return  # a worker whose driver does not use this adapter
    if "swift.megatron" not in sys.modules:
        logger.warning("rl_safe: this job does not use ms-swift's Megatron pipelines, so the plugin does nothing")
        return
    settings = job_settings()
    if not settings.enabled:
        logger.warning("rl_safe: off, by RL_SAFE_SWIFT")
        return
    check_swift(package_root("swift"), package_root("mcore_bridge"))
    name_host_settings(SETTING)
    if is_ray and not _is_actor:
        check_ray_mode(package_root("swift"))
        if settings.prove_sync_freq >= 0:
            check_proved(package_root("swift"))
        from rl_safe_workers.adapters.swift.ray_driver import install_driver

        _job = install_driver(settings)
        logger.warning("rl_safe active: driver")
        return

    from rl_safe_workers.adapters.swift.job import SwiftJob

    made = SwiftJob(settings, is_actor=_is_actor)
    _replace(made)
    _see_failures(made)
    _job = made


def _replace(job: Any) -> None:
    import torch.distributed as dist
    from swift.megatron.callbacks import megatron_callbacks_map
    from swift.megatron.pipelines.export.export import MegatronExport
    from swift.megatron.pipelines.train.sft import MegatronSft
    from swift.megatron.trainers.base import BaseMegatronTrainer
    from swift.megatron.utils import megatron_lm_utils

    from rl_safe_workers.adapters.save_queue import SaveQueue
    from rl_safe_workers.adapters.swift.flow_callback import safe_flow

    dist.init_process_group = job.creating_world(dist.init_process_group)
    dist.barrier = job.waiting(dist.barrier)
    megatron_lm_utils._initialize_mpu = job.creating_groups(megatron_lm_utils._initialize_mpu)
    megatron_lm_utils.AsyncCallsQueue = lambda *args, **kwargs: SaveQueue(lambda: job.saves)
    megatron_lm_utils._async_calls_queue = SaveQueue(lambda: job.saves)
    megatron_callbacks_map["default_flow"] = safe_flow(megatron_callbacks_map["default_flow"], job)
    BaseMegatronTrainer.__init__ = job.building(BaseMegatronTrainer.__init__)
    BaseMegatronTrainer.train = job.looping(BaseMegatronTrainer.train)
    BaseMegatronTrainer.save_checkpoint = job.saving_checkpoint(BaseMegatronTrainer.save_checkpoint)
    MegatronSft.run = job.training(MegatronSft.run)
    MegatronExport.run = job.exporting(MegatronExport.run)


def _see_failures(job: Any) -> None:
    """Tells the other ranks of any failure, by an exception hook and an atexit function.

    ms-swift imports the plugin within a constructor, so it is too late to wrap that constructor.
    """
    host_hook, process = sys.excepthook, os.getpid()

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        host_hook(kind, error, trace)
        if os.getpid() == process:
            job.fail_with(error)

    def fail_at_exit() -> None:
        if os.getpid() == process:
            job.fail_with(SystemExit("ended before the end of the job"))

    sys.excepthook = excepthook
    atexit.register(fail_at_exit)
