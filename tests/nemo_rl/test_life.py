"""Our worker over a small host with NeMo RL's names, on gloo ranks: set-up, steps, saves, shutdown."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef

from rl_safe_workers.adapters.nemo_rl.conversion import is_complete
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import VARIABLE
from rl_safe_workers.checkpoint.state.model_state import model_state, restore_model
from rl_safe_workers.comms import teardown
from rl_safe_workers.comms.live_groups import live_groups
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import CheckpointError, CommunicatorError, PhaseTimeoutError, RlSafeError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.ports import port_to_listen_on
from rl_safe_workers.trainer.batch import SequenceBatch
from tests.distributed import reference
from tests.distributed.held_saves import HeldWriter
from tests.distributed.ranks import run_ranks, values
from tests.distributed.recording import is_connected
from tests.nemo_rl.host import SafeWorker, annotations, set_environment

SIZE = 4


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe"
    create_seeded_model(path, SeededModelConfig())
    return path


@pytest.fixture
def port() -> int:
    return port_to_listen_on("127.0.0.1")


@pytest.fixture
def other_port() -> int:
    return port_to_listen_on("127.0.0.1")


def config_of(model: Path, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model_name": str(model),
        "converted": str(folder / "converted"),
        "megatron_cfg": {"enabled": True, "expert_model_parallel_size": 2},
        **more,
    }


def start(rank: int, port: int, config: dict[str, Any], *, size: int = SIZE, workers: int = SIZE) -> SafeWorker:
    set_environment(rank, size, port)
    save_s = config.get("save_timeout", 40)
    convert_s = config.get("convert_timeout", 60)
    os.environ[VARIABLE] = json.dumps(
        {"timeouts": {"world": 40, "bootstrap": 40, "convert": convert_s, "save": save_s}}
    )
    return SafeWorker(config, worker_sharding_annotations=annotations(workers))


def batch() -> SequenceBatch:
    return reference.random_batch(rows=8)


def _set_up(rank: int, port: int, config: dict[str, Any]) -> dict[str, Any]:
    worker = start(rank, port, config)
    timeouts = {
        str(group): group.group._get_backend(group.group._device_types[0]).options._timeout.total_seconds()
        for group in live_groups()
    }
    expert_data = parallel_state.get_expert_data_parallel_group()
    return {
        "timeouts": timeouts,
        "groups": len(c10d._world.pg_map),
        "import_groups": worker.safe.import_groups,
        "expert_data_connected": is_connected(expert_data),
        "flag": worker.mcore_state.cfg.checkpoint.fully_parallel_save,
        "phases": [event.phase for event in worker.safe.trainer.lifecycle.drain_events()],
        "report": worker.rl_safe_report(),
        "ended": worker.shutdown(),
        "again": worker.shutdown(),
        "left": dist.is_initialized(),
        "events": worker.events,
    }


def test_a_worker_lives_from_set_up_to_shutdown(tiny_moe, tmp_path, port) -> None:
    config = config_of(tiny_moe, tmp_path)
    for found in values(run_ranks(_set_up, SIZE, port, config)):
        assert set(found["timeouts"].values()) == {40.0}
        assert found["import_groups"] > 0
        assert found["expert_data_connected"]
        assert found["flag"] is False
        assert found["phases"] == [Phase.WORLD, Phase.GROUPS, Phase.BOOTSTRAP]
        assert found["report"]["bootstrap_groups"] > 0
        assert (found["ended"], found["again"], found["left"]) == (True, True, False)
        assert found["events"] == ["shutdown", "shutdown"]
    converted = tmp_path / "converted"
    assert is_complete(converted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted"]
    assert (converted / "iter_0000000" / "run_config.yaml").read_text() == f"save: {converted}\n"


def _convert_twice(rank: int, port: int, config: dict[str, Any]) -> tuple[int, bool]:
    worker = start(rank, port, config)
    chunks = worker.policy.chunks
    weights = [param.detach().clone() for chunk in chunks for param in chunk.parameters()]
    for chunk in chunks:
        for param in chunk.parameters():
            param.data.zero_()
    path = f"{config['converted']}/iter_0000000"
    state = dist_checkpointing.load(model_state(chunks), path, validate_access_integrity=False)  # megatron-core's own
    restore_model(chunks, None, state)
    loaded = [param for chunk in chunks for param in chunk.parameters()]
    is_equal = all(torch.equal(a, b) for a, b in zip(weights, loaded, strict=True))
    made = worker.safe.import_groups
    worker.shutdown()
    return made, is_equal


@pytest.mark.parametrize("before", ["nothing", "complete", "half"])
def test_a_conversion_is_used_only_if_it_is_complete(before, tiny_moe, tmp_path, port) -> None:
    config = config_of(tiny_moe, tmp_path)
    folder = tmp_path / "converted" / "iter_0000000"
    if before != "nothing":
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(b"half of it")
    if before == "complete":
        values(
            run_ranks(
                _make,
                SIZE,
                port,
                config | {"megatron_cfg": {**config["megatron_cfg"], "force_reconvert_from_hf": True}},
            )
        )
        stamp = (folder / "run_config.yaml").stat().st_mtime_ns
    for made, loaded in values(run_ranks(_convert_twice, SIZE, port, config)):
        assert (made > 0) == (before != "complete")
        assert loaded
    assert is_complete(tmp_path / "converted")
    if before == "complete":
        assert (folder / "run_config.yaml").stat().st_mtime_ns == stamp


def _make(rank: int, port: int, config: dict[str, Any]) -> None:
    start(rank, port, config).shutdown()


def _fail_converting(rank: int, port: int, config: dict[str, Any]) -> tuple[str, float]:
    started_s = time.monotonic()
    try:
        start(rank, port, config)
    except (CheckpointError, OSError) as error:
        return str(error), time.monotonic() - started_s
    raise AssertionError("it was set up")


def test_a_rank_that_fails_in_the_conversion_fails_all_and_leaves_nothing(tiny_moe, tmp_path, port) -> None:
    config = config_of(tiny_moe, tmp_path, fails_on=2)
    for text, seconds in values(run_ranks(_fail_converting, SIZE, port, config)):
        assert "no space left on device" in text
        assert seconds < 50
    assert list(tmp_path.iterdir()) == []


def _late_converting(rank: int, port: int, config: dict[str, Any]) -> tuple[str, float]:
    started_s = time.monotonic()
    try:
        start(rank, port, config)
    except RlSafeError as error:
        return str(error), time.monotonic() - started_s
    raise AssertionError("it was set up")


def test_a_rank_that_is_twice_the_deadline_late_in_a_conversion_is_named(tiny_moe, tmp_path, port) -> None:
    deadline_s = 8
    config = config_of(tiny_moe, tmp_path, late_s={2: 2 * deadline_s}, convert_timeout=deadline_s)
    outcomes = run_ranks(_late_converting, SIZE, port, config)
    for outcome in (outcome for outcome in outcomes if outcome.rank != 2):
        text, seconds = outcome.value
        assert "rank 2" in text
        assert "rl_safe.timeouts.convert" in text or "rl_safe.timeouts.save" in text
        assert seconds < deadline_s + 10
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_was_killed_is_redone_at_the_next_start(tiny_moe, tmp_path, port, other_port) -> None:
    config = config_of(tiny_moe, tmp_path)
    run_ranks(_make, SIZE, port, config | {"killed_importing": True})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted.incomplete", "converted.lock"]
    for made, loaded in values(run_ranks(_convert_twice, SIZE, other_port, config)):
        assert made > 0
        assert loaded
    assert is_complete(tmp_path / "converted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted"]


def _save(rank: int, port: int, config: dict[str, Any], root: Path) -> tuple[dict[str, int], str, str]:
    worker = start(rank, port, config)
    worker.train(batch())
    counts = worker.count_collectives("save_checkpoint", str(root / "step_1" / "weights"))
    saved = worker.digest()
    worker.train(batch())
    assert worker.digest() != saved
    loaded = _load(worker, root / "step_1" / "weights" / "iter_0000000")
    worker.shutdown()
    return counts, saved, loaded


def _load(worker: SafeWorker, path: Path) -> str:
    from rl_safe_workers.checkpoint.state.state import restore_state, sharded_state

    state = sharded_state(
        worker.policy.chunks, worker.policy.optimizer, training_rank=worker.rank, size=SIZE, is_loading=True
    )
    loaded = dist_checkpointing.load(state, str(path), validate_access_integrity=False)  # megatron-core's own
    restore_state(worker.policy.chunks, worker.policy.optimizer, loaded)
    return worker.digest()


def test_a_save_takes_the_hosts_barriers_alone_and_megatron_reads_it(tiny_moe, tmp_path, port) -> None:
    for counts, saved, loaded in values(run_ranks(_save, SIZE, port, config_of(tiny_moe, tmp_path), tmp_path)):
        assert list(counts.values()) == [2]
        assert "barrier" in next(iter(counts))
        assert loaded == saved


IN_BACKGROUND = {"async_save": True, "ckpt_assume_constant_structure": True}
"""As in NeMo RL's recipe for GRPO."""


def _save_four_times(rank: int, port: int, config: dict[str, Any], root: Path) -> dict[str, Any]:
    worker = start(rank, port, config)
    saved, phases = [], []
    for step in range(4):
        worker.train(batch())
        _move_every_tensor(worker, step)
        saved.append(worker.digest())
        worker.save_checkpoint(str(root / f"step_{step}" / "weights"))
        assert worker.mcore_state.async_calls_queue.get_num_unfinalized_calls() == 1
        # What the host trains on meanwhile is not in the save.
        _move_every_tensor(worker, 10 + step)
        if step % 2:  # the host's driver waits for each; the next save waits, too
            worker.finalize_async_save()
            assert (root / f"step_{step}" / "weights" / "iter_0000000" / "run_config.yaml").is_file() or rank
            assert worker.mcore_state.async_calls_queue.get_num_unfinalized_calls() == 0
        phases += [event.phase for event in worker.safe.trainer.lifecycle.drain_events()]
    loaded = [_load(worker, root / f"step_{step}" / "weights" / "iter_0000000") for step in range(4)]
    return {"saved": saved, "loaded": loaded, "phases": phases, "ended": worker.shutdown()}


def _move_every_tensor(worker: SafeWorker, step: int) -> None:
    """Changes each parameter and moment, into new storage, as an offload and an onload make it."""
    for parameter in (p for chunk in worker.policy.chunks for p in chunk.parameters()):
        parameter.data.add_(0.01 * (step + 1))
    worker.policy.optimizer.reload_model_params()
    for optimizer in getattr(worker.policy.optimizer, "chained_optimizers", [worker.policy.optimizer]):
        for state in optimizer.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and name.startswith("exp_avg"):
                    state[name] = value.detach().clone().add_(0.02 * (step + 1))


def _moments(worker: SafeWorker) -> list[torch.Tensor]:
    optimizers = getattr(worker.policy.optimizer, "chained_optimizers", [worker.policy.optimizer])
    states = [state for optimizer in optimizers for state in optimizer.optimizer.state.values()]
    return [value for state in states for name, value in state.items() if name.startswith("exp_avg")]


def test_each_save_in_the_background_is_of_its_own_moment(tiny_moe, tmp_path, port) -> None:
    config = config_of(tiny_moe, tmp_path, checkpoint=IN_BACKGROUND)
    for found in values(run_ranks(_save_four_times, SIZE, port, config, tmp_path, timeout_s=200)):
        assert found["loaded"] == found["saved"]
        assert len(set(found["saved"])) == 4
        # A save in its own, and the waits for it.
        assert found["phases"].count(Phase.SAVE) == 4 + 2
        assert found["ended"]
    for step in range(4):
        folder = tmp_path / f"step_{step}" / "weights"
        assert (folder / "iter_0000000" / ".metadata").is_file()
        assert (folder / "latest_checkpointed_iteration.txt").is_file()


def _refit_beside_a_write(rank: int, port: int, config: dict[str, Any], root: Path) -> dict[str, Any]:
    worker = start(rank, port, config)
    worker.train(batch())
    _move_every_tensor(worker, 1)
    writer = HeldWriter()
    saved, read = worker.digest(), [StorageWeakRef(tensor.untyped_storage()) for tensor in _moments(worker)]
    worker.save_checkpoint(str(root / "step_1" / "weights"))
    worker.offload_before_refit()
    worker.broadcast_weights_for_collective()
    worker.offload_after_refit()
    found: dict[str, Any] = {"pending": worker.mcore_state.async_calls_queue.get_num_unfinalized_calls()}
    _move_every_tensor(worker, 2)
    gc.collect()
    found["held"] = sum(not storage.expired() for storage in read)
    writer.release_soon()
    worker.finalize_async_save()
    found["left"] = worker.mcore_state.async_calls_queue.get_num_unfinalized_calls()
    found["loaded"] = _load(worker, root / "step_1" / "weights" / "iter_0000000") == saved
    return found | {"ended": worker.shutdown()}


def test_a_refit_does_not_wait_for_a_save_in_the_background(tiny_moe, tmp_path, port) -> None:
    config = config_of(tiny_moe, tmp_path, checkpoint=IN_BACKGROUND, save_timeout=20)
    for found in values(run_ranks(_refit_beside_a_write, SIZE, port, config, tmp_path)):
        assert found == {"pending": 1, "held": 0, "left": 0, "loaded": True, "ended": True}


def _fail_finishing(rank: int, port: int, config: dict[str, Any], root: Path) -> tuple[str, float]:
    worker = start(rank, port, config)
    worker.save_checkpoint(str(root / "step_1" / "weights"))
    started_s = time.monotonic()
    if rank == config.get("absent"):
        time.sleep(15)
        os._exit(0)
    try:
        worker.finalize_async_save()
    except (CheckpointError, PhaseTimeoutError) as error:
        return str(error), time.monotonic() - started_s
    raise AssertionError("it was finished")


def test_a_rank_that_cannot_finish_a_save_in_the_background_is_named_on_every_rank(tiny_moe, tmp_path, port) -> None:
    config = config_of(tiny_moe, tmp_path, checkpoint=IN_BACKGROUND, fails_finishing_on=1)
    for rank, (text, seconds) in enumerate(values(run_ranks(_fail_finishing, SIZE, port, config, tmp_path))):
        assert "no space left on device" in text
        assert "training rank 1" in text or rank == 1
        assert seconds < 10


def test_a_rank_that_does_not_come_to_the_end_of_a_save_is_named(tiny_moe, tmp_path, port) -> None:
    config = config_of(tiny_moe, tmp_path, checkpoint=IN_BACKGROUND, absent=2, save_timeout=5)
    outcomes = run_ranks(_fail_finishing, SIZE, port, config, tmp_path)
    for outcome in (outcome for outcome in outcomes if outcome.rank != 2):
        text, seconds = outcome.value
        assert "phase save: rank 2 of training world did not arrive" in text
        assert "rl_safe.timeouts.save" in text
        assert seconds < 5 + 10


def _fail_saving(rank: int, port: int, config: dict[str, Any], root: Path) -> tuple[str, bool]:
    worker = start(rank, port, config)
    text = ""
    try:
        worker.save_checkpoint(str(root / "step_1" / "weights"))
    except CheckpointError as error:
        text = str(error)
    return text, worker.shutdown()


def test_a_rank_that_cannot_save_is_named_on_every_rank(tiny_moe, tmp_path, port) -> None:
    config = config_of(tiny_moe, tmp_path, fails_saving_on=1)
    for text, _ in values(run_ranks(_fail_saving, SIZE, port, config, tmp_path)):
        assert "no space left on device" in text


def _steps(rank: int, port: int, config: dict[str, Any]) -> tuple[list[str], int]:
    worker = start(rank, port, config)
    worker.init_collective("127.0.0.1", 0, SIZE + 1, train_world_size=SIZE)
    worker.get_logprobs(data=batch())
    worker.prepare_for_lp_inference()
    worker.train(batch())
    worker.offload_before_refit()
    late = len(worker.safe.trainer.comms.late_allocations())
    worker.shutdown()
    return worker.events, late


def _forwards(rank: int, port: int, config: dict[str, Any]) -> tuple[list[str], list[Phase]]:
    worker = start(rank, port, config)
    worker.safe.trainer.lifecycle.drain_events()
    worker.get_reference_policy_logprobs(data=batch())
    worker.get_topk_logits(data=batch(), k=2)
    worker.calibrate_qkv_fp8_scales(data=batch())
    phases = [event.phase for event in worker.safe.trainer.lifecycle.drain_events()]
    worker.shutdown()
    return worker.events[:-1], phases


def test_every_kind_of_forward_batch_is_a_phase(tiny_moe, tmp_path, port) -> None:
    calls = ("reference", "topk", "calibrate")
    for events, phases in values(run_ranks(_forwards, SIZE, port, config_of(tiny_moe, tmp_path))):
        assert events == [f"{call} in logprob" for call in calls for _ in range(2)]
        assert phases == [Phase.LOGPROB] * 3


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_finds_every_communicator_connected(stages, tiny_moe, tmp_path, port) -> None:
    config = config_of(tiny_moe, tmp_path)
    config["megatron_cfg"]["pipeline_model_parallel_size"] = stages
    for events, late in values(run_ranks(_steps, SIZE, port, config)):
        assert events == ["init_collective", "prepare_for_lp_inference", "train", "offload_before_refit", "shutdown"]
        assert late == 0


def _join_megatrons_rollout(rank: int, port: int, config: dict[str, Any], joint_port: int) -> dict[str, Any]:
    worker = start(rank, port, config)
    worker.init_collective_mcore_generation("127.0.0.1", joint_port, SIZE, rank_offset=0)
    found: dict[str, Any] = {"phase": worker.safe.trainer.lifecycle.drain_events()[-1].phase}
    joint = worker.refit_pg._get_backend(torch.device("cpu"))
    end_together = teardown.end_together

    def seen(backends: list[Any], patience: Any) -> Any:
        found["taken for ours"] = [backend is joint for _, backend in backends]
        return end_together(backends, patience)

    teardown.end_together = seen
    found["ended"] = worker.shutdown()
    return found


def test_the_group_with_megatrons_rollout_is_joined_in_time_and_the_teardown_leaves_it(
    tiny_moe, tmp_path, port, other_port
) -> None:
    for found in values(run_ranks(_join_megatrons_rollout, SIZE, port, config_of(tiny_moe, tmp_path), other_port)):
        assert (found["phase"], found["ended"]) == (Phase.JOINT, True)
        assert len(found["taken for ours"]) > 5
        assert not any(found["taken for ours"])


def test_a_world_with_others_in_it_is_refused(tiny_moe, tmp_path, port) -> None:
    (text,) = values(run_ranks(_crowded, 1, port, config_of(tiny_moe, tmp_path)))
    assert "the default group has 1 ranks, but the policy has 3 workers" in text


def _crowded(rank: int, port: int, config: dict[str, Any]) -> str:
    with pytest.raises(CommunicatorError) as caught:
        start(rank, port, config, size=1, workers=3)
    return str(caught.value)


def _lose_one(rank: int, port: int, config: dict[str, Any]) -> tuple[bool, float]:
    worker = start(rank, port, config)
    if rank == 3:
        os._exit(1)
    started_s = time.monotonic()
    return worker.shutdown(), time.monotonic() - started_s


def test_a_lost_rank_holds_up_no_shutdown_beyond_the_hosts_patience(tiny_moe, tmp_path, port) -> None:
    outcomes = run_ranks(_lose_one, SIZE, port, config_of(tiny_moe, tmp_path))
    for outcome in outcomes[:3]:
        assert outcome.error is None, outcome.trace
        ended, seconds = outcome.value
        assert not ended
        assert seconds < 30
