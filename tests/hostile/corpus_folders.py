"""Folders of checkpoints in which files of somebody else lie, and operations that tidy up there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
from hypothesis import strategies as st

from rl_safe_workers.checkpoint.folders.manifest import step_dir
from rl_safe_workers.checkpoint.folders.publish import pending_path
from rl_safe_workers.checkpoint.folders.retention import start_save
from rl_safe_workers.checkpoint.folders.step_tracker import TRACKER
from rl_safe_workers.reaping.processes import RUN_FILE, TEMP_PREFIX, process_namespace
from tests.hostile.case import EITHER, Case, Command, Site
from tests.hostile.entries import save_step
from tests.hostile.grow import MANY_DIGITS, digits, grow
from tests.hostile.special import SPECIAL, replace

ROOT = "checkpoints"
BELOW = f"input/{ROOT}"
STEPS = (1, 2, 3)
"""Steps of which there are checkpoints of ours."""
NEXT = 9
"""The step that a commit saves."""
OPERATIONS: dict[str, tuple[Command, tuple[str, ...]]] = {
    "find": (Command("find", (ROOT,)), ()),
    "settle": (Command("settle", (ROOT,)), (f"{BELOW}/global_step_77.incomplete",)),
    "prune": (Command("prune", (ROOT, "1")), (f"{BELOW}/global_step_1", f"{BELOW}/global_step_2")),
    "commit": (
        Command("commit", (ROOT, str(NEXT))),
        (f"{BELOW}/global_step_{NEXT}", f"{BELOW}/{TRACKER}", f"{BELOW}/global_step_77.incomplete"),
    ),
}
"""By name: the command, and what it may change, where nothing else says otherwise."""


def cases() -> Iterator[Case]:
    """All of them."""
    for word, add in ADDITIONS.items():
        for operation in OPERATIONS:
            yield _case(f"{word}/{operation}", operation, add)
    for word, add in IN_OURS.items():
        yield _case(f"in-ours-{word}/prune", "prune", add, theirs=(f"{BELOW}/global_step_1/theirs*", "outside/*"))
        yield _case(f"in-ours-{word}/settle", "settle", add)
    for word, add in AT_COMMIT.items():
        name = f"global_step_{NEXT}{word.removeprefix(word.split('.')[0])}"
        # An empty folder holds nothing of anybody's.
        ours = (f"{BELOW}/{name}",) if word.startswith("empty-folder") else ()
        yield _case(f"commit-onto-{word}", "commit", add, theirs=_all_of(name, word), ours=ours)
    yield from _locks()
    yield from _leftovers()
    yield from _grown()


def _case(
    name: str,
    operation: str,
    add: Callable[[Path, Site], None],
    theirs: tuple[str, ...] = (),
    ours: tuple[str, ...] = (),
) -> Case:
    command, may_change = OPERATIONS[operation]

    def make(site: Site) -> None:
        root = site.input / ROOT
        root.mkdir()
        put_archive(site)
        for step in STEPS:
            save_step(root, step, saved_at=1000.0 + step)
        start_save(root, 77)
        (pending_path(step_dir(root, 77)) / "dist_ckpt" / "__0_0.distcp").write_bytes(b"half a shard")
        add(root, site)

    return Case(
        name=f"folder/{name}",
        make=make,
        commands=(command,),
        accepts=EITHER,
        ours=(*may_change, *ours),
        theirs=theirs,
        may_read_outside=True,
    )


def put_archive(site: Site) -> None:
    """Puts checkpoints and other files of somebody else outside the input."""
    archive = site.outside / "archive"
    archive.mkdir()
    save_step(archive, 1, saved_at=1.0)
    _user_files(archive / "user")
    _verl_checkpoint(archive / "verl")


def _user_files(path: Path) -> None:
    (path / "theirs").mkdir(parents=True)
    (path / "theirs.txt").write_text("a user's notes")
    (path / "theirs" / "model.safetensors").write_bytes(b"a user's weights")


def _verl_checkpoint(path: Path) -> None:
    for name in ("theirs/actor/dist_ckpt/__0_0.distcp", "theirs/actor/huggingface/config.json", "theirs_data.pt"):
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"of verl")


def _forged_checkpoint(path: Path, manifest: str) -> None:
    """User's files with a manifest that somebody wrote."""
    _user_files(path)
    (path / "manifest.json").write_text(manifest)


def _all_of(name: str, what: str) -> tuple[str, ...]:
    """Patterns of what somebody has put under a name: everything, or beside a forged manifest the rest."""
    if "forged" in what:
        return (f"{BELOW}/{name}*/theirs*",)
    return () if what.startswith("empty-folder") else (f"{BELOW}/{name}", f"{BELOW}/{name}/*")


# What may lie beside ours: each under several names

_NAMES = (
    "global_step_5",
    "global_step_5.incomplete",
    "global_step_5.replaced.incomplete",
    "global_step_2.incomplete",
    "global_step_2.replaced.incomplete",
    f"global_step_{NEXT}.replaced.incomplete",
    "global_step_0005",
    "global_step_\N{ARABIC-INDIC DIGIT FIVE}",
    "global_step_5\n",
    "global_step_" + "9" * 200,
    "global_step_5.replaced",
    "global_step_77.replaced.incomplete",
)
_FILES = (f"{TRACKER}.tmp", "manifest.json", "manifest.json.tmp", "notes.txt", "global_step_5.lock")


def _put_user(name: str, root: Path, site: Site) -> None:
    _user_files(root / name)


def _put_verl(name: str, root: Path, site: Site) -> None:
    _verl_checkpoint(root / name)


def _put_link(name: str, target: str, root: Path, site: Site) -> None:
    (root / name).symlink_to(site.outside / "archive" / target)


def _put_file(name: str, root: Path, site: Site) -> None:
    (root / name).write_text("a user's file")


def _put_special(name: str, what: str, root: Path, site: Site) -> None:
    replace(root / name, what, site)


def _put_forged(name: str, manifest: str, root: Path, site: Site) -> None:
    _forged_checkpoint(root / name, manifest)


def _put_empty_folder(name: str, root: Path, site: Site) -> None:
    (root / name).mkdir()


FORGED = {
    "empty": "",
    "section": "{}",
    "cut": '{"schema": 2, "step": 5',
    "files-empty": json.dumps(
        {
            "schema": 2,
            "step": 5,
            "model_fingerprint": "0",
            "layout": {},
            "saved_at": 1.0,
            "versions": {},
            "files": {},
            "driver_state": {},
            "digests": {},
        }
    ),
    "of-nan": json.dumps(
        {
            "schema": 2,
            "step": 5,
            "model_fingerprint": "0",
            "layout": {},
            "saved_at": float("nan"),
            "versions": {},
            "files": {},
            "driver_state": {},
            "digests": {},
        }
    ),
}


def _additions() -> Iterator[tuple[str, Callable[[Path, Site], None]]]:
    for number, name in enumerate(_NAMES):
        yield f"user/{number:02}", partial(_put_user, name)
    for name in _NAMES[:4]:
        yield f"verl/{name}", partial(_put_verl, name)
        yield f"link-user/{name}", partial(_put_link, name, "user")
        yield f"link-checkpoint/{name}", partial(_put_link, name, "global_step_1")
        yield f"link-verl/{name}", partial(_put_link, name, "verl")
        yield f"link-nowhere/{name}", partial(_put_link, name, "nowhere")
        yield f"fifo/{name}", partial(_put_special, name, "fifo")
        yield f"file/{name}", partial(_put_file, name)
    for name in ("global_step_5", "global_step_5.incomplete"):
        for word, manifest in FORGED.items():
            yield f"forged-{word}/{name}", partial(_put_forged, name, manifest)
    for name in _FILES:
        yield f"file/{name}", partial(_put_file, name)
        for what in ("fifo", "link-secret", "link-dev-zero", "folder"):
            if name != "notes.txt":
                yield f"{what}/{name}", partial(_put_special, name, what)


ADDITIONS = dict(_additions())


# What may lie in a checkpoint of ours


def _in_ours(add: Callable[[Path, Site], None]) -> Callable[[Path, Site], None]:
    return lambda root, site: add(root / "global_step_1", site)


IN_OURS: dict[str, Callable[[Path, Site], None]] = {
    "notes": _in_ours(lambda ours, site: _put_file("theirs.txt", ours, site)),
    "folder": _in_ours(lambda ours, site: _user_files(ours)),
    "file-among-shards": _in_ours(lambda ours, site: _put_file("dist_ckpt/theirs.txt", ours, site)),
    "link-out": _in_ours(lambda ours, site: _put_link("theirs", "user", ours, site)),
    "link-among-shards": _in_ours(lambda ours, site: _put_link("dist_ckpt/theirs", "user", ours, site)),
    "fifo": _in_ours(lambda ours, site: _put_special("theirs", "fifo", ours, site)),
    "changed-shard": _in_ours(lambda ours, site: _append(ours / "dist_ckpt" / "__0_0.distcp")),
    "hole": _in_ours(lambda ours, site: _put_special("theirs", "hole-10tib", ours, site)),
}


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


# What a save of the next step may meet in its way


def _at(end: str, put: Callable[..., None], *arguments: str) -> Callable[[Path, Site], None]:
    return lambda root, site: put(f"global_step_{NEXT}{end}", *arguments, root, site)


AT_COMMIT: dict[str, Callable[[Path, Site], None]] = {
    f"{word}{end}": add
    for end in ("", ".incomplete", ".replaced.incomplete")
    for word, add in {
        "user": _at(end, _put_user),
        "verl": _at(end, _put_verl),
        "file": _at(end, _put_file),
        "fifo": _at(end, _put_special, "fifo"),
        "link-user": _at(end, _put_link, "user"),
        "link-checkpoint": _at(end, _put_link, "global_step_1"),
        "link-nowhere": _at(end, _put_link, "nowhere"),
        "empty-folder": _at(end, _put_empty_folder),
        "forged": _at(end, _put_forged, FORGED["files-empty"]),
    }.items()
}


def _locks() -> Iterator[Case]:
    name = "model.lock"

    def lock(word: str, put: Callable[[Path, Site], None], ours: tuple[str, ...] = ()) -> Case:
        return Case(
            name=f"folder/lock-{word}",
            make=lambda site: put(site.input / name, site),
            commands=(Command("lock", (name,)),),
            accepts=EITHER,
            ours=ours,
            may_read_outside=True,
        )

    for what in SPECIAL:
        # Where there is nothing, a lock of ours may come.
        yield lock(
            what,
            lambda path, site, what=what: replace(path, what, site),
            ours=(f"input/{name}",) if what == "missing" else (),
        )
    yield lock("user", lambda path, site: _write(path, "a user's file"))
    yield lock("user-json", lambda path, site: _write(path, '{"name": "a user\'s file"}'))
    yield lock("ours", lambda path, site: _write(path, '{"host": "here", "pid": 1}'), ours=(f"input/{name}",))
    yield lock("link-nowhere", lambda path, site: path.symlink_to(site.outside / "new"))
    yield lock("link-user", lambda path, site: (put_archive(site), path.symlink_to(site.outside / "archive/user"))[0])


def _write(path: Path, text: str) -> None:
    path.write_text(text)


# Temporary folders of runs


def _mark(**changes: object) -> str:
    dead = {"run_id": "feedbeef", "pid": 2**22 - 7, "created_at": 1.0, "namespace": process_namespace()}
    return " ".join(str(value) for value in {**dead, **changes}.values())


_ME = psutil.Process()
MARKS: dict[str, tuple[str, bool]] = {
    "dead": (_mark(), True),
    "reused-pid": (_mark(pid=1), True),
    "alive": (_mark(pid=_ME.pid, created_at=_ME.create_time()), False),
    "another-container": (_mark(namespace="another/4026531836"), False),
    "empty": ("", False),
    "one-word": ("feedbeef", False),
    "five-words": (f"{_mark()} more", False),
    "pid-digits": (_mark(pid=digits(MANY_DIGITS)), False),
    "pid-huge": (_mark(pid=10**30), False),
    "pid-negative": (_mark(pid=-1), False),
    "pid-text": (_mark(pid="x"), False),
    "created-nan": (_mark(created_at="nan"), True),
    "created-text": (_mark(created_at="x"), False),
    "surrogate": (_mark(run_id="\ud800"), False),
    "long": ("x" * 10**7, False),
}
"""By name: what the file says of its folder, and whether the folder may go."""


def _leftovers() -> Iterator[Case]:
    for word, (mark, may_go) in MARKS.items():
        yield _leftover(f"mark-{word}", partial(_put_marked, mark), may_go=may_go)
    for what in SPECIAL:
        yield _leftover(f"mark-file-{what}", partial(_put_special_mark, what))
    yield _leftover("link-to-archive", _link_archive)
    yield _leftover("mark-link-outside", _link_mark)
    yield _leftover("file-by-that-name", lambda folder, site: _write(folder, "a user's file"))
    yield _leftover("links-in-it", _put_links, may_go=True)
    yield _leftover("of-everybody", lambda folder, site: (_put_marked(_mark(), folder, site), folder.chmod(0o777))[0])
    if os.getuid() == 0:  # nobody else can give a file away
        yield _leftover(
            "of-another-user", lambda folder, site: (_put_marked(_mark(), folder, site), _give_away(folder))[0]
        )


def _leftover(word: str, put: Callable[[Path, Site], None], *, may_go: bool = False) -> Case:
    folder = f"{TEMP_PREFIX}abc"
    return Case(
        name=f"folder/leftover-{word}",
        make=lambda site: put(site.input / folder, site),
        commands=(Command("leftovers", (".",)),),
        accepts=EITHER,
        ours=(f"input/{folder}",) if may_go else (),
        may_read_outside=True,
    )


def _put_marked(mark: str, folder: Path, site: Site) -> None:
    _user_files(folder)
    folder.chmod(0o700)
    (folder / RUN_FILE).write_text(mark, errors="surrogatepass")


def _put_special_mark(what: str, folder: Path, site: Site) -> None:
    _user_files(folder)
    folder.chmod(0o700)
    replace(folder / RUN_FILE, what, site)


def _link_archive(folder: Path, site: Site) -> None:
    _put_marked(_mark(), site.outside / "archive", site)
    folder.symlink_to(site.outside / "archive")


def _link_mark(folder: Path, site: Site) -> None:
    _put_marked("", folder, site)
    (site.outside / "mark").write_text(_mark())
    (folder / RUN_FILE).unlink()
    (folder / RUN_FILE).symlink_to(site.outside / "mark")


def _put_links(folder: Path, site: Site) -> None:
    _put_marked(_mark(), folder, site)
    put_archive(site)
    (folder / "link").symlink_to(site.outside / "archive")


def _give_away(folder: Path) -> None:
    os.chown(folder, 12345, 12345)


def _grown() -> Iterator[Case]:
    puts: dict[str, Callable[[str, Path, Site], None]] = {
        "user": _put_user,
        "verl": _put_verl,
        "file": _put_file,
        "link-user": lambda name, root, site: _put_link(name, "user", root, site),
        "link-checkpoint": lambda name, root, site: _put_link(name, "global_step_1", root, site),
        "link-nowhere": lambda name, root, site: _put_link(name, "nowhere", root, site),
        "fifo": lambda name, root, site: _put_special(name, "fifo", root, site),
        "forged": lambda name, root, site: _put_forged(name, FORGED["files-empty"], root, site),
    }
    names = st.sampled_from((*_NAMES, *_FILES, f"global_step_{NEXT}", f"global_step_{NEXT}.incomplete"))
    places = st.dictionaries(names, st.sampled_from(sorted(puts)), min_size=1, max_size=5)
    folders = st.tuples(st.sampled_from(sorted(OPERATIONS)), places)
    for number, (operation, placed) in enumerate(grow(folders, 100, seed=41)):

        def add(root: Path, site: Site, placed: dict[str, str] = placed) -> None:
            for name, word in placed.items():
                puts[word](name, root, site)

        theirs = tuple(pattern for name, word in placed.items() for pattern in _all_of(name, word))
        yield _case(f"grown/{number:03}-{operation}", operation, add, theirs=theirs)
