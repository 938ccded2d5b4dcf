"""An actor and a critic in the same processes, over the same groups: what both connect, cost and save."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.adapters.verl.pending_saves import PendingSave, PendingSaves
from rl_safe_workers.checkpoint.folders.step_tracker import TRACKER
from rl_safe_workers.comms.report import BootstrapReport, LateAllocation, LedgerEntry, add_reports
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.groups import OpClass
from tests.verl.host import train, training_worker
from tests.verl.ranks import run_verl_ranks, values

SIZE = 2
SAVE = "timing_s/rl_safe_save"
EXPERTS = "EXPERT_MODEL_PARALLEL_GROUP"
LATE = LateAllocation(group="WORLD", ranks=(0, 1), op_class=None, operation="mine", phase="train", bytes=None)


def _engine(model: Path, kind: str = "language_model", *, dispatcher: str = "alltoall", **settings: Any) -> Any:
    # Megatron lets the other dispatcher have no sequences of different lengths.
    overrides = {"moe_token_dispatcher_type": dispatcher, "variable_seq_lengths": dispatcher == "alltoall"}
    return training_worker(model, model_type=kind, override_transformer_config=overrides, **settings)


def _two_engines(rank: int, model: Path, dispatchers: list[str]) -> dict[str, Any]:
    first = _engine(model, dispatcher=dispatchers[0])
    process = first.engine.process
    alone = process.metrics()
    process.trainer.comms._late.found.append(LATE)
    _engine(model, "value_model", dispatcher=dispatchers[1])
    kept = process.trainer.comms.late_allocations()
    train(first, 1)
    entries = [(entry.group, entry.op_class) for entry in process.trainer.comms.report.entries]
    return {
        "alone": alone,
        "both": process.metrics(),
        "kept": kept,
        "new": process.trainer.comms.late_allocations()[1:],
        "entries": entries,
        "groups": process.trainer.comms.report.groups + process.trainer.comms.report.skipped,
    }


@pytest.mark.parametrize("dispatchers", [["alltoall", "allgather"], ["allgather", "alltoall"]], ids=lambda d: d[0])
def test_what_two_engines_connect_is_reported_of_both(dispatchers, tiny_moe) -> None:
    for found in values(run_verl_ranks(_two_engines, SIZE, tiny_moe, dispatchers)):
        assert (EXPERTS, OpClass.ALL_TO_ALL) in found["entries"]
        assert len(set(found["entries"])) == len(found["entries"])
        assert found["kept"] == [LATE]
        assert found["new"] == [], "what the first engine has connected is not late"
        assert found["both"]["timing_s/rl_safe_bootstrap"] > found["alone"]["timing_s/rl_safe_bootstrap"]
        assert found["both"]["rl_safe/bootstrap_groups"] >= found["alone"]["rl_safe/bootstrap_groups"]
        assert found["both"]["rl_safe/late_allocations"] == 1
        assert found["groups"] > 10


def _entry(group: str, op_class: OpClass, *, mib: int, seconds: float) -> LedgerEntry:
    return LedgerEntry(
        group=group, ranks=(0, 1), op_class=op_class, seconds=seconds, bytes=mib * 2**20, predicted_bytes=2**20
    )


def test_the_cost_of_a_second_bootstrap_is_added_and_nothing_is_predicted_twice() -> None:
    first = BootstrapReport(
        entries=(_entry(EXPERTS, OpClass.ALL_TO_ALL, mib=100, seconds=1.0),),
        skipped=3,
        unknown=("a",),
        seconds=1.5,
        kernel_bytes=2**20,
        kernel_seconds=0.5,
    )
    again = _entry(EXPERTS, OpClass.ALL_TO_ALL, mib=0, seconds=0.25)
    second = BootstrapReport(
        entries=(again, _entry("WORLD", OpClass.REDUCE, mib=50, seconds=0.5)),
        skipped=2,
        unknown=("a",),
        seconds=0.75,
        kernel_bytes=0,
    )
    both = add_reports(first, second)
    assert (both.groups, both.skipped, both.unknown, both.seconds) == (2, 2, ("a",), 2.25)
    assert [entry.seconds for entry in both.entries] == [1.25, 0.5]
    assert both.bytes == 151 * 2**20
    assert sum(entry.predicted_bytes for entry in both.entries) == 2 * 2**20


def _save_both(rank: int, model: Path, root: Path, background: dict[str, bool]) -> dict[str, Any]:
    kinds = {"critic": "value_model", "actor": "language_model"}
    contents = ["model", "extra"]  # an optimizer that has taken no step cannot be saved
    workers = {
        role: _engine(model, kind, shards=True, checkpoint={"async_save": background[role], "save_contents": contents})
        for role, kind in kinds.items()
    }
    process, folder = workers["actor"].engine.process, root / "global_step_1"
    workers["actor"].save_checkpoint(str(folder / "actor"), global_step=1)
    of_actor = process.save_seconds
    while any(save.is_in_progress() for save in process.saves._pending):
        time.sleep(0.05)
    manager = workers["critic"].engine.checkpoint_mananager
    describe, seen = manager._build_extra_state_dict, []

    def described() -> Any:
        seen.append((root / TRACKER).exists())
        return describe()

    manager._build_extra_state_dict = described
    workers["critic"].save_checkpoint(str(folder / "critic"), global_step=1)
    dist.barrier()
    of_both, told = process.save_seconds, [process.metrics().get(SAVE) for _ in range(2)]
    found = {
        "told of the saves once": (0 < of_actor < of_both, told == [of_both, None]),
        "while the critic saves": seen,
        "waited for": (folder / "critic" / "ckpt_contents.json").exists(),
        "named before the step's last files": (root / TRACKER).exists(),
    }
    dist.barrier()
    assert process.trainer.teardown() == {}
    found["named"] = (root / TRACKER).read_text() if (root / TRACKER).exists() else None
    found["complete"] = all((folder / role / "ckpt_contents.json").exists() for role in kinds)
    return found


@pytest.mark.parametrize("critic", [True, False], ids=["critic_async", "critic_sync"])
def test_a_step_is_named_once_the_critic_is_saved_too(critic, tiny_moe, tmp_path) -> None:
    for found in values(run_verl_ranks(_save_both, SIZE, tiny_moe, tmp_path, {"actor": True, "critic": critic})):
        assert found["while the critic saves"] == [False]
        assert found["told of the saves once"] == (True, True), "not of the last alone, nor in later steps"
        assert not found["named before the step's last files"], "verl's driver saves its data loader last"
        assert (found["named"], found["complete"]) == ("1", True)


def test_a_critic_does_not_save_in_the_background_where_verls_driver_names_the_step_at_once(tiny_moe, tmp_path) -> None:
    for found in values(run_verl_ranks(_save_both, SIZE, tiny_moe, tmp_path, {"actor": False, "critic": True})):
        assert found["waited for"]
        assert found["named"] is None


@pytest.mark.parametrize(
    ("engine", "folder", "waits"),
    [("actor-2", "global_step_1", False), ("critic-1", "global_step_1", True), ("actor-2", "global_step_2", True)],
    ids=["another_of_the_step", "again", "the_next_step"],
)
def test_a_save_waits_for_those_in_the_background_but_of_other_engines_of_its_step(engine, folder, waits) -> None:
    saves, waited = PendingSaves(None, None), []
    saves.follow(PendingSave("critic-1", Path("global_step_1"), [], lambda: None))
    saves.finish = lambda: waited.append(True)
    saves.finish_before(engine, Path(folder))
    assert bool(waited) == waits


def _gather_changes(rank: int, model: Path) -> list[LateAllocation]:
    os.environ["RL_SAFE_VERL"] = json.dumps({"delta_weights": True})
    process = _engine(model, tensor_model_parallel_size=2, expert_tensor_parallel_size=1).engine.process
    with process.trainer.phase(Phase.TRAIN):
        for group in (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_tensor_and_model_parallel_group(),
        ):
            parts = [torch.zeros(1) for _ in range(group.size())]
            dist.all_gather(parts, torch.zeros(1), group=group)
            first = dist.get_global_rank(group, 0)
            dist.gather(torch.zeros(1), parts if dist.get_rank() == first else None, dst=first, group=group)
    return process.trainer.comms.late_allocations()


def test_gathers_of_changes_of_weights_are_connected_where_they_are_configured(tiny_moe) -> None:
    assert values(run_verl_ranks(_gather_changes, SIZE, tiny_moe)) == [[], []]
