"""A trainer of the built-in run: the safety mixins over the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from rl_safe_workers.checkpoint.folders.manifest import model_fingerprint
from rl_safe_workers.comms.releasable import register_backend
from rl_safe_workers.config import ModelConfig, RunConfig
from rl_safe_workers.lifecycle import Lifecycle, Phase
from rl_safe_workers.model_files import read_model_json
from rl_safe_workers.platforms.device_memory import SHARED_PHASES, UNMOVED_PHASES, megatron_owned
from rl_safe_workers.platforms.platform import Platform, open_platform
from rl_safe_workers.ranks import Role
from rl_safe_workers.rollout.cuts import engine_ranks
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.sync_proof import SentWeights
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.topology.layout import ModelShape
from rl_safe_workers.trainer.batch import Floats, SequenceBatch
from rl_safe_workers.trainer.policy import DTYPES, MegatronPolicy, sends_shapes
from rl_safe_workers.workers.actor import MegatronActorMixin
from rl_safe_workers.worlds.address import StoreAddress


def _features_of_model(model: ModelConfig) -> dict[str, Any]:
    file = Path(model.path) / "config.json"
    if model.create is not None and not file.exists():
        # Without model files, only a bootstrap is wanted, because a run makes its model first.
        return {"moe": model.create.num_experts > 0, "tied_embeddings": False}
    config = read_model_json(file)
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    return {
        "moe": any(config.get(key) for key in experts),
        # As in verl's adapter: the routers of DeepSeek-V3 and GLM-4-MoE have biases.
        "expert_bias": bool(config.get("n_routed_experts")),
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


class TrainerWorker(MegatronActorMixin, MegatronPolicy):
    """One training rank. The driver calls the methods that have a phase's name on all trainers at once."""

    _platform: Platform

    def __init__(self, config: RunConfig, *, training_rank: int) -> None:
        """Records the configuration; `start` prepares the platform."""
        self.config, self._rank = config, training_rank
        self.chunks = []  # until `convert` builds the model
        # The trainer's own, once `start` has set it up.
        self.lifecycle = Lifecycle(role=Role.TRAINER, rank=training_rank)

    def start(self, launched_s: float) -> None:
        """Prepares the platform. Not collective.

        Args:
            launched_s: Unix time in seconds at which the driver asked for this process. The start phase then includes
                the imports.
        """
        torch.set_num_threads(1)
        self._platform = open_platform(self.config.cluster.device)
        observer = self._platform.observer(
            self._owned_bytes,
            shared=SHARED_PHASES if self.config.cluster.colocated else (),
            unmoved=UNMOVED_PHASES,
        )
        self.device = self._platform.start()
        wanted = self.config.rollout.release_comms
        self.setup_worker(
            training_rank=self._rank,
            training_size=self.config.cluster.num_trainers,
            rl_safe=self.config.rl_safe,
            megatron=self.config.megatron,
            device=self.device,
            features=replace(
                Features.of(self.config.megatron, colocated=self.config.cluster.colocated),
                batched_p2p=False,  # mbridge's choice
                variable_seq_lengths=sends_shapes(self.config.megatron),
                **_features_of_model(self.config.model),
            ),
            releases_comms=wanted == "always" or (wanted == "auto" and self.config.cluster.colocated),
        )
        self.lifecycle = self.safe.lifecycle
        self.lifecycle.observer = observer
        with self.lifecycle.enter(Phase.START, since_s=launched_s):
            torch.manual_seed(self.config.trainer.seed)

    def _owned_bytes(self) -> dict[str, int]:
        return megatron_owned(self.chunks, self.optimizer)

    def groups(self) -> None:
        """Creates Megatron's groups. Collective over: the training world."""
        self.init_groups(seed=self.config.trainer.seed)

    def enter_world(self, address: StoreAddress) -> None:
        """Joins the training world in isolated mode."""
        backend = self._platform.BACKEND
        if self.safe.offloader.releases_comms and not self.safe.offloader.suspends_comms:
            backend = register_backend("nccl" if self.device.type == "cuda" else "gloo")
        self.init_world(address, backend=backend)

    def meet_rollouts(self, rollout_ranks: Sequence[int], generation: int = 0, timeout_s: float | None = None) -> None:
        """Joins the joint group. Collective over: trainers and rollout ranks.

        Args:
            rollout_ranks: Rollout ranks in it, ascending.
            generation: Number of rebuilds of the group so far.
            timeout_s: Longest wait for the others in seconds; None: ``rl_safe.timeouts.joint``.
        """
        self.join(
            self.config.cluster.num_trainers + len(rollout_ranks),
            generation=generation,
            colocated=self.config.cluster.colocated,
            rollout_ranks=rollout_ranks,
            engine=engine_ranks(
                self.config.rollout.tensor_model_parallel_size,
                ModelShape.of_model(self.config.model.path).num_key_value_heads,
            ),
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
        )

    def convert(self) -> Sequence[WeightSpec]:
        """Builds the model from HF weights. Returns the weights of every sync. Collective over: the training world."""
        with self.phase(Phase.CONVERT):
            self.build()
            specs = self.weight_specs()
            return specs if self._rank == 0 else ()

    def convert_to_megatron(self, hf_dir: Path, out_dir: Path, overwrite: bool) -> str:
        """Converts HF weights, without an optimizer; returns the conversion's path. Collective: training world."""
        with self.phase(Phase.CONVERT):
            self.build_model()
        return str(self.convert_checkpoint(hf_dir, out_dir, overwrite=overwrite))

    def convert_to_hf(self, path: Path, out_dir: Path, dtype: str | None, overwrite: bool) -> str:
        """Converts a Megatron checkpoint of the model at ``model.path``; returns the HF directory. Collective."""
        with self.phase(Phase.CONVERT):
            self.build_model()
        self.load_model_weights(path)
        exported = self.export_hf(
            out_dir, source=self.config.model.path, dtype=None if dtype is None else DTYPES[dtype], overwrite=overwrite
        )
        return str(exported)

    def sync(self, prove: bool = False) -> SentWeights:
        """Sends all weights to the rollout ranks; returns their digests. Collective over: the joint group."""
        self.send_weights(bucket_bytes=self.config.rollout.bucket_bytes, prove=prove)
        return self.safe.weights.sent

    def logprob(self, batch: SequenceBatch) -> tuple[Floats | None, Floats | None]:
        """Returns old and, with a KL loss, reference log-probabilities. Collective over: the training world."""
        with self.phase(Phase.LOGPROB):
            old = self.compute_logprobs(batch)
            ref = self.compute_reference_logprobs(batch) if self.config.actor.use_kl_loss else None
            return old, ref

    def train(self, batch: SequenceBatch, mini_batch_size: int) -> list[dict[str, float]]:
        """Updates the policy. Collective over: the training world."""
        with self.phase(Phase.TRAIN):
            updates = self.update_policy(batch, mini_batch_size=mini_batch_size)
        self.safe.memory.step()
        return [{**update, "memory_growth_mib": self.safe.memory.growth_mib} for update in updates]

    def save(self, step: int, layout: Mapping[str, int], driver_state: dict[str, Any]) -> Path:
        """Saves a checkpoint of this step. Collective over: the training world."""
        assert self.config.trainer.default_local_dir is not None, "filled before the run starts"
        return self.save_checkpoint(
            self.config.trainer.default_local_dir,
            step=step,
            fingerprint=model_fingerprint(self.config.model.path),
            layout=layout,
            driver_state=driver_state,
        )

    def load(self, path: Path, layout: Mapping[str, int]) -> None:
        """Loads a checkpoint. Collective over: the training world."""
        self.load_checkpoint(path, fingerprint=model_fingerprint(self.config.model.path), layout=layout)
