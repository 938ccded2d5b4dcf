"""Input that cannot be right: one line, exit code 2, and nothing written."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, Manifest, model_fingerprint
from rl_safe_workers.topology.layout import ParallelLayout
from tests.integration.runs import RECIPES, Outcome, files_under, finish, rl_safe

BAD_INPUT = {
    "unknown key": (["trainer.sed=1"], "unknown key trainer.sed; the nearest known key is trainer.seed"),
    "sizes that do not factor": (["megatron.tensor_model_parallel_size=3"], "4 trainers do not divide by tensor 3"),
    "missing model": (["model.path=nowhere", "model.create=null"], "model.path=nowhere does not exist"),
    "unsupported model": (["model.path=gpt2"], "model.path=gpt2: "),
    "experts over EP": (["model.create.num_experts=6", "megatron.expert_model_parallel_size=4"], "6 experts"),
    "too few CPUs": (["cluster.cpus_per_trainer=4096"], "4 trainers x 4096 CPUs"),
    "missing reward": (["reward.function=nowhere:f"], "reward.function: importing 'nowhere'"),
    "missing data": (["data.train_files=[nowhere.parquet]"], "data.train_files has nowhere.parquet"),
    "run name of another folder": (["trainer.run_name=../../x"], "trainer.run_name cannot be '../../x'; it should"),
    "output below a file": (["trainer.output_dir=bad.parquet/x"], "bad.parquet exists and is not a folder"),
    "prompts that are too long": (["data.max_prompt_length=4"], "row 0: prompt has at least "),
    "a tag of YAML": (["model.path=!!python/object/apply:os.system [touch x]"], "a tag, which settings do not take"),
    "interpolation of another type": (["model.create=${oc.env:PATH}"], "model.create cannot be "),
    "malformed data": (["data.train_files=[bad.parquet]"], "bad.parquet cannot be read as parquet"),
}
"""Overrides, and what the message starts with or holds."""


def assert_refused(outcome: Outcome, message: str) -> None:
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("rl-safe: error: ")
    assert outcome.err.count("\n") == 1
    assert message in outcome.err
    assert outcome.left == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a model of another family and a file that is no parquet."""
    (tmp_path / "bad.parquet").write_text("data_source,prompt")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return tmp_path


@pytest.mark.parametrize("case", BAD_INPUT, ids=str)
def test_bad_input_is_refused_before_anything_is_written(folder: Path, case: str) -> None:
    overrides, message = BAD_INPUT[case]
    before = files_under(folder)
    assert_refused(finish(rl_safe("quickstart.yaml", *overrides), folder), message)
    assert files_under(folder) == before


def write_checkpoint(folder: Path, manifest: Manifest) -> None:
    path = folder / "checkpoints" / "quickstart" / "global_step_5" / MANIFEST
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(asdict(manifest)))
    (path.parent / "dist_ckpt").mkdir()
    (path.parent / "dist_ckpt" / "__0_0.distcp").write_text("shard")


def manifest_for(model: Path) -> Manifest:
    layout = ParallelLayout(world_size=4, tensor=1, pipeline=1, expert=2, expert_tensor=1, context=1)
    return Manifest(
        step=5,
        model_fingerprint=model_fingerprint(model),
        layout=asdict(layout),
        saved_at=0.0,
        versions={},
        files={"dist_ckpt/__0_0.distcp": {"bytes": 5, "digest": "crc32:0"}},
        driver_state={"data": {"epoch": 0, "position": 0, "num_prompts": 512}},
        digests={},
    )


def test_a_checkpoint_of_another_model_is_refused(folder: Path, moe_model: Path) -> None:
    write_checkpoint(folder, replace(manifest_for(moe_model), model_fingerprint="0" * 16))
    before = files_under(folder)
    command = rl_safe("quickstart.yaml", f"model.path={moe_model}", "trainer.resume_mode=auto")
    assert_refused(finish(command, folder), "is a checkpoint of another model (fingerprint 0000000000000000")
    assert files_under(folder) == before


@pytest.mark.parametrize("name", ["global_step_20", "global_step_20.incomplete"])
def test_a_step_that_is_somebody_elses_is_refused(folder: Path, moe_model: Path, name: str) -> None:
    theirs = folder / "checkpoints" / "quickstart" / name / "actor"
    theirs.mkdir(parents=True)
    (theirs / "weights").write_text("precious")
    before = files_under(folder)
    command = rl_safe("quickstart.yaml", f"model.path={moe_model}", "trainer.save_freq=10")
    assert_refused(finish(command, folder), f"quickstart/{name} ")
    assert files_under(folder) == before


def test_a_recipe_that_does_not_exist_is_refused(folder: Path) -> None:
    assert_refused(finish(rl_safe(RECIPES / "nope.yaml"), folder), "nope.yaml")


def test_a_run_folder_that_is_in_use_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (folder := tmp_path / "outputs" / "mine").mkdir(parents=True)
    (tmp_path / "precious.yaml").write_text("precious")
    (folder / "config.yaml").symlink_to("../../precious.yaml")
    outcome = finish(rl_safe("quickstart.yaml", "trainer.run_name=mine"), tmp_path)
    assert outcome.code == 2
    refusal = "trainer.run_name: the folder outputs/mine is in use, it holds config.yaml; choose another name"
    assert outcome.err == f"rl-safe: error: {refusal}\n"
    assert (tmp_path / "precious.yaml").read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"outputs", "precious.yaml"}
