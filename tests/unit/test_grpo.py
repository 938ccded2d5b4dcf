"""One GRPO step over a fake session: the order of its calls, and the two checks that end a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_safe_workers.config import RunConfig
from rl_safe_workers.driver.grpo import GrpoLoop, Metrics
from rl_safe_workers.driver.inputs.data import Prompt
from rl_safe_workers.driver.outputs import metrics as names
from rl_safe_workers.errors import DivergedError, LogprobGapError, WeightSyncError
from rl_safe_workers.rollout.protocol import Sample
from rl_safe_workers.rollout.sync_proof import HeldWeights, ProvedSync, ProvedSyncs, SentWeights, SyncProof
from rl_safe_workers.trainer.batch import SequenceBatch

TRAINERS, PROMPTS, SAMPLES_OF_A_PROMPT = 2, 2, 2
RESPONSE_LOGPROB = -1.0
NAME, SENT, OTHER = "model.norm.weight", 7, -8
UPDATE = {
    "loss": 2.0,
    "tokens": 4.0,
    "kl": 0.0,
    "clipped": 0.0,
    "grad_norm": 0.5,
    "updated": 1,
    "memory_growth_mib": 0.0,
}


def proof_of(held: int) -> SyncProof:
    return SyncProof(
        sent=[SentWeights(digests={NAME: SENT}, seconds=0.5), SentWeights(digests={}, seconds=0.25)],
        held=[HeldWeights(digests=((NAME, held),), converted=0, unread=(), faults=(), seconds=1.0)],
    )


class FakeSession:
    """Answers as two data-parallel trainers and one rollout rank would."""

    def __init__(self, *, gap: float = 0.0, update: dict[str, float] | None = None) -> None:
        self.gap, self.update = gap, UPDATE | (update or {})
        self.totals: dict[str, Any] = {}
        self.calls: list[str] = []
        self.proved: list[bool] = []
        self.held: list[int] = []
        """Digests that the engine holds after the first syncs; later ones are well."""

    def start_trainers(self, _: object, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        self.calls.append(method)
        return [getattr(self, f"_{method}")(*arguments(rank)) for rank in range(TRAINERS)]

    def finish(self, calls: list[Any]) -> list[Any]:
        return calls

    def run_here(self, _: object, work: Callable[[], Any]) -> Any:
        self.calls.append("reward")
        return work()

    def send(self, prove: bool) -> SyncProof | None:
        self.calls.append("sync")
        self.proved.append(prove)
        held = self.held.pop(0) if self.held else SENT
        return proof_of(held) if prove else None

    def _sample(self, number: int) -> Sample:
        return Sample(prompt_ids=[1, 2], response_ids=[3, 4], logprobs=[RESPONSE_LOGPROB] * 2, text=str(number))

    def _offload(self) -> None: ...

    def _onload(self) -> None: ...

    def _logprob(self, batch: SequenceBatch) -> tuple[Any, None]:
        return np.where(batch.response_mask > 0, RESPONSE_LOGPROB - self.gap, 0).astype(np.float32), None

    def _train(self, batch: SequenceBatch, mini_batch: int) -> list[dict[str, float]]:
        assert len(batch) == mini_batch == PROMPTS * SAMPLES_OF_A_PROMPT // TRAINERS
        assert batch.old_logprobs is not None
        return [self.update]


class FakeEngines:
    """Generates and syncs as the engines of a session would."""

    def __init__(self, session: FakeSession, *, every: int) -> None:
        self.session, self.syncs = session, ProvedSyncs(every=every)
        self.is_lost = False
        """True if no engine is left at the next rollout."""

    def generate(
        self, conversations: Sequence[object], step: int, *, bring_weights: Callable[[], object]
    ) -> list[Sample]:
        if self.is_lost:
            bring_weights()
        self.session.calls.append("generate")
        return [self.session._sample(number) for number in range(len(conversations) * SAMPLES_OF_A_PROMPT)]

    def sync(self) -> ProvedSync | None:
        return self.syncs.run(self.session.send)

    def metrics(self) -> Metrics:
        return {names.ENGINES_LOST: 1.0}


def step(session: FakeSession) -> Metrics:
    return loop_over(session).step(1)


def loop_over(session: FakeSession, *, prove_sync_freq: int = 1, is_lost: bool = False) -> GrpoLoop:
    config = RunConfig()
    config.data.train_batch_size, config.rollout.n, config.rollout.max_logprob_gap = PROMPTS, SAMPLES_OF_A_PROMPT, 1e-3
    prompts = [
        Prompt(
            index=index, data_source="", messages=({"role": "user", "content": "a"},), ground_truth="", extra_info={}
        )
        for index in range(PROMPTS)
    ]
    engines = FakeEngines(session, every=prove_sync_freq)
    engines.is_lost = is_lost
    return GrpoLoop(
        config,
        session,  # type: ignore[arg-type]
        engines,  # type: ignore[arg-type]
        layout=SimpleNamespace(tensor=1, data=TRAINERS, coordinates=lambda rank: SimpleNamespace(data=rank)),  # type: ignore[arg-type]
        loader=SimpleNamespace(next_batch=lambda: prompts),  # type: ignore[arg-type]
        reward=lambda _source, text, _truth, _info: float(text),
        on_phase=lambda _: None,
    )


def test_a_step_offloads_before_the_rollout_and_syncs_after_the_update() -> None:
    session = FakeSession()
    metrics = step(session)
    assert session.calls == ["offload", "generate", "reward", "onload", "logprob", "train", "sync"]
    assert metrics[names.REWARD_MEAN] == np.mean(range(PROMPTS * SAMPLES_OF_A_PROMPT))
    assert metrics[names.LOSS] == UPDATE["loss"] / UPDATE["tokens"]


def test_weights_for_a_rollout_without_an_engine_come_from_trainers_that_are_not_offloaded() -> None:
    session = FakeSession()
    metrics = loop_over(session, is_lost=True).step(1)
    assert session.calls[:5] == ["offload", "onload", "sync", "offload", "generate"]
    assert metrics[names.ENGINES_LOST] == 1


@pytest.mark.parametrize("gap", [2e-3, math.inf, math.nan])
def test_a_log_probability_gap_above_the_bound_ends_the_step_before_the_update(gap: float) -> None:
    session = FakeSession(gap=gap)
    with pytest.raises(LogprobGapError, match="step 1: log-probability gap .* exceeds 0.001"):
        step(session)
    assert session.calls[-1] == "logprob"


def test_a_gap_within_the_bound_is_a_metric() -> None:
    assert step(FakeSession(gap=5e-4))[names.LOGPROB_GAP_MAX] == pytest.approx(5e-4, rel=1e-3)


@pytest.mark.parametrize("update", [{"loss": math.nan}, {"grad_norm": math.inf}, {"updated": 0}], ids=str)
def test_an_update_that_is_not_finite_or_was_skipped_reaches_no_rollout(update: dict[str, float]) -> None:
    session = FakeSession(update=update)
    with pytest.raises(DivergedError, match="step 1: the update is not finite"):
        step(session)
    assert session.calls[-1] == "train"


def test_a_proved_sync_says_what_it_has_compared() -> None:
    metrics = step(FakeSession())
    assert (metrics[names.PROVED], metrics[names.NOT_PROVED], metrics[names.REDONE]) == (1, 0, 0)
    assert metrics[names.PROOF_SECONDS] == 1.5


def test_a_sync_that_is_wrong_once_is_redone() -> None:
    session = FakeSession()
    session.held = [OTHER]
    metrics = step(session)
    assert session.calls[-2:] == ["sync", "sync"]
    assert (metrics[names.REDONE], metrics[names.PROOF_SECONDS]) == (1, 3.0)


def test_a_sync_that_is_wrong_twice_ends_the_run() -> None:
    session = FakeSession()
    session.held = [OTHER, OTHER]
    text = rf"twice: rollout rank 0: {NAME}: sent 0000000000000007, held fffffffffffffff8$"
    with pytest.raises(WeightSyncError, match=text):
        step(session)
    assert session.proved == [True, True]


@pytest.mark.parametrize(
    ("every", "proved"),
    [(1, [True] * 5), (2, [True, False, True, False, True]), (0, [True] + [False] * 4), (-1, [False] * 5)],
)
def test_some_syncs_are_proved(every: int, proved: list[bool]) -> None:
    session = FakeSession()
    loop = loop_over(session, prove_sync_freq=every)
    for _ in range(5):
        loop.sync_weights()
    assert session.proved == proved
