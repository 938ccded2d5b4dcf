"""Before a run starts: every step that it will save finds its place free, or the run is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_safe_workers.config import ResumeMode, RunConfig
from rl_safe_workers.driver.resume import check_save_places, find_resume_point
from rl_safe_workers.errors import ConfigError
from tests.unit.bad_manifests import POSITION, rewritten
from tests.unit.foreign_folders import FOREIGN, TRACKERS, contents, of_verl
from tests.unit.saves import saved


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


def config_of(root: Path, *, save_freq: int = 4, total: int = 10, resumes: bool = False) -> RunConfig:
    """Saves steps 4, 8 and 10."""
    config = RunConfig()
    config.model.path, config.trainer.default_local_dir = "no model", str(root)
    config.trainer.save_freq, config.trainer.total_training_steps = save_freq, total
    config.trainer.resume_mode = ResumeMode.auto if resumes else ResumeMode.disable
    return config


def check(config: RunConfig) -> None:
    check_save_places(config.trainer, find_resume_point(config.trainer, Path(config.model.path)))


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", ["global_step_8", "global_step_8.incomplete", "global_step_10"])
def test_a_run_that_would_meet_what_is_not_ours_is_refused(name: str, kind: str, root: Path) -> None:
    FOREIGN[kind](root / name)
    before = contents(root.parent)
    with pytest.raises(ConfigError) as raised:
        check(config_of(root))
    assert str(raised.value).startswith(f"{root / name} ")
    assert str(raised.value).endswith("it is left alone; move it away, or set trainer.default_local_dir elsewhere")
    assert contents(root.parent) == before


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_tracker_that_is_not_ours_is_refused(kind: str, root: Path) -> None:
    TRACKERS[kind](root / "latest_checkpointed_iteration.txt")
    with pytest.raises(ConfigError, match=r"latest_checkpointed_iteration\.txt is no file with the number of a step"):
        check(config_of(root))


@pytest.mark.parametrize("step", [0, 3, 9, 12])
def test_a_step_that_is_not_saved_may_be_anybodys(step: int, root: Path) -> None:
    of_verl(root / f"global_step_{step}")
    check(config_of(root))


def test_a_run_that_saves_nothing_looks_at_nothing(root: Path) -> None:
    of_verl(root / "global_step_8")
    check(config_of(root, save_freq=-1))


def test_checkpoints_of_ours_may_give_way(root: Path) -> None:
    for step in (4, 8, 10):
        saved(root, step)
    check(config_of(root))
    check(config_of(root.parent / "not there yet"))


def test_steps_before_the_resume_point_may_be_anybodys(root: Path) -> None:
    of_verl(root / "global_step_4")
    rewritten(saved(root, 8), driver_state={"data": POSITION})
    with pytest.raises(ConfigError, match="global_step_4 has no manifest"):
        check(config_of(root))
    check(config_of(root, resumes=True))


def test_a_place_that_is_no_folder_is_refused(root: Path) -> None:
    (root / "file").write_text("mine")
    with pytest.raises(ConfigError, match="file is not a directory: choose another place"):
        check(config_of(root / "file"))


def test_a_billion_steps_are_checked_at_once(root: Path) -> None:
    of_verl(root / "global_step_999999999")
    with pytest.raises(ConfigError, match="global_step_999999999 has no manifest"):
        check(config_of(root, save_freq=1, total=10**9))
