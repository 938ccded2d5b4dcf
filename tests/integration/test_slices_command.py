"""``rl-safe slices``: what it prints and copies for a checkpoint of a real run, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS, find_checkpoints, read_manifest
from tests.integration.runs import Outcome, finish

NODE = ("--node", "1", "--gpus-per-node", "2")


def slices(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "rl_safe_workers", "slices", *map(str, arguments)]


@pytest.fixture(scope="module")
def checkpoint(quickstart: Outcome) -> Path:
    path, _ = find_checkpoints(quickstart.folder / "checkpoints" / "quickstart").complete[0]
    return path


@pytest.fixture(scope="module")
def layout(checkpoint: Path, moe_model: Path) -> list[str]:
    """The keys of the layout that was saved."""
    experts = read_manifest(checkpoint).layout["expert"]
    return [f"model.path={moe_model}", f"megatron.expert_model_parallel_size={experts}"]


def test_the_table_the_json_and_the_copy_tell_the_same(checkpoint: Path, layout: list[str], tmp_path: Path) -> None:
    listed = finish(slices(checkpoint, *layout, *NODE, "--json"), tmp_path)
    assert listed.code == 0, listed.err
    ranges = json.loads(listed.out)
    needed = sum(stop - start for parts in ranges.values() for start, stop in parts)
    whole = sum((checkpoint / name).stat().st_size for name in ranges)
    assert f"{SHARDS}/.metadata" in ranges
    assert 0 < needed < 0.8 * whole
    shown = finish(slices(checkpoint, *layout, *NODE, "--copy-to", "copy/global_step_1"), tmp_path)
    assert shown.code == 0, shown.err
    assert shown.left == []
    first, *_, last = shown.out.splitlines()
    assert first == "host 1: training rank 2-3 of 4"
    assert last == f"copied {needed} bytes to copy/global_step_1"
    (totals,) = [line.split() for line in shown.out.splitlines() if "total" in line]
    assert [int(word) for word in totals if word.isdigit()][:2] == [needed, whole]
    assert read_manifest(tmp_path / "copy" / "global_step_1") == read_manifest(checkpoint)


REFUSED = {
    "no such host": (
        ("--node", "2", "--gpus-per-node", "2"),
        "--node 2 does not exist: 4 trainers with --gpus-per-node 2 use hosts 0-1;",
    ),
    "no host at all": (("--node", "0", "--gpus-per-node", "0"), "--gpus-per-node 0: a host has at least one"),
    "a layout that does not divide the trainers": (("--node", "0", "cluster.num_trainers=3"), "3 trainers do not"),
    "a layout that does not divide the model": (
        ("--node", "0", "megatron.expert_model_parallel_size=3", "cluster.num_trainers=3"),
        "8 experts do not divide by megatron.expert_model_parallel_size=3",
    ),
    "another model": (("--node", "0", "model.path=other"), "is a checkpoint of another model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_a_model_is_built(
    case: str, checkpoint: Path, layout: list[str], tmp_path: Path, moe_model: Path
) -> None:
    options, message = REFUSED[case]
    shutil.copytree(moe_model, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    outcome = finish(slices(checkpoint, *layout, *options), tmp_path)
    assert outcome.code == 2
    assert message in outcome.last_error


def test_the_model_must_be_given(checkpoint: Path, tmp_path: Path) -> None:
    outcome = finish(slices(checkpoint, *NODE), tmp_path)
    assert (outcome.code, "give model.path=DIR" in outcome.last_error) == (2, True)


def test_what_is_no_complete_checkpoint_is_refused(checkpoint: Path, layout: list[str], tmp_path: Path) -> None:
    outcome = finish(slices("nowhere", *layout, *NODE), tmp_path)
    assert (outcome.code, outcome.last_error) == (
        2,
        "rl-safe: error: nowhere is not a directory; give that of a checkpoint",
    )
    torn = shutil.copytree(checkpoint, tmp_path / "torn")
    (torn / MANIFEST).unlink()
    outcome = finish(slices("torn", *layout, *NODE), tmp_path)
    assert outcome.code == 1
    assert f"torn is not a complete checkpoint: it has no {MANIFEST}" in outcome.last_error
