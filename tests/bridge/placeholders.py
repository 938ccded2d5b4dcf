"""Stands for packages that Megatron-Bridge's training imports, and that our tests do not call."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAMES = ("modelopt", "megatron.bridge.data", "megatron.energon", "torch.utils.tensorboard")


class Placeholders(MetaPathFinder, Loader):
    """Finds an empty module for each of these packages. Any name in it is a class."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        is_one = any(fullname == name or fullname.startswith(f"{name}.") for name in _NAMES)
        return ModuleSpec(fullname, self, is_package=True) if is_one else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: _class(name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


@contextmanager
def placeholders() -> Iterator[None]:
    """Stands for the packages while the body imports Megatron-Bridge's training."""
    finder = Placeholders()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
