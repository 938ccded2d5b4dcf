"""The policy on one training rank: a Megatron model, its optimizer, and GRPO's computations with them.

It plays the host's part in the built-in trainer. The safety mixins of ``workers`` extend it, or a host framework's own
class.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from rl_safe_workers.config import MegatronConfig, RunConfig
from rl_safe_workers.models.bridge import WeightBridge, open_bridge
from rl_safe_workers.models.build import build_chunks, build_optimizer, wrap_data_parallel
from rl_safe_workers.models.layer_choice import takes_transformer_engine
from rl_safe_workers.models.own_weights import OwnWeight
from rl_safe_workers.trainer.batch import Floats, SequenceBatch
from rl_safe_workers.trainer.loss import policy_loss
from rl_safe_workers.trainer.routing import Routing, forget_routers

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def sends_shapes(config: MegatronConfig) -> bool:
    """Returns True if pipeline stages send each other the shapes of their tensors.

    Shapes vary only with the all-to-all dispatcher. The all-gather dispatcher refuses the setting.
    """
    return config.moe_token_dispatcher_type == "alltoall"


def _layer_settings(config: MegatronConfig) -> dict[str, Any]:
    """Returns the fields of Megatron's TransformerConfig for Transformer Engine's layers."""
    return {
        "moe_grouped_gemm": config.moe_grouped_gemm is not False,
        "fp8": config.fp8,
        "fp8_recipe": config.fp8_recipe,
    }


def _on_host(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory, so that it takes no device memory during a rollout."""
    return tensor.to("cpu", copy=True)


class MegatronPolicy:
    """Builds the model of this rank's tensor, pipeline and expert shards; computes log-probabilities; takes steps.

    Every public method is collective over the training world.

    Attributes:
        config: The run's configuration.
        bridge: Maps HF weights to the model and back; ``bridge.config`` is Megatron's TransformerConfig.
        chunks: This rank's model chunks, wrapped in DistributedDataParallel once there is an optimizer.
        optimizer: Megatron's DistributedOptimizer; None for a model that is only converted.
        device: The device of the batches.
    """

    config: RunConfig
    device: torch.device
    bridge: WeightBridge
    chunks: list[Any]
    optimizer: Any = None
    _reference: list[Tensor] | None
    _routing: Routing

    def build_model(self) -> None:
        """Builds this rank's model chunks, without useful weights yet. Needs Megatron's groups."""
        megatron = self.config.megatron
        transformer_engine = takes_transformer_engine(megatron)
        self.bridge = open_bridge(
            self.config.model.path,
            dtype=DTYPES[self.config.model.dtype],
            transformer_engine=transformer_engine,
            library=self.config.model.bridge,
            **(_layer_settings(megatron) if transformer_engine else {}),
            moe_token_dispatcher_type=megatron.moe_token_dispatcher_type,
            variable_seq_lengths=sends_shapes(megatron),
            # Only the policy's gradient changes the experts' load.
            moe_aux_loss_coeff=0.0,
            moe_router_bias_update_rate=0.0,
            # Token losses are summed, and divided once, at the end, by the token count of the whole mini-batch.
            calculate_per_token_loss=True,
            moe_enable_routing_replay=self.config.rollout.enable_rollout_routing_replay,
        )
        forget_routers()
        self.chunks = build_chunks(self.bridge)

    def build(self) -> None:
        """Builds model and optimizer and loads the HF weights into them. Needs Megatron's groups."""
        self.build_model()
        self.load_hf_weights(self.config.model.path)
        instances = self.config.megatron.num_distributed_optimizer_instances
        self.chunks = wrap_data_parallel(self.chunks, self.bridge.config, optimizer_instances=instances)
        dtype = DTYPES[self.config.model.dtype]
        self._routing = Routing(self.chunks, self.bridge.config)
        self.optimizer = build_optimizer(self.chunks, self.config.actor.optim, dtype=dtype)
        self.bridge.config.grad_scale_func = self.optimizer.scale_loss
        self.bridge.config.finalize_model_grads_func = finalize_model_grads
        self._reference = [_on_host(b.param_data) for b in self._buffers()] if self.config.actor.use_kl_loss else None

    def _buffers(self) -> Iterator[Any]:
        for chunk in self.chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    @property
    def holds_logprobs(self) -> bool:
        """True if this rank returns log-probabilities: TP rank 0 of the last pipeline stage."""
        return bool(parallel_state.is_pipeline_last_stage()) and parallel_state.get_tensor_model_parallel_rank() == 0

    def _token_logprobs(self, model: Any, tokens: Tensor) -> Tensor:
        """Returns a chunk's output. The last chunk's is ``[b, s]``, nats: position t is about token t; 0 at t = 0."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        output: Tensor = model(input_ids=tokens, position_ids=positions, attention_mask=None)
        if not get_attr_wrapped_model(model, "post_process"):
            return output
        # [b, s, vocab / TP]: the logits at t - 1 predict token t.
        logits = output[:, :-1].float() / self.config.rollout.temperature
        nll = tensor_parallel.vocab_parallel_cross_entropy(
            logits.transpose(0, 1).contiguous(), tokens[:, 1:].transpose(0, 1).contiguous()
        )
        return torch.nn.functional.pad(-nll.transpose(0, 1), (1, 0))

    def _run_schedule(self, batch: SequenceBatch, loss_func: Any, *, forward_only: bool) -> list[Any]:
        micro = self.config.actor.ppo_micro_batch_size_per_gpu
        micro_batches = [batch.select(slice(i, i + micro)) for i in range(0, len(batch), micro)]

        def forward_step(data: Iterator[SequenceBatch], model: Any) -> tuple[Tensor, Any]:
            micro_batch = next(data)
            tokens = torch.tensor(micro_batch.tokens, device=self.device)
            self._routing.replay(model, micro_batch.routed_experts, device=self.device)
            return self._token_logprobs(model, tokens), partial(loss_func, micro_batch)

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            # Each virtual stage goes through all micro-batches.
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro_batches),
            seq_length=batch.tokens.shape[1],
            micro_batch_size=micro,
            forward_only=forward_only,
        )
        return results

    @torch.no_grad()
    def compute_logprobs(self, batch: SequenceBatch) -> Floats | None:
        """Returns the log-probabilities of a data-parallel rank's sequences under the current weights.

        Args:
            batch: The sequences of this rank's data-parallel rank, ``[n, length]``.

        Returns:
            ``[n, length]``, fp32, nats, 0 outside the responses; None where ``holds_logprobs`` is False.
        """

        def collect(micro_batch: SequenceBatch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
            mask = torch.tensor(micro_batch.response_mask, device=logprobs.device)
            return logprobs.new_zeros(()), logprobs * mask

        for chunk in self.chunks:
            chunk.eval()
        results = self._run_schedule(batch, collect, forward_only=True)
        if not self.holds_logprobs:
            return None
        logprobs: Floats = np.concatenate([r.cpu().numpy() for r in results])
        return logprobs

    @torch.no_grad()
    def compute_reference_logprobs(self, batch: SequenceBatch) -> Floats | None:
        """Does the same as `compute_logprobs` with the starting weights, which replace the current ones meanwhile."""
        assert self._reference is not None, "the reference is kept only with actor.use_kl_loss"
        buffers = list(self._buffers())
        current = [_on_host(b.param_data) for b in buffers]
        try:
            for buffer, reference in zip(buffers, self._reference, strict=True):
                buffer.param_data.copy_(reference)
            return self.compute_logprobs(batch)
        finally:
            for buffer, weights in zip(buffers, current, strict=True):
                buffer.param_data.copy_(weights)

    def _optimizer_step(self, batch: SequenceBatch) -> dict[str, float]:
        actor = self.config.actor

        def loss_func(micro_batch: SequenceBatch, logprobs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            def on_device(array: Floats) -> Tensor:
                return torch.tensor(array, device=logprobs.device)

            assert micro_batch.old_logprobs is not None
            loss = policy_loss(
                logprobs,
                on_device(micro_batch.old_logprobs),
                on_device(micro_batch.advantages),
                on_device(micro_batch.response_mask),
                actor,
                ref=None if micro_batch.ref_logprobs is None else on_device(micro_batch.ref_logprobs),
            )
            sums = {"loss": loss.total.detach(), "tokens": loss.tokens, "kl": loss.kl, "clipped": loss.clipped}
            return loss.total, loss.tokens, sums

        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = self._run_schedule(batch, loss_func, forward_only=False)
        updated, grad_norm, _ = self.optimizer.step()
        sums = {key: sum(float(r[key]) for r in results) for key in ("loss", "tokens", "kl", "clipped")}
        return {**sums, "grad_norm": float(grad_norm or 0.0), "updated": float(updated)}

    def update_policy(self, batch: SequenceBatch, *, mini_batch_size: int) -> list[dict[str, float]]:
        """Takes one optimizer step for each mini-batch of each epoch.

        Args:
            batch: The sequences of this rank's data-parallel rank, with ``old_logprobs``.
            mini_batch_size: Sequences of this data-parallel rank per optimizer step.

        Returns:
            For each optimizer step the sums ``loss``, ``tokens``, ``kl`` and ``clipped`` over this rank's tokens
            (empty sums except on the last pipeline stage), the global ``grad_norm``, and ``updated`` (0 if Megatron
            skipped the step for a gradient that is not finite).
        """
        starts = range(0, len(batch), mini_batch_size)
        return [
            self._optimizer_step(batch.select(slice(start, start + mini_batch_size)))
            for _ in range(self.config.actor.ppo_epochs)
            for start in starts
        ]

    def load_hf_weights(self, path: str) -> None:
        """Reads the HF weights of a directory into the model chunks, one by one. Does not change the optimizer."""
        self.bridge.load_weights(self.chunks, path)

    def export_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every whole HF weight on every rank, in the same order. Each item is collective.

        A tensor may alias a live parameter. Clone a tensor that must outlive its iteration.
        """
        for name, tensor in self.bridge.export_weights(self.chunks):
            yield name, tensor.detach()
            del tensor  # frees it before the next one is made

    def own_hf_weights(self) -> list[OwnWeight] | None:
        """Returns the HF weights that this rank's tensor-parallel group can build; None if the bridge cannot tell."""
        return self.bridge.own_weights(self.chunks)
