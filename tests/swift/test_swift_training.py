"""Whole jobs of ``megatron sft``: what our plugin changes, and that it changes no number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.swift.jobs import TRAINING, Forge, Job

pytestmark = pytest.mark.timeout(900)  # five jobs of four ranks, on a machine that may be busy

LAYOUTS = {
    "ep2": (2, ("--expert_model_parallel_size", "2")),
    "pp2-ep2": (4, ("--pipeline_model_parallel_size", "2", "--expert_model_parallel_size", "2")),
}
# test_swift_lateness.py trains and resumes without stages, and test_swift_grpo.py compares that with stock.
MORE = {"ep2": pytest.mark.every_case}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MORE.get(name, ())) for name in LAYOUTS])
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def jobs(layout: str, forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Stock's job, ours, and both resumed from step 2 of the other's."""
    ranks, sizes = LAYOUTS[layout]
    root = tmp_path_factory.mktemp(layout)

    def run(name: str, *more: str, ours: bool) -> Job:
        return forge.train(root / name, inputs, *sizes, *more, ranks=ranks, ours=ours).check()

    def resume(name: str, of: Job, *, ours: bool) -> Job:
        more = ("--mcore_model", str(of.output / "checkpoint-2"), "--finetune", "false")
        return run(name, *more, ours=ours)

    stock, own = run("stock", ours=False), run("own", ours=True)
    return {
        "stock": stock,
        "own": own,
        "own resumed": resume("own-resumed", own, ours=True),
        "stock resumed from own": resume("stock-resumed", own, ours=False),
        "own resumed from stock": resume("own-from-stock", stock, ours=True),
    }


def test_the_losses_are_those_of_stock_to_the_last_bit(jobs: dict[str, Job]) -> None:
    assert len(jobs["own"].losses) == 4
    assert jobs["own"].losses == jobs["stock"].losses


@pytest.mark.parametrize("name", ["own resumed", "stock resumed from own", "own resumed from stock"])
def test_a_resumed_job_goes_on_as_if_it_had_not_ended(jobs: dict[str, Job], name: str) -> None:
    assert jobs[name].losses == jobs["stock"].losses[2:]


def test_the_bootstrap_and_the_phases_have_really_run(jobs: dict[str, Job]) -> None:
    for rank in range(len(jobs["own"].statuses)):
        record = jobs["own"].record(rank)
        assert record["phases"] == {
            "world": 1,
            "groups": 1,
            "bootstrap": 1,
            "convert": 1,
            "train": 4,
            "save": 2,
            "teardown": 1,
        }
        assert "phases" not in jobs["stock"].record(rank)


def test_a_save_issues_no_collective_and_stocks_does(jobs: dict[str, Job]) -> None:
    for rank in range(len(jobs["own"].statuses)):
        assert jobs["own"].collectives_of_saves(rank) == [(0, 0)] * 2
        assert all(on_world > 0 for on_world, _ in jobs["stock"].collectives_of_saves(rank))


def test_what_steps_issue_was_connected_before(jobs: dict[str, Job], layout: str) -> None:
    for rank in range(len(jobs["own"].statuses)):
        record = jobs["own"].record(rank)
        assert record["unknown"] == []
        # mcore-bridge's, which it would create with the model.
        assert any("EP-PP-GROUP" in one for one in record["connected"])
        assert len(record["issued"]) > 4
        # A group of one rank has one connection for everything.
        issued = {one for one in record["issued"] if len(json.loads(one)[1]) > 1}
        assert not issued - set(record["connected"])
        if layout.startswith("pp2"):
            # ms-swift's stages send over the default group.
            assert json.dumps(["default_pg", [0, 1, 2, 3], "batched_p2p"]) in issued


def test_pretraining_is_guarded_saves_and_ends(forge: Forge, inputs: Path, tmp_path: Path) -> None:
    texts = [{"messages": [{"role": "assistant", "content": f"{i} + {i} = {2 * i}"}]} for i in range(16)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    args = ["--model", str(inputs / "model"), "--dataset", str(tmp_path / "texts.jsonl"), *TRAINING]
    job = forge.run(tmp_path, "pt", [*args, "--train_iters", "2", *LAYOUTS["ep2"][1]]).check()
    assert len(job.losses) == 2
    for rank in (0, 1):
        phases = job.record(rank)["phases"]
        assert [phases[name] for name in ("bootstrap", "convert", "train", "save", "teardown")] == [1, 1, 2, 1, 1]
        assert job.collectives_of_saves(rank) == [(0, 0)]
    assert (job.output / "checkpoint-2" / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_the_checkpoint_is_of_our_saver(jobs: dict[str, Job]) -> None:
    own, stock = (jobs[name].output / "checkpoint-4" / "iter_0000004" for name in ("own", "stock"))
    size = len(jobs["own"].statuses)
    # Stock's has two files of each rank.
    assert {path.name for path in own.glob("*.distcp")} == {f"__{rank}_0.distcp" for rank in range(size)}
    assert len(list(stock.glob("*.distcp"))) > size
    assert (own.parent / "latest_checkpointed_iteration.txt").read_text() == "4"
