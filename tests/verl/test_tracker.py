"""Which step verl's tracker file names while engines of one process save, together or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rl_safe_workers.adapters.verl.tracker import StepTracker
from rl_safe_workers.checkpoint.folders.step_tracker import TRACKER


def _nothing() -> None:
    return None


class Run:
    """A process with an actor and a critic."""

    def __init__(self, root: Path, *, actor: bool = True, critic: bool = True) -> None:
        self.root, self.tracker = root, StepTracker()
        self.tracker.add("critic", background=critic, is_critic=True)
        self.tracker.add("actor", background=actor, is_critic=False)

    def begin(self, engine: str, step: int) -> None:
        self.tracker.begin(engine, self.root / f"global_step_{step}", step)

    def saved(self, engine: str, step: int, then: Callable[[], None] = _nothing) -> str | None:
        """The step that the file names once an engine has saved one."""
        self.tracker.saved(engine, self.root / f"global_step_{step}", then)
        self.tracker.name(writes=True)
        return self.named()

    def named(self) -> str | None:
        file = self.root / TRACKER
        return file.read_text() if file.exists() else None


@pytest.mark.parametrize("order", [("actor", "critic"), ("critic", "actor")])
def test_a_step_is_named_once_both_have_saved_it(order, tmp_path) -> None:
    run = Run(tmp_path)
    for step in (1, 2):
        before = run.named()
        for engine in order:
            run.begin(engine, step)
        assert run.saved(order[0], step) == before
        assert run.saved(order[1], step) == str(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [TRACKER]


def test_a_step_that_is_saved_again_is_not_named_for_what_was_saved_first(tmp_path) -> None:
    run = Run(tmp_path)
    run.begin("actor", 5)
    assert run.saved("actor", 5) is None
    run.begin("actor", 5)
    run.begin("critic", 5)
    assert run.saved("critic", 5) is None
    assert run.saved("actor", 5) == "5"


def test_older_checkpoints_go_only_after_the_step_has_been_named(tmp_path) -> None:
    run = Run(tmp_path)
    seen: list[str | None] = []
    run.begin("actor", 3)
    run.begin("critic", 3)
    run.saved("actor", 3, lambda: seen.append(run.named()))
    assert seen == []
    run.saved("critic", 3, lambda: seen.append(run.named()))
    assert seen == ["3", "3"]


def test_a_rank_that_does_not_write_still_lets_older_checkpoints_go(tmp_path) -> None:
    run = Run(tmp_path)
    seen: list[str] = []
    for engine in ("actor", "critic"):
        run.begin(engine, 3)
        run.tracker.saved(engine, tmp_path / "global_step_3", lambda: seen.append("gone"))
    run.tracker.name(writes=False)
    assert seen == ["gone", "gone"]
    assert run.named() is None


@pytest.mark.parametrize(
    ("actor", "critic", "is_ours"),
    [(True, True, True), (True, False, True), (False, True, False), (False, False, False)],
)
def test_steps_are_ours_to_name_where_the_actors_save_goes_on_in_the_background(
    actor, critic, is_ours, tmp_path
) -> None:
    assert Run(tmp_path, actor=actor, critic=critic).tracker.is_ours == is_ours
