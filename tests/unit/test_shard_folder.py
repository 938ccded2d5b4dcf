"""A step saved again in a host's folder: what an earlier save wrote goes, nothing else, and through no link."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders.shard_folder import check_no_links, clear_shards
from tests.unit.foreign_folders import contents

OURS = ("__0_0.distcp", "__12_1.distcp", ".metadata", "metadata.json", "common.pt", ".metadata.tmp")
THEIRS = ("notes.txt", "__backup.distcp", "modelopt_state", "__0_0.distcp.bak")
INNER = Path("global_step_5", "actor", "model", "dist_ckpt")


def filled(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in (*OURS, *THEIRS):
        (folder / name).write_text(name)
    return folder


def test_shards_go_and_everything_else_stays(tmp_path: Path) -> None:
    folder = filled(tmp_path / INNER)
    clear_shards(folder, below=tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == sorted(THEIRS)


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    clear_shards(tmp_path / INNER, below=tmp_path)
    assert list((tmp_path / INNER).iterdir()) == []


@pytest.mark.parametrize("linked", [*INNER.parents[:-1], INNER], ids=lambda path: path.name)
def test_nothing_behind_a_link_is_removed(linked: Path, tmp_path: Path) -> None:
    folder, archive = filled(tmp_path / "root" / INNER), tmp_path / "archive"
    (tmp_path / "root" / linked).rename(archive)
    (tmp_path / "root" / linked).symlink_to(archive)
    before = contents(tmp_path)
    with pytest.raises(NotADirectoryError, match="is a link, so it is left alone; save elsewhere") as raised:
        clear_shards(folder, below=tmp_path / "root")
    assert raised.value.filename == str(tmp_path / "root" / linked)
    assert contents(tmp_path) == before


def test_a_shard_that_is_a_link_goes_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "shards").mkdir()
    for name in ("__0_0.distcp", "common.pt", "metadata.json"):
        (tmp_path / "shards" / name).symlink_to(tmp_path / "theirs")
    clear_shards(tmp_path / "shards", below=tmp_path)
    assert list((tmp_path / "shards").iterdir()) == []
    assert (tmp_path / "theirs").read_text() == "precious"


def test_a_link_above_what_the_host_has_made_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "big disk").mkdir()
    (tmp_path / "root").symlink_to("big disk")
    clear_shards(filled(tmp_path / "root" / INNER), below=tmp_path / "root")
    check_no_links(tmp_path / "root" / INNER, below=tmp_path / "root")
