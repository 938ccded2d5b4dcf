"""Owns `Section`, the base class of all configuration sections, and reports a wrong setting in one line.

Imports pydantic, which takes a tenth of a second.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from rl_safe_workers.errors import ConfigError, first_line

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _ModelType
else:
    _ModelType = type(BaseModel)  # pydantic has no public name for it

T = TypeVar("T", bound="Section")
_LONGEST_COMPARED = 100
_UNKNOWN = ("extra_forbidden", "invalid_key")


class Contradiction(ValueError):
    """Two settings of one section exclude each other. A section's own validator raises this."""


class _SectionType(_ModelType):
    """Lets ``SomeConfig(key=value)`` raise `ConfigError`, as reading a file does."""

    def __call__(self, **values: Any) -> Any:
        try:
            return super().__call__(**values)
        except ValidationError as error:
            raise _config_error(cast(type[Section], self), error, source_of=lambda key: f"{self.__name__}: ") from None


class Section(BaseModel, metaclass=_SectionType):
    """One section of settings: its keys, their types, ranges and defaults.

    Converts text to a number where the key needs a number, e.g. the value of ``${oc.env:NAME}``. Refuses unknown keys,
    NaN and infinity. An assignment to a field checks nothing; `checked` checks a whole section again.

    The rule of one field raises ValueError with a text that completes "it ...", such as ``"should be even"``. A rule
    between fields raises `Contradiction` with a sentence. Both errors become a `ConfigError`.
    """

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic converts true to 1.
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and section_of(kind) is None and bool not in (kind, *typing.get_args(kind)):
            raise PydanticCustomError("not_bool", "Input should not be true or false")
        return value

    def checked(self) -> Self:
        """Returns a checked copy. Use it after fields were assigned.

        Raises:
            ConfigError: For the first value that does not fit.
        """
        return read(type(self), self.model_dump(warnings=False))


def read(
    kind: type[T], values: Mapping[Any, Any], *, node: str = "", source_of: Callable[[str], str] = lambda key: ""
) -> T:
    """Builds a section from nested mappings. Interpolations must be resolved already.

    Args:
        kind: The section's class.
        values: The section's keys and values. Missing keys get their defaults.
        node: The dotted name of the node that holds the keys, for errors; "" for the root.
        source_of: Returns the source of a dotted key's value, such as ``"recipe.yaml: "``; "" if unknown.

    Raises:
        ConfigError: On one line, for the first key that is unknown or whose value does not fit.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise _config_error(kind, error, node=node, source_of=source_of) from None


@cache
def known_keys(kind: type[Section]) -> Sequence[str]:
    """Returns every dotted key that a section may hold, sections before their keys."""
    return tuple(_walk(kind, ""))


def nearest_key(kind: type[Section], key: str) -> str:
    """Returns the known key that is most similar to ``key``. Prefers the same name in another section."""
    # The time of a comparison grows with the square of the length.
    key = key[:_LONGEST_COMPARED]
    known, last = known_keys(kind), key.rpartition(".")[2]
    same_depth = [one for one in known if ("." in one) == ("." in key)] or known
    same_last = [one for one in known if one.rpartition(".")[2] == last]
    return difflib.get_close_matches(key, same_last or same_depth, n=1, cutoff=0.0)[0]


def section_of(annotation: Any) -> type[Section] | None:
    """Returns the section class in an annotation, e.g. ``OptimConfig`` or ``OptimConfig | None``; None without one."""
    for one in (annotation, *typing.get_args(annotation)):
        if isinstance(one, type) and issubclass(one, Section):
            return one
    return None


def _walk(kind: type[Section], prefix: str) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield prefix + name
        if (inner := section_of(field.annotation)) is not None:
            yield from _walk(inner, f"{prefix}{name}.")


def _config_error(
    kind: type[Section], error: ValidationError, *, node: str = "", source_of: Callable[[str], str]
) -> ConfigError:
    """Returns the first of pydantic's findings on one line. Unknown keys come first: they explain the others."""
    findings = error.errors(include_url=False)
    finding = min(findings, key=lambda one: one["type"] not in _UNKNOWN)
    key = _dotted(finding["loc"])
    prefix = f"{node}." if node else ""
    if finding["type"] in _UNKNOWN:
        return ConfigError(f"{source_of(key)}{_unknown(kind, finding, prefix)}")
    cause = finding.get("ctx", {}).get("error")
    if isinstance(cause, Contradiction):
        where = f"{node}.{key}".strip(".")
        return ConfigError(f"{source_of(key)}{where}{': ' if where else ''}{first_line(cause)}")
    shown = "null" if finding["input"] is None else f"{finding['input']!r:.200}"
    return ConfigError(f"{source_of(key)}{prefix}{key} cannot be {shown}; {_demand(finding)}")


def _dotted(place: Sequence[str | int]) -> str:
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place).removeprefix(".")


def _unknown(kind: type[Section], finding: ErrorDetails, prefix: str) -> str:
    *above, name = finding["loc"]
    key = _dotted(finding["loc"])
    # If a whole section is unknown, its first leaf tells more than the section's name.
    value = finding["input"]
    while isinstance(value, Mapping) and value and all(isinstance(one, str) for one in value):
        leaf, value = next(iter(value.items()))
        key = f"{key}.{leaf}"
    if finding["type"] == "invalid_key" or "." in str(name):
        before = "".join(f"{one}." for one in above)
        return f"unknown key {prefix}{before}{name!r:.100}; a key is a name, and sections nest"
    return f"unknown key {prefix}{key:.100}; the nearest known key is {prefix}{nearest_key(kind, key)}"


def _demand(finding: ErrorDetails) -> str:
    """Returns the demand on a value, as "it ...": pydantic's text with another subject, or the text of our own rule."""
    if finding["type"] == "model_type":
        return "it should be a section of keys"
    if finding["type"] == "value_error":
        return f"it {first_line(finding['ctx']['error'])}"
    text = finding["msg"]
    return f"it {text.removeprefix('Input ')}" if text.startswith("Input ") else text[:1].lower() + text[1:]
