"""Manifests that no save has written: each is passed over with a warning, and the good ones beside it count."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.checkpoint.audit import audit
from rl_safe_workers.checkpoint.folders import manifest_facts
from rl_safe_workers.checkpoint.folders.conversion_folder import own_hf_files
from rl_safe_workers.checkpoint.folders.manifest import (
    MANIFEST,
    SHARDS,
    UNTRACKED_SERIALS,
    complete_checkpoints,
    find_checkpoints,
    last_serial,
    read_manifest,
)
from rl_safe_workers.checkpoint.folders.manifest_facts import MAX_SERIAL, read_manifest_facts
from rl_safe_workers.checkpoint.folders.ownership import why_foreign
from rl_safe_workers.checkpoint.folders.retention import commit, prune
from rl_safe_workers.checkpoint.folders.step_tracker import TRACKER
from rl_safe_workers.config import ResumeMode, TrainerConfig
from rl_safe_workers.driver.resume import data_position, find_resume_point
from rl_safe_workers.errors import CheckpointError
from tests.unit.bad_manifests import HOSTILE, POSITION, RECORD, rewritten
from tests.unit.saves import saved, written


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three good checkpoints with a data position, of steps 10, 20 and 30."""
    for step in (10, 20, 30):
        rewritten(saved(tmp_path / "root", step), driver_state={"data": POSITION})
    return tmp_path / "root"


def resumed_step(root: Path) -> int:
    trainer = TrainerConfig(default_local_dir=str(root), resume_mode=ResumeMode.auto)
    point = find_resume_point(trainer, Path("no model"))
    assert point is not None
    return point.manifest.step


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_is_passed_over_with_one_line(
    kind: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    HOSTILE[kind](root / "global_step_30")
    assert resumed_step(root) == 20
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("passed over: ")
    assert "global_step_30" in warning
    assert warning.isprintable()
    assert len(warning) < 600


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_makes_pruning_remove_no_good_checkpoint(kind: str, root: Path) -> None:
    HOSTILE[kind](root / "global_step_30")
    listing = sorted((root / "global_step_30").rglob("*"))
    assert prune(root, keep_last=2) == []
    saved(root, 40)
    assert [path.name for path in prune(root, keep_last=2)] == ["global_step_10"]
    assert sorted((root / "global_step_30").rglob("*")) == listing


@pytest.mark.parametrize("kind", sorted(HOSTILE.keys() - {"step of another folder", "a link to itself", "a FIFO"}))
def test_an_audit_finds_a_hostile_manifest(kind: str, root: Path) -> None:
    path = root / "global_step_30"
    HOSTILE[kind](path)
    (path / SHARDS / ".metadata").write_bytes(b"")
    if kind != "a folder":  # then it has none
        assert audit(path).counts["manifest"] == 1


@pytest.mark.parametrize("field", ["step", "saved_at"])
@pytest.mark.parametrize("value", [-1, 10**12 + 1, 1e999, -1e999])
def test_a_manifest_out_of_range_is_refused_wherever_it_lies(field: str, value: float, root: Path) -> None:
    """Also in a folder of another name than a step's, as the audit and a conversion read one."""
    path = (root / "global_step_20").rename(root / "copied")
    text = (path / MANIFEST).read_text()
    old = json.loads(text)[field]
    number = str(value).replace("inf", "1e999")
    (path / MANIFEST).write_text(text.replace(f'"{field}": {old}', f'"{field}": {number}'))
    with pytest.raises(CheckpointError, match=f"is malformed: {field}: Input should be"):
        read_manifest_facts(path)


@pytest.fixture
def nest(tmp_path: Path) -> Iterator[Callable[[Path, int], None]]:
    """Makes folders inside each other, and removes them, since pytest cannot."""

    def make(top: Path, count: int) -> None:
        here = os.open(top, os.O_RDONLY)
        for _ in range(count):
            os.mkdir("d", dir_fd=here)
            above, here = here, os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(above)
        os.close(here)

    yield make
    subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


@pytest.mark.parametrize("count", [40, 1400, 3000])
def test_a_checkpoint_of_folders_without_end_is_passed_over(
    count: int, root: Path, nest: Callable[[Path, int], None]
) -> None:
    nest(root / "global_step_20" / SHARDS, count)
    found = find_checkpoints(root)
    assert [manifest.step for _, manifest in found.complete] == [30, 10]
    assert [str(error).partition(str(root))[2] for error in found.damaged] == [
        "/global_step_20 cannot be read: more than 32 folders inside each other"
    ]
    assert why_foreign(root / "global_step_20") == "cannot be read (more than 32 folders inside each other)"
    hf_files = root / "global_step_30" / "huggingface"
    hf_files.mkdir()
    (hf_files / "config.json").write_text("{}")
    nest(hf_files, count)
    with pytest.raises(CheckpointError, match="cannot be read: more than 32 folders"):
        own_hf_files(hf_files.parent)


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("serial", [10**6 + 1, MAX_SERIAL])
def test_a_forged_serial_hides_no_good_checkpoint_and_has_none_removed(
    serial: int, is_damaged: bool, root: Path
) -> None:
    forged = rewritten(root / "global_step_10", serial=serial, saved_at=4e9)
    if is_damaged:
        next((forged / "dist_ckpt").iterdir()).unlink()
    assert resumed_step(root) == 30
    assert last_serial(root) == 3
    for step, removed in ((40, []), (50, ["global_step_20"]), (60, ["global_step_30"])):
        path = rewritten(saved(root, step), driver_state={"data": POSITION})
        assert [one.name for one in prune(root, keep_last=3, but=path)] == removed
    assert read_manifest(path).serial == 6
    assert resumed_step(root) == 60
    assert forged.exists()


def test_a_forged_serial_in_a_folder_without_a_tracker_is_older_from_the_next_save_on(root: Path) -> None:
    (root / TRACKER).unlink()
    rewritten(root / "global_step_10", serial=UNTRACKED_SERIALS, saved_at=4e9)
    rewritten(root / "global_step_20", serial=MAX_SERIAL, saved_at=4e9)
    assert resumed_step(root) == 10
    path = rewritten(saved(root, 40), driver_state={"data": POSITION})
    assert read_manifest(path).serial == UNTRACKED_SERIALS + 1
    assert resumed_step(root) == 40


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0, -1e9])
def test_a_clock_that_jumps_does_not_change_what_is_pruned(jump_s: float, tmp_path: Path) -> None:
    for step in (10, 20):
        saved(tmp_path, step, at=2e9)
    for step in (30, 40):
        path = saved(tmp_path, step, at=2e9 + jump_s)
        prune(tmp_path, keep_last=2, but=path)
    assert [path.name for path, _ in complete_checkpoints(tmp_path)] == ["global_step_40", "global_step_30"]


def test_a_run_that_went_back_outlives_the_higher_steps_of_before(tmp_path: Path) -> None:
    for step in (10, 20):
        saved(tmp_path, step)
    saved(tmp_path, 12)
    assert [path.name for path in prune(tmp_path, keep_last=1)] == ["global_step_20", "global_step_10"]


def of_schema_2(path: Path, **changes: Any) -> Path:
    fields = json.loads((path / MANIFEST).read_text())
    del fields["serial"]
    (path / MANIFEST).write_text(json.dumps({**fields, "schema": 2, **changes}))
    return path


def test_checkpoints_of_schema_2_load_and_are_older_than_new_ones(tmp_path: Path) -> None:
    of_schema_2(saved(tmp_path, 10), saved_at=3e9)
    of_schema_2(saved(tmp_path, 20), saved_at=2e9)
    assert read_manifest(tmp_path / "global_step_10").schema == 2
    assert last_serial(tmp_path) == 0
    saved(tmp_path, 15)
    found = [(path.name, manifest.serial) for path, manifest in complete_checkpoints(tmp_path)]
    assert found == [("global_step_15", 1), ("global_step_10", 0), ("global_step_20", 0)]


POSITIONS: dict[str, Any] = {
    "none": None,
    "a list": [0, 0, 8],
    "no epoch": {"position": 0, "num_prompts": 8},
    "negative": {**POSITION, "position": -1},
    "negative epoch": {**POSITION, "epoch": -1},
    "beyond the end": {**POSITION, "position": 9},
    "absurd": {**POSITION, "epoch": 2**80},
    "a fraction": {**POSITION, "position": 1.5},
    "a text": {**POSITION, "position": "1"},
    "a boolean": {**POSITION, "position": True},
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_a_checkpoint_without_a_sane_data_position_is_passed_over(kind: str, root: Path, caplog) -> None:
    path = rewritten(root / "global_step_30", driver_state={"data": POSITIONS[kind]})
    assert resumed_step(root) == 20
    assert "global_step_30 has no usable data position" in caplog.text
    trainer = TrainerConfig(resume_mode=ResumeMode.resume_path, resume_from_path=str(path))
    point = find_resume_point(trainer, Path("no model"))
    assert point is not None
    with pytest.raises(CheckpointError, match="global_step_30 has no usable data position"):
        data_position(point)


def test_a_folder_of_hostile_manifests_alone_is_refused(root: Path) -> None:
    for step in (10, 20, 30):
        rewritten(root / f"global_step_{step}", step=None)
    with pytest.raises(CheckpointError, match="is damaged; to start over set trainer.resume_mode=disable"):
        resumed_step(root)


@pytest.mark.parametrize("name", ["global_step_٣٠", "global_step_030", "global_step_30\n", f"global_step_{'9' * 200}"])
def test_a_name_that_no_save_gives_is_no_checkpoint(name: str, root: Path) -> None:
    (root / "global_step_30").rename(root / name)
    assert resumed_step(root) == 20
    assert len(find_checkpoints(root).damaged) == ("9" in name)


def test_a_manifest_of_more_files_than_any_run_writes_is_refused_before_they_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_facts, "MAX_FILES", 3)
    files = {f"{SHARDS}/__{rank}_0.distcp": "no record" for rank in range(4)}
    (tmp_path / MANIFEST).write_text(json.dumps({"schema": 3, "files": files}))
    with pytest.raises(CheckpointError, match=r"is malformed: files has more than 3 entries; use another"):
        read_manifest_facts(tmp_path)


@pytest.mark.parametrize("wrong", [0, 999, 1_000, 2_499])
def test_every_entry_of_a_long_manifest_is_checked(wrong: int, root: Path) -> None:
    path = root / "global_step_20" / MANIFEST
    fields = json.loads(path.read_text())
    files = {f"{SHARDS}/__{rank}_0.distcp": dict(RECORD) for rank in range(2_500)}
    path.write_text(json.dumps({**fields, "files": files}))
    assert len(read_manifest_facts(path.parent).files) == 2_500
    files[f"{SHARDS}/__{wrong}_0.distcp"]["bytes"] = -1
    path.write_text(json.dumps({**fields, "files": files}))
    with pytest.raises(CheckpointError, match=rf"files.*__{wrong}_0.distcp.bytes: Input should be greater"):
        read_manifest_facts(path.parent)


def test_a_manifest_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    from dataclasses import replace

    pending, manifest = written(tmp_path, 20)
    with pytest.raises(CheckpointError, match="manifest.json is malformed: layout.tensor"):
        commit(pending, replace(manifest, layout={"tensor": -1}))
    assert not (pending / MANIFEST).exists()
