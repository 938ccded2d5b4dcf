"""The harness sees each kind of harm: here commands do what no input may make them do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile import misdeeds, table
from tests.hostile.canary import Watch
from tests.hostile.case import EITHER, Case, Command, Site
from tests.hostile.client import Warm
from tests.hostile.grow import edited, edits, grow, values
from tests.hostile.judge import verdict
from tests.hostile.snapshot import changes, snapshot
from tests.hostile.warm import KILL_AFTER_S, Outcome

ERROR = "rl-safe: error: x is wrong; change it\n"


@pytest.fixture
def site(folder: Path) -> Site:
    found = Site(folder)
    found.make()
    return found


@pytest.mark.parametrize("misdeed", misdeeds.MISDEEDS)
def test_a_misdeed_is_seen(misdeed: str, warm: Warm, site: Site) -> None:
    command = Command("misdeed", (misdeed,))
    before = snapshot(site.root)
    outcome = warm.run(command, site)
    case = Case(name="harness/misdeed", make=lambda site: None, commands=(command,), accepts=EITHER)
    good = warm.run(Command("misdeed", ("nothing",)), site)
    found = [*verdict(case, command, outcome, good=good), *changes(before, snapshot(site.root))]
    assert any(misdeeds.MISDEEDS[misdeed] in text for text in found), (found, outcome)


_ON_FILES = [
    misdeed
    for misdeed, complaint in misdeeds.MISDEEDS.items()
    if complaint.startswith(("touched", "added", "removed", "printed", "ran"))
]


@pytest.mark.parametrize("misdeed", _ON_FILES)
def test_leave_to_read_outside_excuses_nothing_but_reading(misdeed: str, warm: Warm, site: Site) -> None:
    command = Command("misdeed", (misdeed,))
    before = snapshot(site.root)
    outcome = warm.run(command, site)
    case = Case(
        name="harness/reader", make=lambda site: None, commands=(command,), accepts=EITHER, may_read_outside=True
    )
    found = [*verdict(case, command, outcome, good=outcome), *changes(before, snapshot(site.root))]
    complaint = misdeeds.MISDEEDS[misdeed]
    assert any(complaint in text for text in found) is (": read " not in complaint), (found, outcome)


def test_a_change_is_noticed_after_much_reading(tmp_path: Path) -> None:
    files = [tmp_path / f"file_{number}" for number in range(100)]
    for file in files:
        file.touch()
    watch = Watch(tmp_path)
    for file in files:
        file.read_bytes()
    files[7].write_text("x")
    read, changed = watch.close()
    assert f"read {tmp_path.name}/file_0" in read
    assert changed == [f"wrote {tmp_path.name}/file_7"]


@pytest.mark.parametrize("deed", misdeeds.GOOD_DEEDS)
def test_what_is_right_is_not_blamed(deed: str, warm: Warm, site: Site) -> None:
    command = Command("misdeed", (deed,))
    before = snapshot(site.root)
    outcome = warm.run(command, site)
    case = Case(name="harness/deed", make=lambda site: None, commands=(command,), accepts=EITHER)
    assert verdict(case, command, outcome, good=outcome) == []
    assert changes(before, snapshot(site.root)) == []


def test_a_child_that_hangs_is_killed_in_time(warm: Warm, site: Site) -> None:
    outcome = warm.run(Command("misdeed", ("blocks",)), site)
    assert outcome.died == "time"
    assert KILL_AFTER_S <= outcome.seconds < KILL_AFTER_S + 4


ENDINGS: dict[str, tuple[Outcome, Callable[[str], bool]]] = {
    "an error of ours": (Outcome(code=2, err=ERROR), lambda found: found == ""),
    "logs before it": (Outcome(code=1, err="2026 WARNING x\n" + ERROR), lambda found: found == ""),
    "two errors": (Outcome(code=2, err=ERROR * 2), lambda found: "one line of ours" in found),
    "something after it": (Outcome(code=2, err=ERROR + "more\n"), lambda found: "one line of ours" in found),
    "no error": (Outcome(code=2), lambda found: "one line of ours" in found),
    "another exit code": (Outcome(code=9, err=ERROR), lambda found: "exit code 9" in found),
    "a long error": (Outcome(code=2, err=ERROR.strip() + "x" * 30_000), lambda found: "characters" in found),
    "a terminal's command": (Outcome(code=2, err=ERROR.replace("x", "\x1b[2J")), lambda found: "control" in found),
    "accepted": (Outcome(code=0), lambda found: "accepted" in found),
    "slow": (Outcome(code=2, err=ERROR, seconds=6.0), lambda found: "slow" in found),
    "large": (Outcome(code=2, err=ERROR, peak_bytes=2**31), lambda found: "memory" in found),
    "left processes": (Outcome(code=2, err=ERROR, left=1), lambda found: "left 1" in found),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ending_is_judged_by_its_parts(ending: str) -> None:
    outcome, is_right = ENDINGS[ending]
    case = Case(name="harness/ending", make=lambda site: None, commands=())
    found = verdict(case, Command("index"), outcome, good=Outcome(code=0, peak_bytes=2**20))
    assert is_right("; ".join(found)), found


AUDITS = {
    "DAMAGED: 2 problems": (Outcome(code=1, out="file: x\nDAMAGED: 2 problems\n"), (), True),
    "no verdict": (Outcome(code=1, out="file: x\n"), (), False),
    "json": (Outcome(code=1, out=json.dumps({"ok": False})), ("--json",), True),
    "json that says ok": (Outcome(code=1, out=json.dumps({"ok": True})), ("--json",), False),
    "json with NaN": (Outcome(code=1, out='{"ok": false, "a": NaN}'), ("--json",), False),
}


@pytest.mark.parametrize("report", AUDITS)
def test_a_report_of_damage_needs_a_verdict(report: str) -> None:
    outcome, options, is_right = AUDITS[report]
    case = Case(name="harness/audit", make=lambda site: None, commands=())
    found = verdict(case, Command("audit", ("x", *options)), outcome, good=Outcome(code=0))
    assert (found == []) is is_right, found


def test_the_same_seed_grows_the_same_inputs() -> None:
    assert grow(values(), 50, seed=7) == grow(values(), 50, seed=7)
    assert grow(edits(), 50, seed=7) != grow(edits(), 50, seed=8)
    assert len(grow(values(), 50, seed=7)) == 50


def test_edits_always_change_a_file() -> None:
    for data in (b"", b"x", bytes(1000)):
        assert all(edited(data, todo) != data for todo in grow(edits(), 100, seed=9))


def test_a_change_of_files_is_named(tmp_path: Path) -> None:
    for name in ("ours", "theirs", "gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    before = snapshot(tmp_path)
    (tmp_path / "ours" / "file").write_text("new")
    (tmp_path / "theirs" / "file").write_text("other")
    (tmp_path / "gone" / "file").unlink()
    (tmp_path / "link").symlink_to("theirs")
    assert changes(before, snapshot(tmp_path), ours=("ours",)) == [
        "removed gone/file",
        "added link",
        "changed theirs/file",
    ]
    assert "changed ours/file" in changes(before, snapshot(tmp_path), ours=("ours",), theirs=("ours/f*",))


def test_the_table_counts_inputs_and_names_the_failing() -> None:
    results = [
        table.result("recipe/a", "plan", refusal="ConfigError", seconds=0.5, extra_bytes=2**20, failures=[]),
        table.result("recipe/b", "plan", refusal=None, seconds=8.0, extra_bytes=0, failures=["blocked: killed"]),
        table.result("recipe/b", "recipe", refusal=None, seconds=0.1, extra_bytes=0, failures=[]),
    ]
    head, row, whole, *rest = table.lines(results)
    assert head.split()[:3] == ["kind", "inputs", "runs"]
    assert row.split() == ["recipe", "2", "3", "1", "1", "8.0", "1", "0", "1", "0", "0", "1"]
    assert whole.split()[1:] == row.split()[1:]
    assert "refused by: ConfigError 1" in rest
    assert "  recipe/b" in rest
