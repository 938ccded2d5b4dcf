"""Reads untrusted YAML settings.

A few bytes of YAML can stand for any amount of data, because an alias or an interpolation repeats the data that it
names. Therefore the text is measured event by event before any object is built from it.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from rl_safe_workers.errors import ConfigError, first_line
from rl_safe_workers.foreign_files import SMALL_BYTES, look, read_foreign

_MOST_DEPTH = 50
_MOST_WEIGHT = 10_000
"""Largest weight of a file with its aliases written out. The largest settings of a host framework weigh about 2,000."""
_CHARACTERS_PER_NODE = 200
"""Number of characters that weigh as much as one node."""
_INTERPOLATION_WEIGHT = 10
_MOST_EXPANSIONS = 1_000
"""Largest number of interpolations that the values of a configuration may expand to."""
_MOST_CHARACTERS = 2**20
"""Largest number of characters that a value may grow to by interpolation."""
_REFERENCE = re.compile(r"\$\{\s*+(?:([\w.\[\]]++)|oc\.env:[^${}]*+)\s*+\}")
"""An interpolation of a literal key, or of an environment variable. It matches in linear time, without backtracking."""
_INTERPOLATION = re.compile(r"\$\{\s*+(?:(?!oc\.create\s*+:)[\w.]++\s*+:|[^${}():'\"\\]++\})")
"""The start of an interpolation that we accept: a literal key, or any resolver but ``oc.create``, which reads YAML."""
_LONGEST_NUMBER = 300
"""Largest number of characters of a number."""
_MOST_FILES = 50
_TO_BE_GIVEN = "???"
_FileId = tuple[int, int]
_NamedValues = tuple[Path, dict[Any, Any]]
_STANDARD = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"""^(?:
     [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*[eE][-+]?[0-9]+
    )$""",
    re.VERBOSE,
)
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    """Reads scalars as OmegaConf's own loader does, but ten times as fast.

    1e-3 is a number, a date is text, and a mapping may not repeat a key.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, form) for tag, form in forms if tag != f"{_STANDARD}timestamp"]
        for first, forms in _Base.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == f"{_STANDARD}str":
                if key.value in seen:
                    raise _refusal(f"found duplicate key {key.value:.100}", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """Builds a number of YAML 1.1, which may be in base 60: ``1:30``.

        Refuses long ones: they take minutes to convert, or do not fit a float.
        """
        if len(node.value) > _LONGEST_NUMBER:
            raise _refusal(f"a number of more than {_LONGEST_NUMBER} characters", node.start_mark)
        is_int = node.tag == f"{_STANDARD}int"
        try:
            return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)
        except (ValueError, IndexError) as error:  # IndexError: ``!!int ""``
            raise _refusal(f"{node.value!r} is no number", node.start_mark) from error


for _kind in ("int", "float"):
    _Loader.add_constructor(f"{_STANDARD}{_kind}", _Loader.construct_number)
_Loader.add_implicit_resolver(f"{_STANDARD}float", _FLOAT, list("-+0123456789"))


def read_yaml(path: Path) -> dict[Any, Any]:
    """Reads a YAML file that holds a mapping. Returns an empty mapping for an empty file.

    The error quotes no line of the file, because the file may hold something other than settings.

    Raises:
        ConfigError: If the file cannot be read, is not a YAML mapping, or expands to more data than settings need.
    """
    try:
        text = read_foreign(path, limit_bytes=SMALL_BYTES).decode("utf-8")
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}; it takes a YAML file") from error
    try:
        values = _parse(text, is_file=True)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; it takes a YAML mapping of keys") from error
    return {} if values is None else dict(values)


def with_defaults(path: Path) -> Iterator[_NamedValues]:
    """Reads a YAML file and the files that its ``defaults`` name, each once, parents before children, depth first.

    Yields the path and the values of each file, without the key ``defaults``. The names in ``defaults`` are relative to
    the folder of the file that holds them.

    Raises:
        ConfigError: As `read_yaml`; or if the files form a cycle, or are more than 50.
    """
    yield from _with_defaults(path, {}, set())


def _with_defaults(path: Path, chain: dict[_FileId, Path], read: set[_FileId]) -> Iterator[_NamedValues]:
    """Does the work of `with_defaults`.

    Args:
        path: The file to begin with.
        chain: The files whose ``defaults`` led to it, to detect a cycle.
        read: All files that this call or an earlier one has begun to read. It is changed in place.
    """
    identity, chain_names = _identity(path), " -> ".join(map(str, [*chain.values(), path]))
    if identity in chain:
        raise ConfigError(f"files start from each other: {chain_names}; remove one of the defaults")
    if identity in read:
        return
    if len(read) == _MOST_FILES:
        raise ConfigError(
            f"{path}: one of more than {_MOST_FILES} files that start from each other; merge some of them"
        )
    read.add(identity)
    values = read_yaml(path)
    defaults = values.pop("defaults", None) or []
    names = [defaults] if isinstance(defaults, str) else defaults
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: defaults cannot be {defaults!r:.80}; it takes a file name or a list of file names")
    for name in names:
        yield from _with_defaults(path.parent / name, {**chain, identity: path}, read)
    yield path, values


def _identity(path: Path) -> _FileId:
    try:
        status = look(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return status.st_dev, status.st_ino


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {error.strerror or error}; check the path")


def overlaid(under: Mapping[Any, Any], over: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the settings ``under``, updated with the settings ``over``. Merges sections, and replaces other values.

    A value of ``???``, which marks a value that must be given elsewhere, does not replace an existing value.
    """
    merged = dict(under)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = overlaid(merged[key], value)
        elif value != _TO_BE_GIVEN or key not in merged:
            merged[key] = value
    return merged


def parse_yaml(text: str) -> Any:
    """Reads YAML from a command line, as OmegaConf reads the value of an override.

    Raises:
        ValueError: If the text is not YAML, or expands to more data than settings need. The message is one line.
    """
    return _parse(text, is_file=False)


def _parse(text: str, *, is_file: bool) -> Any:
    try:
        scale = _Scale()
        for event in yaml.parse(text, Loader=_Base):
            scale.take(event)
            if is_file and scale.is_at_root and not _may_be_root(event):
                raise _refusal("not a mapping of keys", event.start_mark)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise ValueError(_one_line(error)) from error
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise ValueError(f"not YAML: {first_line(error)}") from error


class _Scale:
    """Computes the weight of YAML from its events, before any object is built. An alias has its target's weight."""

    def __init__(self) -> None:
        self._weight, self._nodes = 0, 0
        self._weights: dict[str, int] = {}
        """Weight of each complete node that has an anchor, by anchor."""
        self._open: list[tuple[str | None, int]] = []
        """Anchor of each incomplete collection, with the total weight before it."""

    @property
    def is_at_root(self) -> bool:
        """True if the last event was the first node of the text."""
        return self._nodes == 1

    def take(self, event: yaml.Event) -> None:
        """Adds an event; raises MarkedYAMLError for a tag, and if the text is too deep or too heavy."""
        if isinstance(event, yaml.CollectionEndEvent):
            self._close(*self._open.pop())
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._weights:
                raise _refusal("an alias of nothing that is complete before it", event.start_mark)
            self._weight += self._weights[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            self._add(event)
        self._nodes += isinstance(event, (yaml.NodeEvent, yaml.CollectionEndEvent))
        if self._weight > _MOST_WEIGHT:
            raise _refusal("more data than settings need, aliases written out,", event.start_mark)
        if len(self._open) > _MOST_DEPTH:
            raise _refusal(f"nested deeper than {_MOST_DEPTH} levels", event.start_mark)

    def _add(self, event: yaml.NodeEvent) -> None:
        if event.tag is not None:
            raise _refusal("a tag, which settings do not take,", event.start_mark)
        self._weights.pop(event.anchor, None)
        before, text = self._weight, getattr(event, "value", "")
        self._weight += 1 + len(text) // _CHARACTERS_PER_NODE + _INTERPOLATION_WEIGHT * text.count("${")
        if isinstance(event, yaml.ScalarEvent):
            self._close(event.anchor, before)
        else:
            self._open.append((event.anchor, before))

    def _close(self, anchor: str | None, before: int) -> None:
        if anchor is not None:
            self._weights[anchor] = self._weight - before


def _may_be_root(event: yaml.Event) -> bool:
    is_null = isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value in ("", "~", "null")
    return is_null or isinstance(event, yaml.MappingStartEvent)


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _one_line(error: yaml.MarkedYAMLError) -> str:
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if (mark := error.problem_mark) else ""
    return f"{error.problem or 'not YAML'}{where}"


def check_interpolations(values: Any) -> None:
    """Refuses values that would grow without bounds when their interpolations are resolved.

    A reference costs as much as its target. If thirty values each name the one before twice, the last one expands to a
    billion. The check computes an upper bound of the cost of such chains and resolves nothing.

    Args:
        values: Nested mappings and lists, interpolations unresolved.

    Raises:
        ConfigError: If they may expand to more data than settings need, or if an interpolation has another form.
    """
    texts = dict(_walk(values, ""))
    interpolated = {path: text for path, text in texts.items() if "${" in text}
    for path, text in interpolated.items():
        if len(_INTERPOLATION.findall(text)) != text.count("${"):
            raise ConfigError(
                f"{path} cannot be {text!r:.200}: an interpolation is ${{key}}, or ${{oc.env:NAME}} for a variable"
            )
    found = {path: _REFERENCE.findall(text) for path, text in interpolated.items()}
    # A resolver may refer to any key.
    is_plain = all(len(names) == interpolated[path].count("${") for path, names in found.items())
    keys = {f".{re.sub(r'[][]+', '.', name).strip('.')}." for names in found.values() for name in names if name}
    chain = {
        path: text.count("${")
        for path, text in interpolated.items()
        if text.count("${") > 1 and not (is_plain and all(key not in f".{path}." for key in keys))
    }
    cost, longest = math.prod(chain.values()), max(map(len, texts.values()), default=0)
    if chain and (cost > _MOST_EXPANSIONS or cost * longest > _MOST_CHARACTERS):
        named = ", ".join([*chain][:3])
        raise ConfigError(f"{named}: interpolations of interpolations may grow without bounds; write the values out")


def _walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields the dotted path and the text of each string in nested mappings and lists."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, (dict, list)):
        for name, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(entry, f"{path}.{name}" if path else str(name))
