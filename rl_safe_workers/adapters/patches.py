"""Names of another module replaced for the time of a body, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Sets ``owner.name`` to ``make(original)`` for the body.

    Args:
        owner: A module, or anything else with attributes.
        name: The attribute, which must exist.
        make: Given what is there, returns what stands in for it.
    """
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
