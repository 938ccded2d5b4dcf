"""``megatron export`` in both directions, and an export that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.swift.jobs import BREAK, Forge, Job


def to_shards(forge: Forge, folder: Path, inputs: Path, **options: object) -> Job:
    model = str(inputs / "model")
    args = ("--model", model, "--to_mcore", "true", "--output_dir", str(folder / "shards"))
    return forge.export(folder, *args, **options)


@pytest.fixture(scope="module")
def exports(forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Job]:
    """An export to shards, and one of them back."""
    folder = tmp_path_factory.mktemp("exports")
    there = to_shards(forge, folder / "there", inputs).check()
    shards, back = str(there.folder / "shards"), folder / "back"
    args = ("--mcore_model", shards, "--to_hf", "true", "--output_dir", str(back / "hf"))
    return there, forge.export(back, *args).check()


def test_the_weights_come_back_to_the_last_bit(exports: tuple[Job, Job], inputs: Path) -> None:
    _, back = exports
    before = load_file(inputs / "model" / "model.safetensors")
    after = load_file(back.folder / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_export_is_a_phase_and_its_save_issues_no_collective(exports: tuple[Job, Job]) -> None:
    there, back = exports
    for rank in (0, 1):
        for job in (there, back):
            assert job.record(rank)["phases"] == {"world": 1, "groups": 1, "bootstrap": 1, "convert": 1, "teardown": 1}
        assert there.collectives_of_saves(rank) == [(0, 0)]


def test_an_export_names_its_own_place(exports: tuple[Job, Job]) -> None:
    shards = exports[0].folder / "shards"
    assert ".incomplete" not in (shards / "args.json").read_text()
    assert str(shards) in (shards / "args.json").read_text()
    assert (shards / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert not shards.with_name("shards.incomplete").exists()


@pytest.mark.every_case
def test_a_killed_export_is_done_again(forge: Forge, inputs: Path, tmp_path: Path) -> None:
    seconds = {"timeouts": {"convert": 20, "outside": 20, "teardown": 5}}
    first = to_shards(
        forge, tmp_path, inputs, plugins=[BREAK], env={"BREAK": "export:kill"}, settings=seconds, limit_s=80
    )
    assert first.statuses == [1, -9]
    assert "training rank 1" in first.log(0)
    assert not (tmp_path / "shards").exists()
    to_shards(forge, tmp_path, inputs).check()
    assert (tmp_path / "shards" / "latest_checkpointed_iteration.txt").is_file()
    assert not (tmp_path / "shards.incomplete").exists()
