"""Runs the driver's part of the GRPO steps: data, rewards, advantages and the order of calls."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_safe_workers.config import RunConfig
from rl_safe_workers.diagnostics.memory_growth import METRIC
from rl_safe_workers.driver.engines import Engines
from rl_safe_workers.driver.inputs.data import Prompt, PromptLoader
from rl_safe_workers.driver.inputs.rewards import RewardFunction
from rl_safe_workers.driver.outputs import metrics as names
from rl_safe_workers.driver.outputs.metrics import PhaseTotal
from rl_safe_workers.driver.session import Session
from rl_safe_workers.errors import DivergedError, LogprobGapError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.rollout.protocol import Sample
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.trainer.advantages import estimate_advantages
from rl_safe_workers.trainer.batch import SequenceBatch, pack

Metrics = dict[str, float]
Rewards = NDArray[np.float32]


class GrpoLoop:
    """Runs training steps over a session's actors."""

    def __init__(
        self,
        config: RunConfig,
        session: Session,
        engines: Engines,
        *,
        layout: ParallelLayout,
        loader: PromptLoader,
        reward: RewardFunction,
        on_phase: Callable[[str], None],
    ) -> None:
        """Stores its parts; `step` does the work."""
        self._config, self._session, self._engines, self._layout = config, session, engines, layout
        self._loader, self._reward, self._on_phase = loader, reward, on_phase
        self._brought: Metrics = {}
        """Metrics of a weight sync in the middle of the step's rollout."""

    def step(self, step: int) -> Metrics:
        """Runs one step: offload, roll out, reward, onload, log-probabilities, update, sync.

        Args:
            step: The step, counted from 1.

        Returns:
            The step's metrics.

        Raises:
            LogprobGapError: If the log-probabilities of rollout and trainer differ by more than
                ``rollout.max_logprob_gap``.
            DivergedError: If the update is not finite.
            WeightSyncError: If a rollout rank holds other weights than were sent, twice in a row.
        """
        self._brought = {}
        start_s, before, prompts = time.monotonic(), dict(self._session.totals), self._loader.next_batch()
        self._trainers(Phase.OFFLOAD, "offload")
        samples = self._roll_out(prompts, step)
        rewards = self._rewards(prompts, samples)
        self._trainers(Phase.ONLOAD, "onload")
        shards, gap = self._logprobs(self._shard(self._pack(samples, rewards)), step)
        update = self._update(shards, step)
        proof = self._sync()
        return {
            **_reward_metrics(rewards, samples),
            **gap,
            **update,
            **self._brought,
            **proof,
            **self._engines.metrics(),
            **_phase_seconds(before, self._session.totals),
            names.STEP_SECONDS: time.monotonic() - start_s,
        }

    def sync_weights(self) -> None:
        """Sends the trainers' weights to the rollout ranks, e.g. after a checkpoint was loaded."""
        self._sync()

    def _trainers(
        self, phase: Phase, method: str, arguments: Callable[[int], tuple[Any, ...]] = lambda _: ()
    ) -> list[Any]:
        self._on_phase(phase)
        return self._session.finish(self._session.start_trainers(phase, method, arguments))

    def _roll_out(self, prompts: Sequence[Prompt], step: int) -> list[Sample]:
        self._on_phase(Phase.ROLLOUT)
        return self._engines.generate([p.messages for p in prompts], step, bring_weights=self._bring_weights)

    def _bring_weights(self) -> None:
        """Sends the weights in the middle of a rollout, after all engines that had them were lost."""
        self._trainers(Phase.ONLOAD, "onload")
        self._brought = self._sync()
        self._trainers(Phase.OFFLOAD, "offload")

    def _rewards(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Rewards:
        self._on_phase(Phase.REWARD)
        per_sample = [prompts[i // self._config.rollout.n] for i in range(len(samples))]

        def compute() -> list[float]:
            return [
                self._reward(p.data_source, s.text, p.ground_truth, p.extra_info)
                for p, s in zip(per_sample, samples, strict=True)
            ]

        return np.array(self._session.run_here(Phase.REWARD, compute), np.float32)

    def _pack(self, samples: Sequence[Sample], rewards: Rewards) -> SequenceBatch:
        advantages = estimate_advantages(rewards, group_size=self._config.rollout.n, config=self._config.algorithm)
        length = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
        multiple = self._config.megatron.sequence_multiple
        return pack(samples, advantages, length=-(-length // multiple) * multiple)

    def _shard(self, batch: SequenceBatch) -> list[SequenceBatch]:
        per_rank = len(batch) // self._layout.data
        # Interleaved, so that each mini-batch of whole prompt groups is spread over the data-parallel ranks.
        return [
            batch.select(np.arange(rank, rank + per_rank * self._layout.data, self._layout.data))
            for rank in range(self._layout.data)
        ]

    def _shard_of(self, shards: Sequence[Any]) -> Callable[[int], tuple[Any, ...]]:
        return lambda rank: (shards[self._layout.coordinates(rank).data],)

    def _logprobs(self, shards: list[SequenceBatch], step: int) -> tuple[list[SequenceBatch], Metrics]:
        results = self._trainers(Phase.LOGPROB, "logprob", self._shard_of(shards))
        filled = list(shards)
        for rank, (old, ref) in enumerate(results):
            if old is not None:
                data = self._layout.coordinates(rank).data
                filled[data] = shards[data].with_logprobs(old=old, ref=ref)
        gaps = _logprob_gaps(filled)
        largest, bound = float(gaps.max()), self._config.rollout.max_logprob_gap
        # In this form the check fails for NaN, too.
        if not largest <= bound:
            raise LogprobGapError(step=step, gap=largest, bound=bound)
        return filled, {
            names.LOGPROB_GAP_MAX: largest,
            names.LOGPROB_GAP_MEAN: float(gaps.mean()),
            names.LOGPROB_GAP_MEDIAN: float(np.median(gaps)),
        }

    def _update(self, shards: list[SequenceBatch], step: int) -> Metrics:
        prompts = self._config.actor.ppo_mini_batch_size or self._config.data.train_batch_size
        mini_batch = prompts * self._config.rollout.n // self._layout.data
        shard_of = self._shard_of(shards)
        updates = self._trainers(Phase.TRAIN, "train", lambda rank: (*shard_of(rank), mini_batch))
        metrics = _update_metrics(updates, self._config)
        # Checked before the update reaches the rollout or a checkpoint. Megatron skips a step whose gradient is not
        # finite.
        skipped = any(update["updated"] == 0 for of_rank in updates for update in of_rank)
        if skipped or not math.isfinite(metrics[names.LOSS]) or not math.isfinite(metrics[names.GRAD_NORM]):
            raise DivergedError(step=step, loss=metrics[names.LOSS], grad_norm=metrics[names.GRAD_NORM])
        return metrics

    def _sync(self) -> Metrics:
        """Syncs the weights. If a proved sync turns out wrong, it is redone once."""
        self._on_phase(Phase.SYNC)
        proved = self._engines.sync()
        if proved is None:
            return {}
        return {
            names.PROVED: proved.proof.proved,
            names.NOT_PROVED: proved.proof.not_proved,
            names.REDONE: proved.redone,
            names.PROOF_SECONDS: proved.seconds,
        }


def _logprob_gaps(shards: Sequence[SequenceBatch]) -> NDArray[np.float32]:
    """Returns the absolute log-probability difference, trainer to rollout, in nats.

    Shape ``[number of sampled tokens]``, float32.
    """
    gaps = []
    for shard in shards:
        assert shard.old_logprobs is not None, "each data-parallel rank returns log-probabilities"
        gaps.append(abs(shard.old_logprobs - shard.rollout_logprobs)[shard.response_mask > 0])
    return np.concatenate(gaps)


def _reward_metrics(rewards: Rewards, samples: Sequence[Sample]) -> Metrics:
    return {
        names.REWARD_MEAN: float(rewards.mean()),
        names.REWARD_MAX: float(rewards.max()),
        names.RESPONSE_LENGTH_MEAN: float(np.mean([len(s.response_ids) for s in samples])),
    }


def _update_metrics(updates: Sequence[Sequence[dict[str, float]]], config: RunConfig) -> Metrics:
    sums: defaultdict[str, float] = defaultdict(float)
    for of_rank in updates:
        for update in of_rank:
            for key in ("loss", "tokens", "kl", "clipped"):
                sums[key] += update[key]
    tokens = max(1.0, sums["tokens"])
    return {
        names.LOSS: sums["loss"] / tokens,
        names.KL: sums["kl"] / tokens,
        names.CLIP_FRACTION: sums["clipped"] / tokens,
        names.GRAD_NORM: max(update["grad_norm"] for update in updates[0]),
        names.LEARNING_RATE: config.actor.optim.lr,
        METRIC: max(update["memory_growth_mib"] for of_rank in updates for update in of_rank),
    }


def _phase_seconds(before: Mapping[str, PhaseTotal], after: Mapping[str, PhaseTotal]) -> Metrics:
    """Returns the seconds that each phase took between two totals, under ``timing_s/<phase>``."""
    grown = {phase: total.total_s - before.get(phase, PhaseTotal()).total_s for phase, total in after.items()}
    return {names.phase_seconds_name(phase): seconds for phase, seconds in grown.items() if seconds > 0}
