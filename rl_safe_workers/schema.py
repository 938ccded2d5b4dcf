"""The keys that a recipe may have, and what to say of one that it may not.

OmegaConf validates too, but its messages are several lines long and name no remedy; these are one line that does.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import ConfigError

_LONGEST_COMPARED = 100
TYPE_NAMES: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpec:
    """What one dotted key may hold.

    Example: ``KeySpec(type=int, optional=True)`` is what ``actor.ppo_mini_batch_size`` may hold.
    """

    type: Any
    optional: bool
    """Whether null is allowed."""

    @property
    def is_section(self) -> bool:
        """Whether the key holds further keys."""
        return is_dataclass(self.type)

    @property
    def is_list(self) -> bool:
        """Whether the key holds a list."""
        return typing.get_origin(self.type) is list

    def describe(self) -> str:
        """Says what is allowed, e.g. ``"a whole number or null"``."""
        return _describe(self.type) + (" or null" if self.optional else "")


@cache
def known_keys() -> Mapping[str, KeySpec]:
    """Returns every dotted key of RunConfig, sections before what they hold."""
    return dict(_walk_schema(RunConfig, ""))


def check_keys(layer: Mapping[Any, Any], *, source: str) -> None:
    """Checks that a recipe or override has known keys, sections where sections belong, and lists where lists do.

    Args:
        layer: Nested mappings as read from YAML, interpolations unresolved.
        source: Where the keys come from, for the message: a file name, or the command line.

    Raises:
        ConfigError: The first key that does not fit.
    """
    for key, value in _walk_layer(layer, "", source):
        spec = known_keys().get(key)
        if spec is None:
            raise ConfigError(f"{source}: unknown key {key:.100}; the nearest known key is {nearest_key(key)}")
        if not _has_form(value, spec):
            raise wrong_value(key, value, source=source)


def check_sections(config: object, prefix: str = "") -> None:
    """Checks that sections and lists are where they belong once interpolations are resolved.

    OmegaConf converts what a scalar's interpolation leads to; whole sections and lists it takes as they come.

    Raises:
        ConfigError: The first key that does not fit.
    """
    for name, value in vars(config).items():
        spec = known_keys()[f"{prefix}{name}"]
        if value is None and spec.optional:
            continue
        if spec.is_section and isinstance(value, spec.type):
            check_sections(value, f"{prefix}{name}.")
        elif spec.is_section or (spec.is_list and not _is_list_of_text(value)):
            raise wrong_value(f"{prefix}{name}", value, source="interpolation")


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def wrong_value(key: str, value: object, *, source: str) -> ConfigError:
    """Returns the error for a known key whose value does not fit."""
    shown = "null" if value is None else f"{value!r:.200}"
    return ConfigError(f"{source}: {key} cannot be {shown}; it takes {known_keys()[key].describe()}")


def nearest_key(key: str) -> str:
    """Returns the known key most like ``key``; the same name in another section is nearer than any other name."""
    # Comparing takes time with the square of the length.
    key = key[:_LONGEST_COMPARED]
    last = key.rpartition(".")[2]
    same_depth = [known for known in known_keys() if ("." in known) == ("." in key)]
    same_last = [known for known in known_keys() if known.rpartition(".")[2] == last]
    return difflib.get_close_matches(key, same_last or same_depth, n=1, cutoff=0.0)[0]


def _has_form(value: object, spec: KeySpec) -> bool:
    """Whether a section, a list or a scalar is where it belongs; OmegaConf converts the scalars themselves."""
    if value is None or (isinstance(value, str) and value.startswith(("${", "???"))):
        return True  # null, an interpolation, or a value to be given later: OmegaConf knows where each may stand
    if spec.is_list:
        return isinstance(value, list) and not any(isinstance(entry, (list, Mapping)) for entry in value)
    return isinstance(value, Mapping) == spec.is_section


def _walk_schema(section: type, prefix: str) -> Iterator[tuple[str, KeySpec]]:
    for name, hint in typing.get_type_hints(section).items():
        arguments = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        (inner,) = [argument for argument in arguments if argument is not types.NoneType]
        spec = KeySpec(type=inner, optional=types.NoneType in arguments)
        yield prefix + name, spec
        if spec.is_section:
            yield from _walk_schema(inner, f"{prefix}{name}.")


def _walk_layer(layer: Mapping[Any, Any], prefix: str, source: str) -> Iterator[tuple[str, Any]]:
    """Yields each leaf, and each section that is known; of an unknown section its leaves say more than its name."""
    for name, value in layer.items():
        if not isinstance(name, str) or "." in name:
            raise ConfigError(f"{source}: unknown key {prefix}{name!r:.100}; a key is a name, and sections nest")
        key = f"{prefix}{name}"
        if not isinstance(value, Mapping) or not value or key in known_keys():
            yield key, value
        if isinstance(value, Mapping):
            yield from _walk_layer(value, f"{key}.", source)


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        return "a list, e.g. [a, b]"
    if is_dataclass(kind):
        return "a section of keys"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(member.name for member in kind)}"
    return TYPE_NAMES[kind]
