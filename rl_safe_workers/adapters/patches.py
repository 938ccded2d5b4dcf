"""Names of another module replaced for the time of a body, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_REQUIRED = object()


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any], *, absent: Any = _REQUIRED) -> Iterator[None]:
    """Sets ``owner.name`` to ``make(original)`` for the body.

    Args:
        owner: A module, or anything else with attributes. What it has of its class is replaced for it alone.
        name: The attribute, which must exist, unless ``absent`` is given.
        make: Given what is there, returns what stands in for it.
        absent: What users of the attribute take where it does not exist. It is then there for the body alone.
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
