"""The same computations in one transformers process: what the trainers are compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rl_safe_workers.config import ActorConfig
from rl_safe_workers.trainer.batch import SequenceBatch
from rl_safe_workers.trainer.loss import policy_loss


def load(path: Path) -> torch.nn.Module:
    """Loads the HF model in fp32, with the attention that uses no fused kernel."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def random_batch(*, rows: int, length: int = 40, seed: int = 0) -> SequenceBatch:
    """Random tokens with prompts and responses of several lengths, and random advantages."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((rows, length), np.float32)
    tokens = rng.integers(8, 100, (rows, length))
    for row in range(rows):
        prompt, stop = int(rng.integers(2, 10)), int(rng.integers(20, length + 1))
        mask[row, prompt:stop] = 1
        tokens[row, stop:] = 0
    return SequenceBatch(
        tokens=tokens.astype(np.int64),
        response_mask=mask,
        rollout_logprobs=np.zeros_like(mask),
        advantages=rng.normal(size=rows).astype(np.float32),
    )


def logprobs(model: torch.nn.Module, batch: SequenceBatch) -> torch.Tensor:
    """``[n, length]``: position t speaks of token t; 0 at t = 0."""
    tokens = torch.from_numpy(batch.tokens)
    logits = model(input_ids=tokens).logits[:, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0))


def grpo_step(model: torch.nn.Module, batch: SequenceBatch, config: ActorConfig) -> float:
    """One optimizer step on the whole batch: token-mean loss, clipped gradient, AdamW. Returns the gradient norm."""
    optim = config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=0.0
    )
    mask = torch.from_numpy(batch.response_mask)
    old = torch.from_numpy(batch.old_logprobs) if batch.old_logprobs is not None else logprobs(model, batch).detach()
    loss = policy_loss(logprobs(model, batch), old, torch.from_numpy(batch.advantages), mask, config)
    (loss.total / loss.tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
    optimizer.step()
    return float(norm)


def hf_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's weights under the names of its safetensors, experts one by one."""
    import tempfile

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(Path(directory) / "model.safetensors")
