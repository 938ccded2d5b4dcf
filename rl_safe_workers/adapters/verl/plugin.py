"""Registers our Megatron engines with verl. ``import verl`` loads this module in every process of a job.

verl finds it by the entry point ``verl.plugins``, or by
``VERL_USE_EXTERNAL_MODULES=rl_safe_workers.adapters.verl.plugin``. It registers engines only if
``VERL_ENGINE_VENDOR=rl_safe`` is set. It imports nothing heavy, because it changes verl's modules only after verl has
imported them. Most processes of a job, such as vLLM's, never import verl's engines.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from rl_safe_workers.adapters.host_settings import name_host_settings
from rl_safe_workers.adapters.verl import environment, weight_sockets
from rl_safe_workers.adapters.verl.compatibility import check_registry, check_verl
from rl_safe_workers.adapters.verl.settings import SETTING, TAKEN
from rl_safe_workers.errors import ConfigError

logger = logging.getLogger(__name__)

ENGINES = "verl.workers.engine"
"""The package that fills verl's registry while it is imported."""


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module as Python does, then changes it. A reload changes the module again.

    verl has no hook for this. Importing verl's modules here would cost each process of the job seconds. It would also
    be a circular import, because verl is being imported.
    """

    def __init__(self, name: str, change: Callable[[ModuleType], object]) -> None:
        """Waits for the module ``name``, to call ``change`` with it."""
        self._name, self._change = name, change
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds its module and nothing else."""
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Creates the module by the loader that Python would have used."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module, then changes it."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._change(module)


def _register(_: ModuleType) -> None:
    check_verl()
    from rl_safe_workers.adapters.verl.engine import register

    register()


_CHANGES: Mapping[str, Callable[[ModuleType], object]] = {
    ENGINES: _register,
    weight_sockets.MODULE: weight_sockets.move,
}
"""Changes of verl's modules, by the name of the module."""


def is_active() -> bool:
    """Returns True if our engines are in verl's registry, or will be once verl's own engines are imported."""
    if any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        return True
    ours = sys.modules.get("rl_safe_workers.adapters.verl.engine")
    return ours is not None and bool(ours.is_registered())


def activate() -> None:
    """Registers our engines and our CPU platform in this process, if its environment asks for them. Idempotent.

    With our engines, it also moves the sockets of weight syncs, and keeps warnings visible.

    Raises:
        ConfigError: If verl lacks a name that the adapter needs, or if the settings cannot be read.
    """
    if environment.is_cpu():
        from rl_safe_workers.adapters.verl.cpu_platform import register_platform

        register_platform()
    if not environment.is_wanted():
        return
    name_host_settings(SETTING, world=TAKEN["nccl_timeout"])
    if is_active():
        return
    check_registry()
    environment.settings()
    environment.keep_warnings()
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])
        else:
            sys.meta_path.insert(0, _AfterImport(name, change))
    logger.info("rl_safe: verl's Megatron engines will be ours in this process")


try:
    activate()
except (ConfigError, ImportError) as error:
    # verl logs most errors of an entry point at level DEBUG and goes on with its own engines. It catches no SystemExit.
    raise SystemExit(f"rl_safe: {environment.ENGINE_VENDOR}={environment.VENDOR} is set, but {error}") from error
