"""Runs a vLLM engine as a rollout rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import RolloutError
from rl_safe_workers.lifecycle import Lifecycle, Phase
from rl_safe_workers.platforms import cuda
from rl_safe_workers.platforms.device_memory import SHARED_PHASES
from rl_safe_workers.ranks import Role
from rl_safe_workers.rollout import vllm_transfer
from rl_safe_workers.rollout.protocol import Sample, WeightSpec
from rl_safe_workers.rollout.sync_proof import HeldWeights
from rl_safe_workers.rollout.tokens import ChatTokenizer
from rl_safe_workers.topology.layout import ModelShape
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.engine_world import EngineWorld


def request_seed(seed: int, step: int, prompt: int, sample: int) -> int:
    """Returns the seed of one request. It depends only on the arguments, not on the engine or the batch."""
    return int(np.random.SeedSequence([seed, step, prompt, sample]).generate_state(1)[0] >> 1)


FREE_AT_START = 0.05
"""Share of a GPU's memory that vLLM requires to be free at its start."""
_SHARED_MEMORY = Path("/dev/shm")
_OF_SHARED: Mapping[str, Any] = {
    # Each rank of an engine is a process of ours and schedules the same requests in the same order.
    "distributed_executor_backend": "external_launcher",
    # vLLM's custom all-reduce maps memory of the other ranks' GPUs, so a rank would have to see those GPUs.
    "disable_custom_all_reduce": True,
}
"""Further arguments of an engine that several ranks share."""


def _weight_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in model.parameters())


def _obstacle(worker: Any) -> str | None:
    obstacle: str | None = worker.weight_transfer_engine.obstacle
    return obstacle


def _held_weights(worker: Any) -> dict[str, Any]:
    held: HeldWeights = worker.weight_transfer_engine.held
    return held.as_dict()


class VllmRollout:
    """A rollout rank: generates, and receives weights from the trainers through vLLM's weight-transfer interface."""

    def __init__(self, config: RunConfig, *, rollout_rank: int) -> None:
        """Stores the configuration; `start` builds the engine."""
        self.config, self.rollout_rank = config, rollout_rank
        self.lifecycle = Lifecycle(role=Role.ROLLOUT, rank=rollout_rank)
        self._world = EngineWorld(rollout_rank, size=config.rollout.tensor_model_parallel_size)
        self._asleep: set[str] = set()
        self._lacks_weights = "the engine has not been built"
        """The reason why the engine has no weights to generate with; empty if it has weights."""
        self._owned: dict[str, int] = {}
        """Bytes of device memory by owner, while the engine is awake."""

    def serve_store(self, host: str) -> StoreAddress | None:
        """Starts the engine's store on its first rank. Returns its address; None on the other ranks. Not collective.

        Args:
            host: Address of this rank's node.
        """
        return self._world.serve_store(host, timeout=self._start_timeout)

    def start(self, launched_s: float, address: StoreAddress | None = None) -> None:
        """Builds the engine with the HF weights of ``model.path``. Collective over: the rollout ranks of the engine.

        Args:
            launched_s: Unix time in seconds at which the driver asked for this process. The start phase then includes
                the imports.
            address: Address of the engine's store; None for an engine of one rank.

        Raises:
            PhaseTimeoutError: If another rank of the engine does not come in time; names it.
        """
        if self.config.cluster.device == "cuda":
            self.lifecycle.observer = cuda.observer(
                self._owned_bytes,
                mapped=self._mapped_bytes,
                shared=SHARED_PHASES if self.config.cluster.colocated else (),
            )
        with self.lifecycle.enter(Phase.START, since_s=launched_s):
            vllm_transfer.register()
            if current_platform.is_cpu():
                # vLLM compiles small helpers at their first call, even with enforce_eager. That takes seconds, needs a
                # C++ compiler, and leaves a cache in the folder for temporary files.
                torch.compiler.set_stance("force_eager")
            config = self.config
            self._tokenizer = ChatTokenizer(config.model.path, max_prompt_length=config.data.max_prompt_length)
            if address is None:
                self._llm = self._build()
            else:
                with self._world.entered(address, timeout=self._start_timeout):
                    self._llm = self._build_shared(EngineWorld.name(address))
            (weights,) = self._llm.apply_model(_weight_bytes)
            self._owned = {"weights": weights, "kv_cache": int(config.rollout.kv_cache_gib * 2**30)}
            self._lacks_weights = ""
            # The trainer on this GPU builds its model next. The weights are kept, because no sync precedes the first
            # rollout.
            self._sleep(level=1)

    @property
    def _start_timeout(self) -> timedelta:
        return timedelta(seconds=self.config.rl_safe.timeouts.start)

    def _build_shared(self, name: str) -> LLM:
        """Builds this rank's part of an engine that several ranks share; ``name`` is the engine's."""
        # vLLM would take the rank from the environment. The default group exists, so no rank connects to the address.
        # vLLM's CPU backend names its shared memory after the text behind the last colon.
        ExecutorWithExternalLauncher._distributed_args = lambda _: (f"default_group:{name}", self._world.rank, 0)
        llm = self._build()
        # All ranks have opened each other's shared memory. Without a file name, the kernel frees it when they end.
        for file in _SHARED_MEMORY.glob(f"{name}-*_{self._world.rank}"):
            file.unlink()
        return llm

    def _build(self) -> LLM:
        config = self.config
        return LLM(
            model=config.model.path,
            dtype=config.model.dtype,
            skip_tokenizer_init=True,
            trust_remote_code=False,
            load_format="safetensors",
            enforce_eager=True,
            seed=config.trainer.seed,
            block_size=config.rollout.block_size,
            kv_cache_memory_bytes=int(config.rollout.kv_cache_gib * 2**30),
            # vLLM requires this share to be free at its start, whatever the size of the cache. It is small, because a
            # trainer may already use the GPU.
            gpu_memory_utilization=FREE_AT_START,
            enable_sleep_mode=config.cluster.colocated,
            max_model_len=config.data.max_prompt_length + config.data.max_response_length,
            # Log-probabilities of the sampling distribution, temperature included, so that the trainer's can match.
            logprobs_mode="processed_logprobs",
            enable_return_routed_experts=config.rollout.enable_rollout_routing_replay,
            weight_transfer_config={"backend": vllm_transfer.BACKEND},
            disable_log_stats=True,
            tensor_parallel_size=self._world.size,
            **(_OF_SHARED if self._world.size > 1 else {}),
        )

    def _owned_bytes(self) -> dict[str, int]:
        return {owner: 0 if owner in self._asleep else size for owner, size in self._owned.items()}

    def _mapped_bytes(self) -> int:
        """Returns the bytes that torch has reserved, minus sleeping memory, which torch still counts."""
        return torch.cuda.memory_reserved() - sum(self._owned[owner] for owner in self._asleep)

    def _sleep(self, *, level: int) -> None:
        """Frees GPU memory for the trainer. Level 1 keeps the weights in host memory; level 2 keeps nothing."""
        if self.config.cluster.colocated:
            self._llm.sleep(level=level)
            if level > 1:
                self._lacks_weights = "no weight sync has come since the last rollout gave the weights' memory away"
            self._asleep = {"weights", "kv_cache"}

    def _wake(self, *tags: str) -> None:
        """Reallocates the memory of ``weights`` or ``kv_cache``, if it sleeps."""
        if wanted := [tag for tag in tags if tag in self._asleep]:
            self._llm.wake_up(tags=wanted)
            self._asleep -= set(wanted)

    def join(
        self,
        address: StoreAddress,
        rollout_ranks: Sequence[int],
        specs: Sequence[WeightSpec],
        generation: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Joins the joint group. Collective over: trainers and rollout ranks.

        Args:
            address: Address of the run's store.
            rollout_ranks: Rollout ranks in the group, ascending.
            specs: The weights of every weight sync, in the order of sending.
            generation: Number of rebuilds of the group so far.
            timeout_s: Longest wait for the others in seconds; None: ``rl_safe.timeouts.joint``.
        """
        with self.lifecycle.enter(Phase.JOINT):
            init_info = {
                **asdict(address),
                "secret": address.secret.hex(),  # as text, because vLLM may pass it to another process
                "rollout_rank": self.rollout_rank,
                "rollout_ranks": list(rollout_ranks),
                "trainers": self.config.cluster.num_trainers,
                "generation": generation,
                "join_timeout_s": self.config.rl_safe.timeouts.joint if timeout_s is None else timeout_s,
                "sync_timeout_s": self.config.rl_safe.timeouts.sync,
                "colocated": self.config.cluster.colocated,
                "specs": [asdict(spec) for spec in specs],
                "bucket_bytes": self.config.rollout.bucket_bytes,
                "kv_heads": ModelShape.of_model(self.config.model.path).num_key_value_heads,
            }
            self._llm.init_weight_transfer_engine({"init_info": init_info})

    def receive_weights(self, prove: bool = False) -> HeldWeights | None:
        """Receives all weights from the trainers. Collective over: the joint group.

        Drops the prefix cache, because it was computed with the old weights.

        Args:
            prove: True to read the weights back.

        Returns:
            The digests of the weights that this rank now holds; None without ``prove``.
        """
        with self.lifecycle.enter(Phase.SYNC):
            self._wake("weights")
            self._lacks_weights = "a weight sync has not ended"
            self._llm.start_weight_update()
            self._llm.update_weights({"update_info": {"prove": prove}})
            self._llm.finish_weight_update()
            self._lacks_weights = ""
            self._llm.reset_prefix_cache()
            if not prove:
                return None
            (held,) = self._llm.collective_rpc(_held_weights)
            return HeldWeights(**held)

    def loads_through(self) -> str | None:
        """Returns why weight updates use the model's loaders; None if they are copied directly. Not collective."""
        (obstacle,) = self._llm.collective_rpc(_obstacle)
        return None if obstacle is None else str(obstacle)

    def generate(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], first_prompt: int, step: int
    ) -> list[Sample]:
        """Samples ``rollout.n`` responses to each prompt. Collective over: the rollout ranks of the engine.

        Args:
            conversations: The chat messages of each prompt.
            first_prompt: Index of the first prompt within the step, for the seeds.
            step: The training step, for the seeds.

        Returns:
            ``rollout.n`` consecutive samples for each prompt, in the order of the prompts. All ranks of an engine get
            the same prompts. Only the first rank returns samples. The others return an empty list.

        Raises:
            DataError: If a prompt is too long.
            RolloutError: If the engine has no complete weights, or if vLLM does not return the experts that routing
                replay needs.
        """
        with self.lifecycle.enter(Phase.ROLLOUT):
            if self._lacks_weights:
                raise RolloutError(f"the engine has no weights to generate with: {self._lacks_weights}")
            self._wake("weights", "kv_cache")
            prompts, params = [], []
            for i, messages in enumerate(conversations):
                tokens = self._tokenizer.encode(messages, where=f"prompt {first_prompt + i} of step {step}")
                for j in range(self.config.rollout.n):
                    prompts.append({"prompt_token_ids": tokens})
                    params.append(self._sampling_params(step, first_prompt + i, j))
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            # An update and a sync come before the next rollout, so neither the weights nor the cache are needed.
            self._sleep(level=2)
            return [] if self._world.rank else [self._to_sample(output) for output in outputs]

    def _sampling_params(self, step: int, prompt: int, sample: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.config.rollout.temperature,
            max_tokens=self.config.data.max_response_length,
            seed=request_seed(self.config.trainer.seed, step, prompt, sample),
            stop_token_ids=self._tokenizer.stop_token_ids,
            logprobs=0,  # only of the sampled token
            detokenize=False,
        )

    def _to_sample(self, output: Any) -> Sample:
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        experts = None
        if self.config.rollout.enable_rollout_routing_replay:
            experts = completion.routed_experts
            if experts is None or len(experts) != len(output.prompt_token_ids) + len(token_ids) - 1:
                raise RolloutError(
                    f"vLLM returned the experts of {0 if experts is None else len(experts)} tokens, for a prompt of "
                    f"{len(output.prompt_token_ids)} and a response of {len(token_ids)}: it is none of the versions "
                    "that rollout.enable_rollout_routing_replay works with"
                )
        return Sample(
            prompt_ids=list(output.prompt_token_ids),
            response_ids=token_ids,
            logprobs=[at[token].logprob for at, token in zip(completion.logprobs, token_ids, strict=True)],
            text=self._tokenizer.decode(token_ids),
            routed_experts=experts,
        )

    def teardown(self) -> None:
        """Leaves the joint group and frees the engine. Idempotent. Works after a partial set-up, too."""
        with self.lifecycle.enter(Phase.TEARDOWN):
            llm = self.__dict__.pop("_llm", None)
            if llm is not None:
                # vLLM 0.25 has no such method; the engine's own shutdown below does the same there.
                if hasattr(llm, "shutdown_weight_transfer_engine"):
                    llm.shutdown_weight_transfer_engine()
                # A sleeping engine of several ranks has communicators whose memory is unmapped. Freeing them would end
                # the process by SIGSEGV (vLLM 0.25.1, pynccl.py:162). So they stay until the process ends.
                if not (self._asleep and self.config.rollout.tensor_model_parallel_size > 1):
                    llm.llm_engine.engine_core.shutdown()
