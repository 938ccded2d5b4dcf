"""Two runs at the same time: each has folders of its own, or the second is refused by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders.claim import RUN_LOCK, claimed
from rl_safe_workers.driver.run import folders_of
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.recipe import load_recipe
from tests.integration.runs import RECIPES, SMALL, files_under, finish, rl_safe, running

STEPS = ("trainer.total_training_steps=2", "trainer.save_freq=2")
HOLD = """
import sys
from rl_safe_workers.checkpoint.folders.claim import claimed
from rl_safe_workers.driver.run import folders_of
from rl_safe_workers.recipe import load_recipe
with claimed(folders_of(load_recipe(sys.argv[1], sys.argv[2:]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def _folders(folder: Path, *overrides: str) -> dict[str, Path]:
    here = (f"trainer.output_dir={folder}/outputs", f"trainer.default_local_dir={folder}/checkpoints")
    return folders_of(load_recipe(RECIPES / "quickstart.yaml", [*here, *overrides]))


@pytest.mark.parametrize(
    ("checkpoints", "name", "shared"), [("checkpoints", "yours", "checkpoints"), ("elsewhere", "mine", "outputs/mine")]
)
def test_a_folder_that_another_run_holds_is_refused(tmp_path: Path, checkpoints: str, name: str, shared: str) -> None:
    second = (
        f"trainer.output_dir={tmp_path}/outputs",
        f"trainer.default_local_dir={tmp_path}/{checkpoints}",
        f"trainer.run_name={name}",
    )
    with claimed(_folders(tmp_path, "trainer.run_name=mine")):
        command = [sys.executable, "-c", HOLD, str(RECIPES / "quickstart.yaml"), *second]
        outcome = finish(command, tmp_path / "second")
    assert outcome.code == 1
    assert f"ConfigError: another run is in the way: process {os.getpid()} on " in outcome.last_error
    assert f"holds the folder {tmp_path / shared}" in outcome.last_error


def test_folders_are_free_again_after_a_run(tmp_path: Path) -> None:
    for _ in range(2):
        with claimed(_folders(tmp_path, "trainer.run_name=mine")):
            assert (tmp_path / "outputs/mine" / RUN_LOCK).exists()
        assert files_under(tmp_path) == {}


def test_a_run_that_saves_nothing_leaves_the_checkpoints_to_others(tmp_path: Path) -> None:
    with claimed(_folders(tmp_path, "trainer.run_name=a")), claimed(_folders(tmp_path, "trainer.save_freq=-1")):
        pass


def test_a_refusal_leaves_no_folder_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError), claimed({"first": tmp_path / "a/b", "second": tmp_path / "taken/c"}):
        pass
    assert files_under(tmp_path).keys() == {"taken"}


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "outputs").touch()
    with (
        pytest.raises(ConfigError, match=r"trainer.run_name: \S+ cannot be made: Not a directory"),
        claimed(_folders(tmp_path)),
    ):
        pass


@pytest.mark.every_case
def test_runs_with_checkpoints_apart_complete_and_one_in_a_taken_folder_is_refused(
    moe_model: Path, tmp_path: Path
) -> None:
    command = rl_safe("quickstart.yaml", f"model.path={moe_model}", *SMALL, *STEPS)
    lock = tmp_path / "a" / RUN_LOCK
    with (
        running([*command, "trainer.default_local_dir=a"], tmp_path) as first,
        running([*command, "trainer.default_local_dir=b"], tmp_path) as second,
    ):
        first.wait_until(lock.exists)
        refused = finish([*command, "trainer.default_local_dir=a"], tmp_path)
        outcomes = [first.finish(), second.finish()]
    assert [outcome.code for outcome in outcomes] == [0, 0], [outcome.err for outcome in outcomes]
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert refused.last_error.startswith(f"rl-safe: error: another run is in the way: process {first.process.pid} on ")
    assert f"{tmp_path}/a" in refused.last_error
    assert len(list((tmp_path / "outputs").iterdir())) == 2
    assert (tmp_path / "a/global_step_2/manifest.json").exists()
    assert (tmp_path / "b/global_step_2/manifest.json").exists()
    assert not lock.exists()
