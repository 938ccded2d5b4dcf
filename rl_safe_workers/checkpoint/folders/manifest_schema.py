"""The schema of manifests: types, ranges and paths, for every version that was ever written.

Imports pydantic, which takes a tenth of a second: import this where a manifest is read, not at the top of a module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rl_safe_workers.checkpoint.folders.manifest_facts import MAX_SERIAL
from rl_safe_workers.foreign_files import printable

MAX_STEP = 10**12
MAX_TIME_S = 4102444800.0
"""The year 2100. The limit is not this machine's own time, because its clock may be slow."""
MAX_BYTES = 2**60
MAX_NAME_BYTES = 4096
"""Longest path that Linux takes."""


def _is_inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or str(path) != name or "\0" in name:
        raise ValueError("is no path inside the checkpoint")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError("is longer than a path can be")
    return name


Inside = Annotated[str, AfterValidator(_is_inside)]
Size = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Text = Annotated[str, Field(max_length=256)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileRecord(_Strict):
    """A manifest's record of a file."""

    bytes: Size
    digest: Annotated[str, Field(pattern=r"^crc32:[0-9a-f]{1,8}$")]


class _Manifest(_Strict):
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    layout: dict[Text, Annotated[int, Field(ge=0, le=2**31)]]
    saved_at: Annotated[float, Field(ge=0, le=MAX_TIME_S)]
    versions: dict[Text, Text]


class FirstManifest(_Manifest):
    """A manifest of schema 1, which had sizes of files and no digests. Only the audit reads it."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    files: Annotated[dict[Inside, Size], Field(min_length=1)]
    model_fingerprint: Text = ""
    driver_state: dict[str, Any] = {}
    digests: dict[Text, Text] = {}


class SecondManifest(_Manifest):
    """A manifest of schema 2, which had no serial."""

    schema_: Annotated[Literal[2], Field(alias="schema")]
    files: Annotated[dict[Inside, FileRecord], Field(min_length=1)]
    model_fingerprint: Text
    driver_state: dict[str, Any]
    digests: dict[Text, Text]


class ThirdManifest(SecondManifest):
    """A manifest as it is written now."""

    schema_: Annotated[Literal[3], Field(alias="schema")]  # type: ignore[assignment]
    serial: Annotated[int, Field(ge=0, le=MAX_SERIAL)]


class Marker(_Strict):
    """Contents of the marker of a pending folder."""

    host: Text
    pid: Annotated[int, Field(ge=1)]
    what: Text
    holds: list[Inside] | None


_MODELS: Mapping[int, type[_Manifest]] = {1: FirstManifest, 2: SecondManifest, 3: ThirdManifest}


def complaint(model: type[BaseModel], fields: object) -> str | None:
    """Returns the first thing that is wrong with the fields, in one line; None if there is nothing."""
    try:
        model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return printable(f"{where[:200]}: {first['msg']}" if where else first["msg"])
    return None


def manifest_complaint(fields: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a manifest, in one line; None if there is nothing."""
    schema = fields["schema"]
    model = _MODELS.get(schema) if type(schema) is int else None
    if model is None:
        return "schema: not a number from 1 up"
    return next((found for part in _parts(fields) if (found := complaint(model, part)) is not None), None)


_AT_ONCE = 1_000
"""Number of entries that are checked together. Pydantic describes every error before it returns."""
_LONG = ("files", "digests", "layout", "versions")
"""Sections that may have many entries."""


def _parts(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the manifest with the first entries of each section, then with the next ones of one section at a time."""
    sections = {name: fields[name] for name in _LONG if isinstance(fields.get(name), dict)}
    yield {**fields, **{name: dict(islice(section.items(), _AT_ONCE)) for name, section in sections.items()}}
    rest = {**fields, "driver_state": {}, **{name: dict(islice(s.items(), 1)) for name, s in sections.items()}}
    for name, section in sections.items():
        entries = islice(section.items(), _AT_ONCE, None)
        while batch := dict(islice(entries, _AT_ONCE)):
            yield {**rest, name: batch}
