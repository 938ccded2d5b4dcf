"""Makes a process in which neither Ray nor the built-in driver and trainer can be imported."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import NoReturn

FORBIDDEN = ("ray", "rl_safe_workers.driver", "rl_safe_workers.trainer")


class _Refuses(MetaPathFinder):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname in FORBIDDEN:
            _refuse(fullname)
        return None


def _refuse(name: str) -> NoReturn:
    raise ImportError(f"{name} is not to be imported here")


def forbid_driver() -> None:
    """Refuses every later import of `FORBIDDEN`, and of what is in them."""
    assert not sys.modules.keys() & set(FORBIDDEN)
    sys.meta_path.insert(0, _Refuses())
