"""``rl-safe convert``: there and back as a user does it, with nothing left, and refusals before anything starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS, read_manifest
from tests.integration.runs import Outcome, files_under, finish

EP2 = "megatron.expert_model_parallel_size=2"
TP2 = "megatron.tensor_model_parallel_size=2"


def convert(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "rl_safe_workers", "convert", *map(str, arguments)]


@pytest.fixture(scope="module")
def folder(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which the model has been converted under EP2."""
    folder = tmp_path_factory.mktemp("convert")
    outcome = finish(convert("--hf", moe_model, "--out", "megatron", EP2), folder)
    assert outcome.code == 0, outcome.err
    assert outcome.left == []
    assert outcome.out.splitlines()[-1].endswith(f"to {folder / 'megatron'} in float32")
    return folder


def assert_refused(outcome: Outcome, code: int, message: str) -> None:
    assert outcome.code == code, outcome.err
    assert message in outcome.last_error
    assert outcome.left == []


def test_a_conversion_is_complete_and_nothing_else_is_written(folder: Path) -> None:
    manifest = read_manifest(folder / "megatron")
    assert manifest.layout["world_size"] == manifest.layout["expert"] == 2
    assert f"{SHARDS}/metadata.json" in manifest.files
    assert [path.name for path in folder.iterdir()] == ["megatron"]


def test_the_way_back_under_another_layout_gives_the_same_weights(
    folder: Path, moe_model: Path, tmp_path: Path
) -> None:
    outcome = finish(convert("--megatron", folder / "megatron", "--hf-out", "hf", TP2), tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.left == []
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert same_weights(moe_model, tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (moe_model / "tokenizer.json").read_bytes()


def same_weights(first: Path, second: Path) -> bool:
    code = (
        "import sys, torch; from safetensors.torch import load_file as load;"
        "a, b = (load(f'{path}/model.safetensors') for path in sys.argv[1:]);"
        "assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)"
    )
    return subprocess.run([sys.executable, "-c", code, str(first), str(second)], check=False).returncode == 0


def test_a_complete_conversion_starts_nothing(folder: Path, moe_model: Path) -> None:
    before = files_under(folder)
    outcome = finish(convert("--hf", moe_model, "--out", "megatron", TP2), folder)
    assert outcome.code == 0
    assert "is a complete conversion of" in outcome.out
    assert files_under(folder) == before


@pytest.fixture
def another(moe_model: Path, tmp_path: Path) -> Path:
    """The same model with one setting changed."""
    path = tmp_path / "another"
    shutil.copytree(moe_model, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    return path


def test_a_conversion_of_another_model_is_refused(folder: Path, another: Path) -> None:
    before = files_under(folder)
    outcome = finish(convert("--hf", another, "--out", "megatron"), folder)
    assert_refused(outcome, 2, "is a conversion of another model (fingerprint ")
    assert files_under(folder) == before


def test_a_checkpoint_of_another_model_is_not_exported(folder: Path, another: Path) -> None:
    outcome = finish(convert("--megatron", "megatron", "--hf-out", "hf", f"model.path={another}"), folder)
    assert_refused(outcome, 2, "megatron is a checkpoint of another model (fingerprint ")


def test_a_truncated_checkpoint_is_not_exported(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "megatron", tmp_path / "torn")
    file = next((tmp_path / "torn" / SHARDS).glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert_refused(finish(convert("--megatron", "torn", "--hf-out", "hf"), tmp_path), 1, "torn is damaged: ")


BAD = {
    "no source": (["--out", "x"], "one of the arguments --hf --megatron is required"),
    "options that do not go together": (["--hf", ".", "--hf-out", "x"], "--hf goes with --out"),
    "unknown key": (["--hf", ".", "--out", "x", "megatron.tensor=2"], "unknown key megatron.tensor"),
    "no model": (["--hf", "nowhere", "--out", "x"], "model.path=nowhere does not exist"),
    "no checkpoint": (["--megatron", "nowhere", "--hf-out", "x"], f"not a complete checkpoint: it has no {MANIFEST}"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    arguments, message = BAD[case]
    outcome = finish(convert(*arguments), tmp_path)
    assert outcome.code == (1 if case == "no checkpoint" else 2)
    assert message in outcome.last_error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.incomplete", "x.incomplete is no work in progress of ours: it is left alone"),
        ("x.lock", "x.lock cannot be locked: it is no lock of ours"),
        ("x", "x has no manifest.json of ours: choose another place, or overwrite it"),
    ],
)
def test_a_place_that_is_somebody_elses_is_refused(name: str, message: str, moe_model: Path, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("precious")
    before = files_under(tmp_path)
    assert_refused(finish(convert("--hf", moe_model, "--out", "x"), tmp_path), 2, message)
    assert files_under(tmp_path) == before


def test_a_dtype_that_cannot_be_converted_is_refused(moe_model: Path, tmp_path: Path) -> None:
    outcome = finish(convert("--hf", moe_model, "--out", "x", "model.dtype=int8"), tmp_path)
    assert_refused(outcome, 2, "model.dtype cannot be 'int8'; it should be 'float32' or 'bfloat16'")


def test_experts_that_do_not_divide_are_refused(moe_model: Path, tmp_path: Path) -> None:
    outcome = finish(convert("--hf", moe_model, "--out", "x", "megatron.expert_model_parallel_size=3"), tmp_path)
    assert_refused(outcome, 2, "8 experts do not divide by megatron.expert_model_parallel_size=3")
