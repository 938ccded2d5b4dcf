"""Has every Python process of a run commit the misdeed of `tests.diagnosis.misdeeds` where it is due.

A host's own code stays as it is: the phases of this package are the places. They are the same under every host.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _in_phases(module: ModuleType) -> None:
    """A training rank strikes inside a phase, once all have come."""
    from tests.diagnosis.misdeeds import here

    stock = module.TrainingRank.meet

    def meet(self: Any, phase: Any) -> None:
        stock(self, phase)
        here("trainer", self.training_rank, str(phase))

    module.TrainingRank.meet = meet  # type: ignore[attr-defined]
    begin = module.TrainingRank.__init__

    def init(self: Any, **arguments: Any) -> None:
        here("trainer", arguments["training_rank"], "start")
        begin(self, **arguments)

    module.TrainingRank.__init__ = init  # type: ignore[attr-defined]


def _in_lifecycles(module: ModuleType) -> None:
    """A rollout rank strikes on entering a phase; a training rank, of the phases that nobody waits to begin."""
    from contextlib import contextmanager

    from tests.diagnosis.misdeeds import here

    stock = module.Lifecycle.enter

    @contextmanager
    def enter(self: Any, phase: Any, **options: Any) -> Any:
        with stock(self, phase, **options):
            if self.role.value == "rollout" or phase.value == "teardown":
                here(self.role.value, self.rank, str(phase))
            yield

    module.Lifecycle.enter = enter  # type: ignore[attr-defined]


CHANGED: dict[str, Callable[[ModuleType], None]] = {
    "rl_safe_workers.worlds.training_rank": _in_phases,
    "rl_safe_workers.lifecycle": _in_lifecycles,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in CHANGED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        change, execute = CHANGED[name], spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("RL_SAFE_TEST_MISDEED"):
    sys.meta_path.insert(0, _Finder())
