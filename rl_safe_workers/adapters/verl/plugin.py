"""Registers our Megatron engines with verl; loaded by ``import verl`` in every process of a job.

By the entry point ``verl.plugins``, or by ``VERL_USE_EXTERNAL_MODULES=rl_safe_workers.adapters.verl.plugin``. It does
nothing unless ``VERL_ENGINE_VENDOR=rl_safe`` is set, and then imports nothing heavy: the engines are registered once
verl's own are. Most processes of a job, vLLM's among them, never import those.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from rl_safe_workers.adapters.verl import environment
from rl_safe_workers.adapters.verl.compatibility import check_registry, check_verl
from rl_safe_workers.errors import ConfigError

logger = logging.getLogger(__name__)

ENGINES = "verl.workers.engine"
"""The package that fills verl's registry while it is imported."""


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module as Python does, and registers our engines once it has been executed.

    verl has no hook for that, and to import its engines here would cost each process of the job seconds and end in a
    circle: verl is being imported.
    """

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds `ENGINES` and nothing else."""
        if fullname != ENGINES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the loader that Python would have used."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module; then registers."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        sys.meta_path.remove(self)
        self._loader.exec_module(module)
        _register()


def _register() -> None:
    check_verl()
    from rl_safe_workers.adapters.verl.engine import register

    register()


def is_active() -> bool:
    """Returns True if our engines are in verl's registry, or will be once its own are."""
    if any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        return True
    ours = sys.modules.get("rl_safe_workers.adapters.verl.engine")
    return ours is not None and bool(ours.is_registered())


def activate() -> None:
    """Prepares this process, if it is told to use our engines. Idempotent.

    Raises:
        ConfigError: If verl lacks a name that the adapter relies on, or the settings cannot be read.
    """
    if environment.is_cpu():
        from rl_safe_workers.adapters.verl.cpu_platform import register_platform

        register_platform()
    if not environment.is_wanted() or is_active():
        return
    check_registry()
    environment.settings()
    if ENGINES in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterImport())
    logger.info("rl_safe: verl's Megatron engines will be ours in this process")


try:
    activate()
except (ConfigError, ImportError) as error:
    # verl logs what an entry point raises at level DEBUG and goes on, with its own engines. This it lets through.
    raise SystemExit(f"rl_safe: {environment.ENGINE_VENDOR}={environment.VENDOR} is set, but {error}") from error
