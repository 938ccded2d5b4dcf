"""Saves and loads of the training world: every bit comes back, and a failed save changes nothing."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_safe_workers.checkpoint.folders import manifest
from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS, complete_checkpoints
from rl_safe_workers.checkpoint.folders.retention import start_save
from rl_safe_workers.checkpoint.folders.step_tracker import TRACKER
from rl_safe_workers.checkpoint.save import saver
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError, RlSafeError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import Outcome, run_ranks, values
from tests.distributed.recording import recorded_collectives
from tests.distributed.worker import Worker, run_config, served_store

SIZE = 4
LAYOUTS = {
    "tp1_ep2": ("moe", {"ep": 2}),
    "tp2_ep2": ("moe", {"tp": 2, "ep": 2}),
    "pp2_ep2": ("moe", {"pp": 2, "ep": 2}),
    "dense_tp2": ("dense", {"tp": 2}),
}
IDENTITY = {"fingerprint": "tiny", "layout": {"world_size": SIZE, "tensor": 1}}


def _worker(rank: int, address: StoreAddress, config: RunConfig) -> Worker:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    worker.convert()
    return worker


def _draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def _states(worker: Worker) -> dict[str, Any]:
    """The state, and what becomes of it."""
    now = worker.digest()
    metrics = worker.step(reference.random_batch(rows=8, seed=9))
    return {"now": now, "metrics": metrics, "after a step": worker.digest(), "draws": _draws()}


def _save(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[str, Any]:
    worker = _worker(rank, address, config)
    for seed in range(2):
        worker.step(reference.random_batch(rows=8, seed=seed))
    torch.manual_seed(rank)
    worker.save_checkpoint(root, step=2, driver_state={"position": 16}, **IDENTITY)
    return _states(worker)


def _load(rank: int, address: StoreAddress, config: RunConfig, path: Path) -> dict[str, Any]:
    worker = _worker(rank, address, config)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    manifest = worker.load_checkpoint(path, **IDENTITY)
    return {**_states(worker), "driver_state": manifest.driver_state}


def _run(function: Any, *args: Any) -> list[Outcome]:
    with served_store() as address:
        return run_ranks(function, SIZE, address, *args)


@pytest.fixture(scope="module", params=LAYOUTS)
def round_trip(request, seeded_models, tmp_path_factory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The steps after a save, of the run that saved and of fresh processes that loaded."""
    (kind, sizes), root = LAYOUTS[request.param], tmp_path_factory.mktemp("checkpoints")
    config = run_config(seeded_models[kind], **sizes)
    config.rl_safe.checkpoint.digest = True
    saved = values(_run(_save, config, root))
    return saved, values(_run(_load, config, root / "global_step_2"))


def test_fresh_processes_load_every_bit_of_model_optimizer_and_random_state(round_trip) -> None:
    saved, loaded = round_trip
    assert [rank["now"] for rank in loaded] == [rank["now"] for rank in saved]
    assert len({rank["now"] for rank in saved}) == SIZE


def test_the_step_after_a_load_is_bit_for_bit_that_of_the_run_that_saved(round_trip) -> None:
    saved, loaded = round_trip
    assert [rank["metrics"] for rank in loaded] == [rank["metrics"] for rank in saved]
    assert [rank["after a step"] for rank in loaded] == [rank["after a step"] for rank in saved]
    assert all(rank["after a step"] != rank["now"] for rank in saved)


def test_random_numbers_go_on_after_a_load(round_trip) -> None:
    saved, loaded = round_trip
    assert [rank["draws"] for rank in loaded] == [rank["draws"] for rank in saved]


def test_the_drivers_state_comes_back(round_trip) -> None:
    _, loaded = round_trip
    assert [rank["driver_state"] for rank in loaded] == [{"position": 16}] * SIZE


@pytest.fixture(scope="module")
def config(seeded_models) -> RunConfig:
    config = run_config(seeded_models["moe"], ep=2)
    config.rl_safe.checkpoint.digest = True
    return config


@pytest.fixture(scope="module")
def saved_once(config: RunConfig, tmp_path_factory) -> Path:
    """A directory with one checkpoint; copy it before you change it."""
    root = tmp_path_factory.mktemp("saved_once")
    values(_run(_save, config, root))
    return root


@pytest.fixture
def root(saved_once: Path, tmp_path: Path) -> Path:
    """A copy of `saved_once` for one test."""
    return shutil.copytree(saved_once, tmp_path / "checkpoints")


def _flip_a_bit(file: Path) -> None:
    """Flips the lowest bit of one number of a weight; the headers of the file stay as they are."""
    contents = bytearray(file.read_bytes())
    place = contents.find(b"/data/0") + 4096
    contents[place] ^= 1
    file.write_bytes(contents)


def _load_only(rank: int, address: StoreAddress, config: RunConfig, path: Path) -> None:
    _worker(rank, address, config).load_checkpoint(path, **IDENTITY)


def test_one_flipped_bit_is_found_out_on_every_rank(config: RunConfig, root: Path) -> None:
    _flip_a_bit(root / "global_step_2" / SHARDS / "__1_0.distcp")
    for outcome in _run(_load_only, config, root / "global_step_2"):
        assert isinstance(outcome.error, CheckpointError)
        assert "does not have the bytes that were saved" in str(outcome.error)


def test_state_without_the_digest_that_was_saved_is_refused(config: RunConfig, root: Path) -> None:
    path = root / "global_step_2"
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["digests"]["1"] = "0" * 64
    (path / MANIFEST).write_text(json.dumps(manifest))
    error = _run(_load_only, config, path)[1].error
    assert isinstance(error, CheckpointError)
    assert "the state loaded on training rank 1 is not what was saved" in str(error)


def _fail_to_save(rank: int, address: StoreAddress, config: RunConfig, root: Path, background: bool) -> None:
    worker = _worker(rank, address, config)
    worker.load_checkpoint(root / "global_step_2", **IDENTITY)

    def disk_is_full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    if rank == 2:
        saver.write_items = disk_is_full
    worker.save_checkpoint(root, step=3, driver_state={}, background=background, **IDENTITY)
    worker.finalize_checkpoint()


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_leaves_the_previous_checkpoint_and_nothing_under_the_final_name(
    background: bool, config: RunConfig, root: Path
) -> None:
    for outcome in _run(_fail_to_save, config, root, background):
        assert isinstance(outcome.error, CheckpointError)
        assert "training rank 2: OSError: [Errno 28] No space left on device" in str(outcome.error)
    assert sorted(p.name for p in root.iterdir()) == ["global_step_2", "global_step_3.incomplete", TRACKER]
    assert [path.name for path, _ in complete_checkpoints(root)] == ["global_step_2"]
    assert (root / TRACKER).read_text() == "2"
    values(_run(_load, config, root / "global_step_2"))


def _save_again(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> None:
    worker = _worker(rank, address, config)
    worker.load_checkpoint(root / "global_step_2", **IDENTITY)
    worker.save_checkpoint(root, step=3, driver_state={}, **IDENTITY)


def test_a_save_clears_what_a_failed_one_of_its_step_left(config: RunConfig, root: Path) -> None:
    start_save(root, 3)
    left = root / "global_step_3.incomplete" / SHARDS / "__9_0.distcp"
    left.write_text("half a shard")
    values(_run(_save_again, config, root))
    newest, manifest = complete_checkpoints(root)[0]
    assert newest.name == "global_step_3"
    assert not (newest / SHARDS / left.name).exists()
    assert f"{SHARDS}/{left.name}" not in manifest.files
    assert not left.parent.parent.exists()


@pytest.mark.parametrize("name", ["global_step_3", "global_step_3.incomplete"])
def test_a_save_where_something_else_is_fails_on_every_rank_before_it_writes(
    name: str, config: RunConfig, root: Path
) -> None:
    notes = root / name / "actor" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    before = sorted(root.rglob("*"))
    for outcome in _run(_save_again, config, root):
        assert isinstance(outcome.error, CheckpointError)
        assert f"{root / name} " in str(outcome.error)
        assert "it is left alone" in str(outcome.error)
    assert sorted(root.rglob("*")) == before


def _save_not_a_number(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> None:
    worker = _worker(rank, address, config)
    worker.save_checkpoint(root, step=1, driver_state={"best": float("inf") if rank == 1 else 1.0}, **IDENTITY)


def test_a_driver_state_that_is_no_json_fails_the_save_before_it_writes(config: RunConfig, tmp_path: Path) -> None:
    for outcome in _run(_save_not_a_number, config, tmp_path):
        assert isinstance(outcome.error, CheckpointError)
        assert "driver_state cannot be saved as JSON" in str(outcome.error)
    assert complete_checkpoints(tmp_path) == []


def _save_unstepped(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[str, Any]:
    worker = _worker(rank, address, config)
    worker.save_checkpoint(root, step=0, driver_state={}, **IDENTITY)
    return _states(worker)


def test_a_save_before_the_first_step_is_as_good_as_any(config: RunConfig, tmp_path: Path) -> None:
    saved = values(_run(_save_unstepped, config, tmp_path))
    loaded = values(_run(_load, config, tmp_path / "global_step_0"))
    assert [rank["after a step"] for rank in loaded] == [rank["after a step"] for rank in saved]


def _record_saves(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[str, Any]:
    worker, recorded = _worker(rank, address, config), {}
    for step, (name, parallel, validate) in enumerate(FLAGS):
        worker.safe.rl_safe.checkpoint.fully_parallel_save = parallel
        worker.safe.rl_safe.checkpoint.validate_access_integrity = validate
        with recorded_collectives() as collectives:
            worker.save_checkpoint(root, step=step, driver_state={}, **IDENTITY)
        recorded[name] = [(c.op, c.group) for c in collectives if len(c.ranks) > 1]
    return recorded


FLAGS = [("neither", False, False), ("fully_parallel_save", True, False), ("validate_access_integrity", False, True)]
GATHER_OBJECT, ALL_GATHER_OBJECT = ["allgather_", "gather_"], ["allgather_", "allgather_"]
PLAIN_SAVE = [(op, "default_pg") for op in [*GATHER_OBJECT, "barrier", *GATHER_OBJECT, "broadcast_", "barrier"]]
"""Collectives that no flag of megatron-core removes: it gathers plans and results, tells failures, and waits twice."""


def test_a_save_issues_no_collective_unless_a_flag_asks_for_them(config: RunConfig, tmp_path: Path) -> None:
    for recorded in values(_run(_record_saves, config, tmp_path)):
        assert recorded["neither"] == []
        parallel = [(op, "DATA_PARALLEL_GROUP_WITH_CP") for op in ALL_GATHER_OBJECT]
        parallel += [(op, "default_pg") for op in ALL_GATHER_OBJECT]
        assert recorded["fully_parallel_save"] == parallel + PLAIN_SAVE
        validation = [(op, "default_pg") for op in [*ALL_GATHER_OBJECT, "broadcast_", "broadcast_"]]
        assert recorded["validate_access_integrity"] == validation + PLAIN_SAVE


def _newer(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "schema": 4, "new": True}))


def _forget(path: Path) -> None:
    (path / MANIFEST).unlink()


def _leave(path: Path) -> None:
    """Changes nothing."""


OTHER_MODEL = {**IDENTITY, "fingerprint": "other"}
REFUSED = {
    "another_model": (_leave, OTHER_MODEL, CheckpointMismatchError, "is a checkpoint of another model"),
    "a_newer_schema": (_newer, IDENTITY, CheckpointError, "written by a newer rl_safe_workers (manifest schema 4"),
    "no_manifest": (_forget, IDENTITY, CheckpointError, "is not a complete checkpoint: it has no manifest.json"),
}


def _load_unbuilt(rank: int, address: StoreAddress, config: RunConfig, path: Path, identity: Any) -> Any:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    with worker.phase(Phase.CONVERT):
        pass
    with recorded_collectives() as collectives:
        try:
            worker.load_checkpoint(path, **identity)
        except RlSafeError as error:
            return error, len(collectives)


@pytest.mark.parametrize(("prepare", "identity", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_every_rank_refuses_before_any_collective(prepare, identity, kind, message, config, root) -> None:
    prepare(root / "global_step_2")
    for error, collectives in values(_run(_load_unbuilt, config, root / "global_step_2", identity)):
        assert type(error) is kind
        assert message in str(error)
        assert collectives == 0


def _load_damaged(rank: int, address: StoreAddress, config: RunConfig, path: Path) -> Any:
    """Returns the error of a load, the number of collectives, and the number of times that this rank listed files."""
    worker, listings = _worker(rank, address, config), []
    with pytest.MonkeyPatch.context() as patch, recorded_collectives() as collectives:
        listed = manifest.file_sizes
        patch.setattr(manifest, "file_sizes", lambda folder: listings.append(folder) or listed(folder))
        try:
            worker.load_checkpoint(path, **IDENTITY)
        except RlSafeError as error:
            return error, len(collectives), len(listings)


def test_a_shortened_file_is_found_on_rank_0_and_refused_on_every_rank(config: RunConfig, root: Path) -> None:
    path = root / "global_step_2"
    (path / SHARDS / "__1_0.distcp").write_bytes(b"abc")
    for rank, (error, collectives, listings) in enumerate(values(_run(_load_damaged, config, path))):
        assert type(error) is CheckpointError
        assert "is damaged: dist_ckpt/__1_0.distcp has 3 bytes" in str(error)
        assert collectives == 0
        assert listings == (1 if rank == 0 else 0)


def _change_everything(rank: int, address: StoreAddress, config: RunConfig) -> list[str]:
    worker = _worker(rank, address, config)
    worker.step(reference.random_batch(rows=8))
    (part, *_others) = worker.optimizer.chained_optimizers
    (state, *_rest) = part.optimizer.state.values()
    digests = [worker.digest(), worker.digest()]
    for change in (
        lambda: next(worker.chunks[0].parameters()).data.view(torch.int32).reshape(-1)[-1].bitwise_xor_(1),
        lambda: state["exp_avg"].view(torch.int32).reshape(-1)[0].bitwise_xor_(1),
        lambda: state["exp_avg_sq"].view(torch.int32).reshape(-1)[0].bitwise_xor_(1),
        lambda: state["step"].add_(1),
        lambda: part.optimizer.param_groups[0].update(lr=0.5),
        random.random,
        np.random.rand,
        lambda: torch.rand(()),
    ):
        change()
        digests.append(worker.digest())
    return digests


def test_the_digest_sees_one_bit_of_any_part_of_the_state(config: RunConfig) -> None:
    for same, again, *changed in values(_run(_change_everything, config)):
        assert same == again
        assert len({same, *changed}) == 1 + len(changed) == 9
