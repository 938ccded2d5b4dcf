"""Other parallel layouts: the same agreement between rollout and trainer, and nothing left."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.runs import Outcome, finish, made_once, rl_safe

STEPS = ("trainer.total_training_steps=2", "trainer.save_freq=-1", "data.train_batch_size=4")
ENGINE = (
    *("cluster.num_rollouts=2", "rollout.tensor_model_parallel_size=2", "cluster.cpus_per_rollout=0.4"),
    "rollout.prove_sync_freq=1",
)
"""An engine of two ranks. Each of its syncs is proved."""


def assert_sound(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.err
    gaps = [record["rollout/logprob_gap_max"] for record in outcome.records]
    assert len(gaps) == 2
    assert all(0 < gap <= 1e-5 for gap in gaps), gaps
    assert outcome.left == []


def assert_proved(outcome: Outcome) -> None:
    for record in outcome.records:
        assert record["sync/proved"] > 0
        assert record["sync/not_proved"] == record["sync/redone"] == 0


@pytest.mark.every_case
@pytest.mark.parametrize("recipe", ["quickstart_tp2.yaml", "quickstart_pp2.yaml"])
def test_a_layout_trains_within_the_bound_with_an_engine_of_two_ranks(
    moe_model: Path, tmp_path: Path, recipe: str
) -> None:
    outcome = finish(rl_safe(recipe, f"model.path={moe_model}", *STEPS, *ENGINE), tmp_path)
    assert_sound(outcome)
    assert_proved(outcome)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A dense model under tensor parallelism that it makes first, an engine of two ranks, a KL loss and TensorBoard."""
    command = rl_safe(
        "quickstart_dense.yaml",
        *(*STEPS, *ENGINE, "actor.use_kl_loss=true", "trainer.logger=[console,tensorboard]"),
        "cluster.num_trainers=2",
    )
    return made_once(tmp_path_factory, "dense", partial(finish, command))


def test_a_dense_model_trains_with_an_engine_of_two_ranks(dense: Outcome) -> None:
    assert_sound(dense)
    assert_proved(dense)
    assert (dense.folder / "models" / "quickstart-qwen3" / "model.safetensors").is_file()


def test_the_kl_divergence_from_the_starting_weights_starts_at_0_and_grows(dense: Outcome) -> None:
    first, second = (record["actor/kl"] for record in dense.records)
    assert first == pytest.approx(0, abs=1e-9)
    assert 1e-6 < second < 1


def test_tensorboard_holds_what_metrics_jsonl_holds(dense: Outcome) -> None:
    events = EventAccumulator(str(dense.run_dir / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert rewards == [(record["step"], pytest.approx(record["reward/mean"])) for record in dense.records]
    assert set(events.Tags()["scalars"]) == dense.records[0].keys() - {"step"}


def test_without_saves_there_is_no_checkpoint_folder(dense: Outcome) -> None:
    assert not (dense.folder / "checkpoints").exists()
