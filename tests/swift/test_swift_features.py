"""The collectives that follow from the arguments of a job, and the settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import msc_utils

from rl_safe_workers.adapters.swift.args_features import features_of
from rl_safe_workers.adapters.swift.job import SwiftComms, SwiftJob, why_no_async_save
from rl_safe_workers.adapters.swift.rollout_phases import RolloutPhases
from rl_safe_workers.adapters.swift.swift_settings import VARIABLE, job_settings
from rl_safe_workers.checkpoint.folders.step_tracker import TRACKER
from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.errors import ConfigError, LifecycleError
from rl_safe_workers.topology.groups import HOST_KINDS, WORLD, Features, Traffic, kinds_of
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.workers.safe_trainer import SafeTrainer


def arguments(*, moe: bool = True, **more: Any) -> SimpleNamespace:
    given = {
        "model_info": SimpleNamespace(is_moe_model=moe),
        "moe_token_dispatcher_type": "alltoall",
        "use_distributed_optimizer": True,
        "virtual_pipeline_model_parallel_size": None,
    }
    return SimpleNamespace(**given | more)


def test_without_virtual_stages_batches_go_over_the_default_group() -> None:
    features = features_of(arguments())
    assert (features.batched_p2p, features.p2p_over_world) == (True, True)
    features = features_of(arguments(virtual_pipeline_model_parallel_size=2))
    assert (features.batched_p2p, features.p2p_over_world, features.virtual_pipeline) == (False, False, True)


def test_a_dense_model_connects_nothing_for_experts() -> None:
    features = features_of(arguments(moe=False))
    assert (features.moe, features.aux_loss) == (False, False)


@pytest.mark.parametrize(("given", "expected"), [(None, True), ("none", False), (["aux_loss", "seq_aux_loss"], True)])
def test_the_router_has_a_loss_unless_it_is_turned_off(given: Any, expected: bool) -> None:
    assert features_of(arguments(moe_router_load_balancing_type=given)).aux_loss is expected


def test_the_default_group_carries_stages_where_ms_swift_sends_over_it() -> None:
    layout = ParallelLayout(world_size=8, tensor=1, pipeline=4, expert=1, expert_tensor=1, context=1)
    world = kinds_of(layout, Features())[WORLD]
    assert world.traffic(layout, Features(batched_p2p=True, p2p_over_world=True)) is Traffic.STAGES
    assert world.traffic(layout, Features(batched_p2p=True)) is Traffic.CONTROL


def test_the_groups_that_ms_swift_creates_are_in_the_catalog() -> None:
    layout = ParallelLayout(world_size=16, tensor=1, pipeline=2, expert=4, expert_tensor=1, context=2)
    sizes = {name: kind.size(layout, Features()) for name, kind in HOST_KINDS.items()}
    assert sizes == {"EP-PP-GROUP": 8, "ROLLOUT_GROUP": 4}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "RL_SAFE_SWIFT is not JSON"),
        ("[]", "RL_SAFE_SWIFT must hold keys"),
        ('{"timeouts": {"convert": 0}}', "RL_SAFE_SWIFT.timeouts.convert"),
        ('{"bootstrap": {"max_ctas": {"world": 4}}}', "max_ctas.world cannot have a limit"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_on_one_line(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        job_settings({VARIABLE: text})
    assert "\n" not in str(error.value)


def test_every_phase_has_its_timeout() -> None:
    rl_safe = job_settings({VARIABLE: '{"timeouts": {"save": 5, "outside": 6}}'}).rl_safe()
    assert (rl_safe.timeouts.save, rl_safe.timeouts.groups, rl_safe.timeouts.convert) == (5, 300, 3600)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"async_save": True, "tuner_type": "lora", "merge_lora": True}, True),
        ({"async_save": True, "tuner_type": "lora", "merge_lora": False}, False),
        ({"async_save": True, "tuner_type": "full", "merge_lora": True}, False),
        ({"async_save": False, "tuner_type": "lora", "merge_lora": True}, False),
    ],
)
def test_a_background_save_is_refused_if_its_adapters_are_merged(given: dict[str, Any], refused: bool) -> None:
    reason = why_no_async_save(SimpleNamespace(**given))
    assert ("set --merge_lora false" in reason) == refused == bool(reason)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_tracker_appears_after_the_hf_weights_unless_it_is_copied_with_them(at_once: bool, tmp_path: Path) -> None:
    job, tracker = SwiftJob(job_settings({})), tmp_path / TRACKER
    with job.tracker_last(at_once=at_once):
        with msc_utils.open_file(tracker, "w") as file:
            file.write("4")
        written_early = tracker.exists()
    assert written_early is at_once
    assert tracker.read_text() == "4"


def _fail_after_the_tracker(job: SwiftJob, tracker: Path) -> None:
    with job.tracker_last():
        with msc_utils.open_file(tracker, "w") as file:
            file.write("4")
        raise KeyError("the HF weights")


def test_a_save_that_fails_gets_no_tracker(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        _fail_after_the_tracker(SwiftJob(job_settings({})), tmp_path / TRACKER)
    assert not (tmp_path / TRACKER).exists()


def test_a_step_that_cannot_be_written_raises_its_own_error(tmp_path: Path) -> None:
    with (
        SwiftJob(job_settings({})).tracker_last(at_once=True),
        pytest.raises(OSError, match="no space"),
        msc_utils.open_file(tmp_path / TRACKER, "w"),
    ):
        raise OSError("no space")
    assert not (tmp_path / TRACKER).exists()


def test_generation_and_offload_are_refused_before_the_bootstrap() -> None:
    job = SwiftJob(job_settings({}))
    job._trainer = SafeTrainer(
        training_rank=0,
        training_size=1,
        rl_safe=job.settings.rl_safe(),
        megatron=MegatronConfig(),
        device=torch.device("cpu"),
        host_comms=SwiftComms(),
    )
    phases, called = RolloutPhases(job), list[object]()
    with pytest.raises(LifecycleError, match="rollout on training rank 0: the bootstrap has not run"):
        phases.starting(called.append)(SimpleNamespace())
    offload = phases.offloading(lambda trainer: called.append(trainer))
    with pytest.raises(LifecycleError, match="offload on training rank 0"), offload(SimpleNamespace()):
        pass
    assert called == []


def test_generation_has_timeouts_of_its_own() -> None:
    settings = job_settings({VARIABLE: '{"timeouts": {"rollout": 7, "sync": 8, "start": 9}, "release_comms": true}'})
    timeouts = settings.rl_safe().timeouts
    assert (timeouts.rollout, timeouts.sync, timeouts.start, settings.release_comms) == (7, 8, 9, True)
