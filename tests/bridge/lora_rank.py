"""One training rank whose model has adapters of Megatron-Bridge: only they are trained."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

# isort: split
import rl_safe_workers.models.megatron_bridge  # noqa: F401 (lets the library be imported without Transformer Engine)

# isort: split
from megatron.bridge import AutoBridge
from megatron.bridge.peft import utils
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.lora import LoRA

from rl_safe_workers.checkpoint.load.loader import Loader, read_content_metadata
from rl_safe_workers.checkpoint.state.model_state import model_state, restore_model
from rl_safe_workers.checkpoint.state.state import restore_state
from rl_safe_workers.config import RunConfig
from tests.distributed.laid_out_rank import TIMEOUT, Layout, Rank, control
from tests.distributed.worker import Worker

utils.HAVE_TE = False  # peft/utils.py:74 takes the names for there, which are None without it

ADAPTERS: dict[str, Callable[[], PEFT]] = {
    "lora": lambda: LoRA(dim=4, alpha=8),
    "canonical": lambda: CanonicalLoRA(dim=4, alpha=8),
}


class LoraWorker(Worker):
    """A rank with the mixin, and with adapters."""

    def __init__(self, config: RunConfig, *, rank: int, size: int, adapters: str) -> None:
        self.peft = ADAPTERS[adapters]()
        super().__init__(config, rank=rank, size=size)

    def load_hf_weights(self, path: str) -> None:
        """Reads the base, then adds the adapters, as Bridge does before the model is wrapped."""
        super().load_hf_weights(path)
        self.chunks = self.peft(self.chunks, training=True)


class LoraRank(Rank):
    """A rank with adapters in attention and in experts."""

    def __init__(self, model: Path, layout: Layout, dtype: str = "float32", *, adapters: str = "lora") -> None:
        self.peft = ADAPTERS[adapters]()
        super().__init__(model, layout, dtype)

    def load_hf_weights(self, path: str) -> None:
        """Reads the base, then adds the adapters, as Bridge does before the model is wrapped."""
        super().load_hf_weights(path)
        self.chunks = self.peft(self.chunks, training=True)
        self.peft.set_params_to_save(self.chunks)

    def scramble(self) -> None:
        """Makes every parameter another one, so that what a load leaves out shows."""
        for parameter in (p for chunk in self.chunks for p in chunk.parameters()):
            parameter.data.fill_(7.0)
        self.optimizer.reload_model_params()

    def load_weights(self, directory: Path) -> None:
        """Loads the model alone."""
        Loader(control()).load(
            lambda: model_state(self.chunks),
            directory,
            timeout=TIMEOUT,
            restore=lambda loaded: restore_model(self.chunks, self.optimizer, loaded),
            strict=False,
        )

    def load_optimizer(self, directory: Path) -> None:
        """Loads the optimizer's state alone, in the format of the checkpoint."""
        metadata = read_content_metadata(directory)
        Loader(control()).load(
            lambda: {"optimizer": self.ours(is_loading=True, metadata=metadata, rng=False)["optimizer"]},
            directory,
            timeout=TIMEOUT,
            restore=lambda loaded: restore_state(self.chunks, self.optimizer, {"optimizer": loaded["optimizer"]}),
            strict=False,
        )

    def base_digest(self) -> str:
        """Digest of every frozen parameter of this rank."""
        digest = hashlib.sha256()
        for name, parameter in (pair for chunk in self.chunks for pair in chunk.named_parameters()):
            if not parameter.requires_grad:
                digest.update(name.encode() + parameter.detach().float().numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def exported(self) -> dict[str, np.ndarray]:
        """Returns Bridge's exports on rank 0: the merged weights, and the adapters alone."""
        bridge = AutoBridge.from_hf_pretrained(self.config.model.path)
        merged = bridge.export_hf_weights(self.chunks, cpu=True, show_progress=False, merge_adapter_weights=True)
        found = {f"merged {weight.param_name}": weight.weight.detach().numpy().copy() for weight in merged}
        adapters = bridge.export_adapter_weights(self.chunks, cpu=True, show_progress=False)
        found |= {f"adapter {weight.param_name}": weight.weight.detach().numpy().copy() for weight in adapters}
        return found if dist.get_rank() == 0 else {}

    def differing_by_stock(self, directory: Path) -> list[str]:
        """Keys of the model that Megatron's own reader reads other than this rank holds them."""
        asked = model_state(self.chunks)
        shards = [shard for chunk in asked.values() for shard in chunk.values()]
        for shard in (shard for shard in shards if isinstance(shard.data, torch.Tensor)):
            shard.data = torch.empty_like(shard.data)
        loaded = dist_checkpointing.load(asked, str(directory))
        differing: list[str] = []
        for key, chunk in zip(asked, self.chunks, strict=True):
            held, read = chunk.module.state_dict(), loaded[key]
            tensors = {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}
            differing += [key for key, value in tensors.items() if not torch.equal(value, read[key])]
        return differing
