"""Hostile JSON in a checkpoint: ``manifest.json`` and ``metadata.json``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.hostile.case import EITHER, Case, Command, Site
from tests.hostile.checkpoints import DATA, FOREIGN, OURS, manifest_fields, put_checkpoint
from tests.hostile.corpus_checkpoints import DATA as PROMPTS
from tests.hostile.corpus_checkpoints import MANIFEST, checkpoint, readers
from tests.hostile.grow import MANY_DIGITS, grow, to_json, values
from tests.hostile.prompts import put_prompts

MIB = 2**20
_ELSEWHERE = ("index", "common", "load")
"""Commands that do not look at the manifest."""
_WRONG_TYPES: dict[str, Any] = {
    "null": None,
    "true": True,
    "text": "x",
    "list": [1],
    "section": {"a": 1},
    "fraction": 1.5,
    "nan": math.nan,
    "digits": MANY_DIGITS,
    "surrogate": "\ud800",
    "escape": "\x1b[2J\x07",
}
_FITTING = {
    ("saved_at", "fraction"),
    ("model_fingerprint", "text"),
    ("model_fingerprint", "surrogate"),
    ("model_fingerprint", "escape"),
    ("files", "section"),
    ("layout", "section"),
    ("versions", "section"),
    ("driver_state", "section"),
    ("digests", "section"),
    ("schema", "null"),
}
"""Values that a field may have, or may be refused for; all others are wrong."""


def cases() -> Iterator[Case]:
    """All of them."""
    for field in ("schema", "step", "model_fingerprint", "layout", "saved_at", "versions", "files", "driver_state"):
        for word, value in _WRONG_TYPES.items():
            accepts = EITHER if (field, word) in _FITTING else _ELSEWHERE
            yield _manifest(f"{field}-{word}", {field: value}, accepts)
    for word, changes, accepts in _CHANGES:
        yield _manifest(word, changes, accepts)
    for word, place in _PLACES.items():
        yield _manifest(f"data-{word}", {"driver_state": {"data": place}}, (*_ELSEWHERE, "audit", "manifest"))
    for word, name in _NAMES.items():
        yield _manifest(f"file-named-{word}", partial(_with_file, name, {"bytes": 4, "digest": "crc32:00000000"}))
    for word, facts in _FACTS.items():
        yield _manifest(f"file-with-{word}", partial(_with_file, "dist_ckpt/x", facts))
    for word, write in TEXTS.items():
        yield checkpoint(
            f"manifest-{word}",
            partial(_write, write, True),
            OURS,
            keeps_manifest=True,
            accepts=_ELSEWHERE if word != "duplicate-keys" else EITHER,
        )
        yield checkpoint(
            f"format-{word}", partial(_write, write, False), accepts=EITHER if word == "duplicate-keys" else ("common",)
        )
    for word, value in _WRONG_TYPES.items():
        for field in ("sharded_backend", "sharded_backend_version"):
            yield checkpoint(f"format-{field}-{word}", partial(_write_format, {field: value}), accepts=("common",))
    yield from _pairs()
    yield from _grown()


def _manifest(word: str, changes: Any, accepts: tuple[str, ...] = _ELSEWHERE) -> Case:
    def make(shards: Path, site: Site) -> None:
        root = shards.parent
        fields = manifest_fields(root)
        fields |= changes(fields) if callable(changes) else changes
        (root / MANIFEST).write_text(to_json(fields))

    return checkpoint(f"manifest-{word}", make, OURS, keeps_manifest=True, accepts=accepts)


_AUDITED = (*_ELSEWHERE, "audit")
_CHANGES: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("step-negative", {"step": -1}, _ELSEWHERE),
    ("step-1e300", {"step": 1e300}, _ELSEWHERE),
    ("step-of-another", {"step": 4}, EITHER),
    ("schema-zero", {"schema": 0}, _ELSEWHERE),
    ("schema-negative", {"schema": -5}, _ELSEWHERE),
    ("schema-almost", {"schema": 2.0}, EITHER),
    ("schema-between", {"schema": 1.5}, _ELSEWHERE),
    ("saved-at-1e18", {"saved_at": 1e18}, EITHER),
    ("saved-at-1e300", {"saved_at": 1e300}, EITHER),
    ("saved-at-infinite", {"saved_at": math.inf}, _ELSEWHERE),
    ("saved-at-negative", {"saved_at": -1.0}, EITHER),
    ("files-empty", {"files": {}}, _ELSEWHERE),
    ("field-unknown", {"surprise": 1}, (*_AUDITED,)),
    ("layout-of-text", {"layout": {"tensor": "x"}}, _ELSEWHERE),
    ("layout-huge", {"layout": {"tensor": 10**30}}, EITHER),
    ("layout-key-escape", {"layout": {"\x1b[2J": 1}}, EITHER),
    ("layout-key-surrogate", {"layout": {"\ud800": 1}}, EITHER),
    ("version-escape", {"versions": {"torch": "\x1b[2J\n\x07"}}, EITHER),
    ("version-surrogate", {"versions": {"torch": "\ud800"}}, EITHER),
    ("versions-of-a-number", {"versions": {"torch": 2}}, _ELSEWHERE),
    ("digests-surrogate", {"digests": {"0": "\ud800"}}, EITHER),
    ("driver-state-without-data", {"driver_state": {}}, (*_AUDITED, "manifest")),
)
_PLACES: dict[str, Any] = {
    "position-negative": {**DATA, "position": -1},
    "position-past-end": {**DATA, "position": 4_000_000},
    "position-huge": {**DATA, "position": 10**30},
    "position-digits": {**DATA, "position": MANY_DIGITS},
    "position-fraction": {**DATA, "position": 1.5},
    "position-nan": {**DATA, "position": math.nan},
    "position-text": {**DATA, "position": "1"},
    "position-null": {**DATA, "position": None},
    "position-true": {**DATA, "position": True},
    "epoch-negative": {**DATA, "epoch": -1},
    "epoch-digits": {**DATA, "epoch": MANY_DIGITS},
    "epoch-text": {**DATA, "epoch": "x"},
    "prompts-text": {**DATA, "num_prompts": "4"},
    "prompts-escape": {**DATA, "num_prompts": "\x1b[2J"},
    "no-epoch": {"position": 1, "num_prompts": 4},
    "list": [0, 1, 4],
    "null": None,
}
_NAMES = {
    "above": "../../outside/secret.txt",
    "above-inside": "dist_ckpt/../../../outside/secret.txt",
    "absolute": "/etc/passwd",
    "empty": "",
    "dot": ".",
    "nul": "dist_ckpt/\x00",
    "long": "a" * 300,
    "deep": "a/" * 3000 + "a",
    "escape": "\x1b[2J\x1b]0;x\x07",
    "newline": "a\nrl-safe: error: forged",
    "surrogate": "\ud800",
    "folder": "dist_ckpt",
}
_FACTS: dict[str, Any] = {
    "bytes-negative": {"bytes": -1, "digest": "crc32:00000000"},
    "bytes-text": {"bytes": "4", "digest": "crc32:00000000"},
    "bytes-nan": {"bytes": math.nan, "digest": "crc32:00000000"},
    "bytes-fraction": {"bytes": 4.5, "digest": "crc32:00000000"},
    "bytes-digits": {"bytes": MANY_DIGITS, "digest": "crc32:00000000"},
    "bytes-infinite": {"bytes": math.inf, "digest": "crc32:00000000"},
    "digest-list": {"bytes": 4, "digest": ["crc32:"]},
    "digest-md5": {"bytes": 4, "digest": "md5:00000000"},
    "digest-escape": {"bytes": 4, "digest": "crc32:\x1b[2J"},
    "digest-surrogate": {"bytes": 4, "digest": "\ud800"},
    "no-digest": {"bytes": 4},
    "null": None,
    "list": [4, "crc32:00000000"],
    "text": "4",
}


def _with_file(name: str, facts: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {"files": {**fields["files"], name: facts}}


TEXTS: dict[str, Callable[[], bytes]] = {
    "deep-lists-5000": lambda: b"[" * 5_000 + b"]" * 5_000,
    "deep-lists-200000": lambda: b"[" * 200_000,
    "deep-sections-5000": lambda: b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "200-mib-of-spaces": lambda: b" " * (200 * MIB) + b"{}",
    "200-mib-of-text": lambda: b'{"step": "' + b"a" * (200 * MIB) + b'"}',
    "60-mib-of-sections": lambda: b'{"files": [' + b"{}," * (20 * MIB) + b"{}]}",
    "a-million-files": lambda: b'{"schema": 2, "files": {' + b",".join(b'"%d": 1' % n for n in range(10**6)) + b"}}",
    "digits": lambda: b'{"schema": ' + b"9" * 10_000 + b"}",
    "digits-million": lambda: b'{"sharded_backend_version": ' + b"9" * 10**6 + b"}",
    "list": lambda: b"[]",
    "text": lambda: b'"x"',
    "null": lambda: b"null",
    "nan": lambda: b"NaN",
    "empty-section": lambda: b"{}",
    "utf-16": lambda: '{"schema": 2}'.encode("utf-16"),
    "latin-1": lambda: b'{"schema\xff": 2}',
    "byte-order-mark": lambda: b'\xef\xbb\xbf{"schema": 2}',
    "nul": lambda: b"\x00" * 4096,
    "cut": lambda: b'{"schema": 2, "step"',
    "control-characters": lambda: b'{"schema": "\x1b[2J"}',
    "duplicate-keys": lambda: b'{"schema": 2, "sharded_backend": "zarr", "sharded_backend": "torch_dist", "schema": 9}',
}


def _write(write: Callable[[], bytes], is_manifest: bool, shards: Path, site: Site) -> None:
    (shards.parent / MANIFEST if is_manifest else shards / "metadata.json").write_bytes(write())


def _write_format(changes: dict[str, Any], shards: Path, site: Site) -> None:
    fields = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, **changes}
    (shards / "metadata.json").write_text(to_json(fields))


_TIMES: dict[str, tuple[Any, Any]] = {
    "number-and-text": (1.0, "now"),
    "number-and-null": (1.0, None),
    "number-and-nan": (1.0, math.nan),
    "number-and-section": (1.0, {}),
    "number-and-digits": (1.0, MANY_DIGITS),
    "true-and-number": (True, 1.0),
}


def _pairs() -> Iterator[Case]:
    """Two checkpoints of which the newer is to be found."""
    for word, times in _TIMES.items():

        def make(site: Site, times: tuple[Any, Any] = times) -> None:
            put_prompts(site.input / PROMPTS)
            root = put_checkpoint(site, OURS).parent
            other = root.with_name("global_step_4")
            other.mkdir()
            for step, (folder, saved_at) in enumerate(zip((root, other), times, strict=True), start=3):
                (folder / MANIFEST).unlink(missing_ok=True)
                (folder / "file").write_bytes(b"x")
                fields = {**manifest_fields(folder), "step": step, "saved_at": saved_at}
                (folder / MANIFEST).write_text(to_json(fields))

        yield Case(
            name=f"checkpoint/saved-at-{word}",
            make=make,
            commands=(Command("resume", ("checkpoints", PROMPTS)), Command("find", ("checkpoints",))),
            accepts=EITHER,
        )


def _grown() -> Iterator[Case]:
    fields = (
        "schema",
        "step",
        "model_fingerprint",
        "layout",
        "saved_at",
        "versions",
        "files",
        "driver_state",
        "digests",
    )
    changes = st.dictionaries(st.sampled_from(fields), values(), min_size=1, max_size=2)
    audits = (("--deep", "--json"),)
    for number, change in enumerate(grow(changes, 90, seed=21)):
        case = _manifest(f"grown/{number:03}", change, EITHER)
        keep = tuple(
            command for command in readers(OURS, audits=audits) if command.entry in ("audit", "manifest", "resume")
        )
        yield Case(name=case.name, make=case.make, commands=keep, accepts=EITHER)
    places = st.fixed_dictionaries({key: values() for key in DATA})
    for number, place in enumerate(grow(places, 40, seed=22)):
        case = _manifest(f"grown-data/{number:03}", {"driver_state": {"data": place}}, EITHER)
        yield Case(
            name=case.name, make=case.make, commands=(Command("resume", ("checkpoints", PROMPTS)),), accepts=EITHER
        )
    formats = st.dictionaries(
        st.sampled_from(("sharded_backend", "sharded_backend_version", "common_backend")), values()
    )
    for number, change in enumerate(grow(formats, 40, seed=23)):
        yield checkpoint(
            f"format-grown/{number:03}",
            partial(_write_raw, change),
            accepts=EITHER,
            commands=tuple(readers(FOREIGN, audits=(("--json",),))[:2]),
        )


def _write_raw(fields: dict[str, Any], shards: Path, site: Site) -> None:
    (shards / "metadata.json").write_text(to_json(fields))
