"""Hostile checkpoints: files that are no files, and bytes that were flipped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hypothesis import strategies as st

from tests.hostile.case import EITHER, Case, Command, Site
from tests.hostile.checkpoints import FILES, FOREIGN, OURS, put_checkpoint, shards_of, write_manifest
from tests.hostile.grow import edit_file, edits, grow
from tests.hostile.prompts import put_prompts
from tests.hostile.special import GIB, SPECIAL, TIB, move_outside, replace

DATA = "prompts.parquet"
MANIFEST = "manifest.json"
UNREAD = {
    ".metadata": ("common",),
    "metadata.json": ("common",),
    "common.pt": ("index",),
    "__0_0.distcp": ("index", "common"),
    "__1_0.distcp": ("index", "common"),
    MANIFEST: ("audit", "index", "common", "load"),
}
"""Commands that need not open a file, and so may accept whatever it is.

Without its manifest a checkpoint is somebody else's.
"""


AUDITS: tuple[tuple[str, ...], ...] = ((), ("--deep",), ("--deep", "--json"))
"""Options of an audit that are tried."""


def readers(root: str, *, audits: tuple[tuple[str, ...], ...] = AUDITS) -> list[Command]:
    """Every command that reads a checkpoint at a place below the input."""
    shards = shards_of(root)
    found = [Command("audit", (root, *options)) for options in audits]
    found += [Command("index", (root,)), Command("common", (shards,)), Command("load", (shards,))]
    if root == OURS:
        found += [Command("manifest", (root,)), Command("resume", (str(Path(root).parent), DATA))]
    return found


def checkpoint(name: str, change: Callable[[Path, Site], None], root: str = FOREIGN, **facts: object) -> Case:
    """A case of a good checkpoint, changed.

    Args:
        name: Of the case, after the kind.
        change: Gets the directory of shards, and the site.
        root: Where the checkpoint lies; one of ours gets a manifest of what it holds after the change.
        facts: Fields of the case.
    """

    def make(site: Site) -> None:
        shards = put_checkpoint(site, root)
        change(shards, site)
        if root == OURS:
            put_prompts(site.input / DATA)
            if (site.input / root / MANIFEST).is_file() and not facts.get("keeps_manifest"):
                write_manifest(site.input / root)

    fields = {key: value for key, value in facts.items() if key != "keeps_manifest"}
    fields.setdefault("commands", tuple(readers(root)))
    return Case(name=f"checkpoint/{name}", make=make, **fields)  # type: ignore[arg-type]


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _special_files()
    yield from _moved_files()
    yield from _holes_that_are_listed()
    yield from _folders()
    yield from _grown()


def _special_files() -> Iterator[Case]:
    for what in SPECIAL:
        for file in FILES:
            if what != "missing" or file != ".metadata":
                # Without a manifest only a deep audit can tell the hole in a shard from its bytes.
                unread = ("audit",) if what.startswith("hole") and file.endswith(".distcp") else ()
                accepts = (*UNREAD[file], *unread)
                yield checkpoint(f"{what}/{file}", partial(_replace, file, what), accepts=accepts)
        yield checkpoint(
            f"{what}/{MANIFEST}", partial(_replace_manifest, what), OURS, keeps_manifest=True, accepts=UNREAD[MANIFEST]
        )


def _replace(file: str, what: str, shards: Path, site: Site) -> None:
    replace(shards / file, what, site)


def _replace_manifest(what: str, shards: Path, site: Site) -> None:
    replace(shards.parent / MANIFEST, what, site)


def _moved_files() -> Iterator[Case]:
    for file in FILES:
        yield checkpoint(
            f"link-outside/{file}", lambda shards, site, f=file: move_outside(shards / f, site), accepts=UNREAD[file]
        )
    yield checkpoint(
        "link-outside/ours-shard",
        lambda shards, site: move_outside(shards / FILES[-1], site),
        OURS,
        keeps_manifest=True,
        accepts=(*UNREAD[FILES[-1]], "manifest", "resume"),
    )
    yield checkpoint(
        "link-outside/manifest.json",
        lambda shards, site: move_outside(shards.parent / MANIFEST, site),
        OURS,
        keeps_manifest=True,
        accepts=("index", "common", "load"),
    )
    yield checkpoint(
        "link-outside/dist_ckpt",
        lambda shards, site: move_outside(shards, site),
        OURS,
        keeps_manifest=True,
        commands=tuple(readers(OURS)[:4]),
    )


def _holes_that_are_listed() -> Iterator[Case]:
    """A manifest that says of a hole that all of it was written."""
    for size, word in ((8 * GIB, "8gib"), (10 * TIB, "10tib")):
        for file in ("common.pt", "__1_0.distcp"):
            yield checkpoint(
                f"hole-listed-{word}/{file}",
                partial(_grow_hole, file, size),
                OURS,
                keeps_manifest=True,
                accepts=("audit", "index", "common", "manifest", "resume", "load")
                if file != "common.pt"
                else ("index", "manifest", "resume"),
            )


def _grow_hole(file: str, size: int, shards: Path, site: Site) -> None:
    import json

    os.truncate(shards / file, size)
    path = shards.parent / MANIFEST
    fields = json.loads(path.read_text())
    fields["files"][f"{shards.name}/{file}"] = {"bytes": size, "digest": "crc32:00000000"}
    path.write_text(json.dumps(fields))


def _folders() -> Iterator[Case]:
    yield checkpoint("many-files", _add_files, accepts=EITHER)
    yield checkpoint("many-files-ours", _add_files, OURS, keeps_manifest=True, accepts=EITHER)
    yield checkpoint("deep-folders-ours", _add_deep_folders, OURS, keeps_manifest=True, accepts=EITHER)
    yield checkpoint("file-named-with-surrogate", _add_surrogate_file, OURS, keeps_manifest=True, accepts=EITHER)
    yield checkpoint("file-named-with-escape", _add_escape_file, OURS, keeps_manifest=True, accepts=EITHER)
    for name, word in (("\x1b[2Jred\x07", "escape"), ("a\nb", "newline"), (os.fsdecode(b"\xff\xfe"), "surrogate")):
        yield Case(
            name=f"checkpoint/directory-named-with-{word}",
            make=partial(_rename_root, name),
            commands=tuple(readers(name)[:4]),
            accepts=EITHER,
        )
        yield Case(
            name=f"checkpoint/damaged-directory-named-with-{word}",
            make=partial(_rename_damaged, name),
            commands=tuple(readers(name)[:5]),
            accepts=("common",),  # which does not read the file that is damaged
        )
    yield Case(name="checkpoint/no-directory", make=lambda site: None, commands=tuple(readers(FOREIGN)[:4]))
    yield Case(name="checkpoint/several", make=_two_checkpoints, commands=(Command("audit", (".",)),))


def _add_files(shards: Path, site: Site) -> None:
    for number in range(20_000):
        (shards / f"__{number}_9.distcp").touch()


def _add_deep_folders(shards: Path, site: Site) -> None:
    here = Path.cwd()
    try:
        os.chdir(shards)
        for _ in range(1200):
            Path("d").mkdir()
            os.chdir("d")
    finally:
        os.chdir(here)


def _add_surrogate_file(shards: Path, site: Site) -> None:
    (shards / os.fsdecode(b"\xff.distcp")).touch()


def _add_escape_file(shards: Path, site: Site) -> None:
    (shards / "\x1b[2J.distcp").touch()


def _rename_root(name: str, site: Site) -> None:
    put_checkpoint(site, FOREIGN).rename(site.input / name)


def _rename_damaged(name: str, site: Site) -> None:
    shards = put_checkpoint(site, FOREIGN)
    (shards / ".metadata").write_bytes(b"")
    shards.rename(site.input / name)


def _two_checkpoints(site: Site) -> None:
    shards = put_checkpoint(site, FOREIGN)
    for name in ("\x1b[31mred", "a\nb"):
        (site.input / name).mkdir()
        (site.input / name / ".metadata").write_bytes((shards / ".metadata").read_bytes())


def _grown() -> Iterator[Case]:
    """Flips, cuts and inserted bytes at random places of every file."""
    audits = (("--deep", "--json"),)
    for root, count, seed in ((FOREIGN, 220, 1), (OURS, 130, 2)):
        word = "ours" if root == OURS else "foreign"
        # Small files are edited as often as the large ones: there each byte matters more.
        strategy = st.tuples(st.sampled_from(FILES), edits())
        for number, (file, todo) in enumerate(grow(strategy, count, seed=seed)):
            # With a manifest every byte has a digest, so a deep audit misses nothing.
            yield checkpoint(
                f"edited-{word}/{number:03}",
                partial(_edit, file, todo),
                root,
                commands=tuple(readers(root, audits=audits)),
                keeps_manifest=True,
                accepts=("index", "common", "load", "manifest", "resume") if root == OURS else EITHER,
            )
    strategy = edits()
    for number, todo in enumerate(grow(strategy, 60, seed=3)):
        yield checkpoint(
            f"edited-manifest/{number:03}",
            partial(_edit_manifest, todo),
            OURS,
            keeps_manifest=True,
            commands=tuple(readers(OURS, audits=audits)),
            accepts=EITHER,
        )


def _edit(file: str, todo: list[tuple[str, int, int, bytes]], shards: Path, site: Site) -> None:
    edit_file(shards / file, todo)


def _edit_manifest(todo: list[tuple[str, int, int, bytes]], shards: Path, site: Site) -> None:
    edit_file(shards.parent / MANIFEST, todo)
