"""Ranks that come late, saves in the background, and settings that cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.swift.jobs import BREAK, Forge

EP2 = ("--expert_model_parallel_size", "2")


@pytest.mark.every_case
def test_a_rank_twice_the_deadline_late_is_named(forge: Forge, inputs: Path, tmp_path: Path) -> None:
    job = forge.train(
        tmp_path,
        inputs,
        *EP2,
        plugins=[BREAK],
        env={"BREAK": "before:hang", "BREAK_S": "30"},
        settings={"timeouts": {"convert": 15, "teardown": 5}},
    )
    assert job.statuses == [1, 1]
    assert re.search(r"phase convert: rank 1 of training world did not arrive within 1\d\.\d s", job.log(0))
    assert "raise timeouts.convert in RL_SAFE_SWIFT" in job.log(0)


def test_a_save_in_the_background_is_named_when_it_is_complete(forge: Forge, inputs: Path, tmp_path: Path) -> None:
    own = forge.train(tmp_path / "own", inputs, *EP2, "--async_save", "true").check()
    for step in (2, 4):
        folder = own.output / f"checkpoint-{step}"
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(step)
        assert (folder / f"iter_000000{step}" / "metadata.json").is_file()
    assert own.collectives_of_saves(0) == [(0, 0)] * 2
    checkpoint = str(own.output / "checkpoint-2")
    resumed = forge.train(tmp_path / "resumed", inputs, *EP2, "--mcore_model", checkpoint, "--finetune", "false")
    assert resumed.check().losses == own.losses[2:]


@pytest.mark.every_case
def test_lora_and_a_plugin_of_the_users_pass_through(forge: Forge, inputs: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin" / "users_plugin.py"
    plugin.parent.mkdir()
    plugin.write_text("import pathlib, os\npathlib.Path('imported' + os.environ['RANK']).touch()\n")
    lora = ("--tuner_type", "lora", "--target_modules", "all-linear", "--lora_rank", "4")
    jobs = [
        forge.train(tmp_path / name, inputs, *EP2, *lora, ours=ours, plugins=[plugin]).check()
        for name, ours in (("own", True), ("stock", False))
    ]
    assert jobs[0].losses == jobs[1].losses
    assert jobs[0].collectives_of_saves(0) == [(0, 0)] * 2
    assert (jobs[0].folder / "imported1").exists()


@pytest.mark.every_case
def test_a_dense_model_passes_through(forge: Forge, dense: Path, tmp_path: Path) -> None:
    jobs = [
        forge.train(tmp_path / name, dense, "--model_type", "qwen3", ours=ours).check()
        for name, ours in (("own", True), ("stock", False))
    ]
    assert jobs[0].losses == jobs[1].losses
    assert jobs[0].record(0)["phases"]["save"] == 2


def test_an_unknown_key_is_refused_before_any_group(forge: Forge, inputs: Path, tmp_path: Path) -> None:
    job = forge.train(tmp_path, inputs, *EP2, settings={"timeouts": {"sav": 600}})
    assert job.statuses == [1, 1]
    last = [line for line in job.log(0).splitlines() if line][-1]
    assert last.startswith("rl_safe_workers.errors.ConfigError: unknown key RL_SAFE_SWIFT.timeouts.sav;")


def test_what_is_not_supported_yet_is_refused_by_name(forge: Forge, inputs: Path, tmp_path: Path) -> None:
    args = [
        "--rlhf_type",
        "gkd",
        "--teacher_model",
        str(inputs / "model"),
        "--model",
        str(inputs / "model"),
        "--dataset",
        str(inputs / "data.jsonl"),
    ]
    job = forge.run(tmp_path, "rlhf", [*args, *EP2, "--vllm_mode", "colocate", "--use_vllm", "true"])
    assert job.statuses == [1, 1]
    assert "ConfigError: --rlhf_type gkd is not supported yet" in job.log(0)
