"""Replaces an attribute temporarily, or an object by a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_REQUIRED = object()


class PassThrough:
    """Stands for another object. Takes every attribute that it does not define from that object."""

    _stock: Any

    def __init__(self, stock: Any) -> None:
        """Stands for ``stock``."""
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        if name == "_stock":  # a copy that is being made does not have it yet
            raise AttributeError(name)
        return self._passed(name, getattr(self._stock, name))

    def _passed(self, name: str, value: Any) -> Any:
        """Returns the stand-in for an attribute of the other object."""
        return value


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any], *, absent: Any = _REQUIRED) -> Iterator[None]:
    """Sets ``owner.name`` to ``make(original)`` for the body.

    Args:
        owner: A module, or any other object with attributes. An attribute of its class is replaced for this object
            alone.
        name: The attribute. It must exist unless ``absent`` is given.
        make: Takes the original value and returns the replacement.
        absent: The original value if the attribute does not exist. The attribute then exists only during the body.
    """
    original = getattr(owner, name) if absent is _REQUIRED else getattr(owner, name, absent)
    is_own = name in vars(owner)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
