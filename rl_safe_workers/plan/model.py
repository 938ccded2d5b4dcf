"""Counts the parameters of an HF model, by pipeline stage and by kind of sharding.

It reads only ``config.json``, of any decoder of the usual kind. For missing keys it uses Llama's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_safe_workers.errors import ModelError
from rl_safe_workers.foreign_files import kind_of
from rl_safe_workers.model_files import CONFIG, read_model_json
from rl_safe_workers.topology.layout import LARGEST_SIZE, ModelShape

_UNGATED = ("bloom", "falcon", "gpt2", "gpt_neo", "gpt_neox", "gptj", "nemotron", "opt", "phi", "starcoder2")
"""Model types whose MLP has two matrices instead of three."""
_MOST_LAYERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSize:
    """Parameters of one pipeline stage.

    Example: ``StageSize(sharded=10**9, replicated=10**5, experts=0)``
    """

    sharded: int
    """Parameters that are split over the tensor-parallel ranks."""
    replicated: int
    """Parameters that are the same on each tensor-parallel rank."""
    experts: int
    """Parameters that are split over the expert-parallel and expert-tensor-parallel ranks."""

    @property
    def total(self) -> int:
        """Number of all parameters of the stage."""
        return self.sharded + self.replicated + self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters of a model, by their part of a layer.

    Example: ``ModelSize.read("models/qwen3")``
    """

    shape: ModelShape
    layer_sharded: int
    layer_replicated: int
    dense_mlp: int
    """Parameters of the MLP of a layer without experts."""
    moe_shared: int
    """Parameters of the shared experts of a layer with experts."""
    moe_router: int
    expert: int
    """Parameters of one expert of one layer."""
    dense_layers: tuple[int, ...]
    """Layers of a MoE model that have no experts."""

    @classmethod
    def read(cls, path: str | Path, *, key: str = "model") -> ModelSize:
        """Reads a ``config.json``, or the one in a directory.

        Args:
            path: The file or the directory.
            key: The setting that names the path, for errors.

        Raises:
            ModelError: If there is no such file, or it lacks a size.
        """
        try:
            file = Path(path, CONFIG) if kind_of(path) == "folder" else Path(path)
            config = read_model_json(file)
        except (OSError, ModelError) as error:
            raise ModelError(
                f"{key}={path!s:.200} cannot be read ({error}): it takes a folder with an HF config.json, or the file"
            ) from error
        return cls.of(config)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSize:
        """Counts the parameters from the contents of a ``config.json``.

        Raises:
            ModelError: If it lacks a size, or if a size is not a positive whole number.
        """
        nested = config.get("text_config")
        text = {**config, **nested} if isinstance(nested, dict) else dict(config)
        shape = _shape(text)
        hidden, heads = shape.hidden_size, shape.num_attention_heads
        inner = _optional(text, "intermediate_size", "n_inner", "ffn_hidden_size") or 4 * hidden
        matrices = 2 if str(text.get("model_type")) in _UNGATED else 3
        expert_inner = _optional(text, "moe_intermediate_size", "expert_ffn_hidden_size") or inner
        shared = _optional(text, "shared_expert_intermediate_size")
        shared = shared or (_optional(text, "n_shared_experts") or 0) * expert_inner
        return cls(
            shape=shape,
            layer_sharded=_attention(text, hidden, heads, shape.num_key_value_heads),
            layer_replicated=2 * hidden,
            dense_mlp=matrices * hidden * inner,
            moe_shared=matrices * hidden * shared if shape.num_experts else 0,
            moe_router=hidden * shape.num_experts,
            expert=matrices * hidden * expert_inner if shape.num_experts else 0,
            dense_layers=_dense_layers(text, shape),
        )

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return sum(stage.total for stage in self.stages([self.shape.num_layers]))

    def stages(self, layers: Sequence[int]) -> list[StageSize]:
        """Returns the parameters of each pipeline stage.

        Args:
            layers: Number of layers of each stage.
        """
        found, first = [], 0
        embedding = self.shape.vocab_size * self.shape.hidden_size
        for stage, count in enumerate(layers):
            is_last = stage == len(layers) - 1
            mine = range(first, first + count)
            dense = count if not self.shape.num_experts else sum(layer in mine for layer in self.dense_layers)
            moe, first = count - dense, first + count
            sharded = count * self.layer_sharded + dense * self.dense_mlp + moe * self.moe_shared
            # A tied output layer on another stage is a copy that no save writes.
            sharded += embedding * ((stage == 0) + (is_last and not self.shape.tie_word_embeddings))
            replicated = count * self.layer_replicated + moe * self.moe_router + is_last * self.shape.hidden_size
            experts = moe * self.shape.num_experts * self.expert
            found.append(StageSize(sharded=sharded, replicated=replicated, experts=experts))
        return found


def split_layers(
    count: int, stages: int, *, first: int | None, last: int | None, embedding: bool = False, loss: bool = False
) -> list[int]:
    """Returns the number of layers of each stage. If they do not divide, the earlier stages get more.

    Args:
        count: Number of layers of the model.
        stages: Number of pipeline stages.
        first: Number of layers of the first stage, if it is set separately.
        last: Number of layers of the last stage, if it is set separately.
        embedding: Whether the embedding counts as a layer of the first stage.
        loss: Whether the loss counts as a layer of the last stage.

    >>> split_layers(94, 8, first=11, last=11)
    [11, 12, 12, 12, 12, 12, 12, 11]
    >>> split_layers(94, 8, first=None, last=None, embedding=True, loss=True)
    [11, 12, 12, 12, 12, 12, 12, 11]
    """
    if (embedding or loss) and (count + embedding + loss) % stages == 0:
        found = [(count + embedding + loss) // stages] * stages
        found[0] -= embedding
        found[-1] -= loss
        return found
    fixed = (first or 0) + (last or 0)
    middle = stages - (first is not None) - (last is not None)
    left = max(count - fixed, 0)
    even = [left // middle + (stage < left % middle) for stage in range(middle)] if middle else []
    return [*([first] if first is not None else []), *even, *([last] if last is not None else [])]


def _attention(config: Mapping[str, Any], hidden: int, heads: int, key_value_heads: int) -> int:
    if low_rank := _optional(config, "kv_lora_rank"):
        return _latent_attention(config, hidden, heads, low_rank)
    head = _optional(config, "head_dim") or hidden // heads
    return hidden * head * (2 * heads + 2 * key_value_heads)


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int, low_rank: int) -> int:
    rope = _optional(config, "qk_rope_head_dim") or 0
    plain = _optional(config, "qk_nope_head_dim") or hidden // heads
    value = _optional(config, "v_head_dim") or plain
    query = _optional(config, "q_lora_rank")
    queries = query * (hidden + heads * (plain + rope)) if query else hidden * heads * (plain + rope)
    return queries + hidden * (low_rank + rope) + low_rank * heads * (plain + value) + heads * value * hidden


def _dense_layers(config: Mapping[str, Any], shape: ModelShape) -> tuple[int, ...]:
    first = _optional(config, "first_k_dense_replace") or 0
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise ModelError(f"model: config.json has mlp_only_layers={listed!r:.80}: it takes a list of layers")
    step = _optional(config, "decoder_sparse_step") or 1
    return tuple(layer for layer in range(shape.num_layers) if layer < first or layer in listed or (layer + 1) % step)


def _shape(config: Mapping[str, Any]) -> ModelShape:
    heads = _size(config, "num_attention_heads", "n_head", "num_heads")
    layers = _size(config, "num_hidden_layers", "n_layer", "num_layers")
    if layers > _MOST_LAYERS:
        raise ModelError(f"model: config.json has {layers} layers: it takes at most {_MOST_LAYERS}")
    return ModelShape(
        model_type=str(config.get("model_type")),
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_optional(config, "num_key_value_heads", "num_query_groups") or heads,
        num_experts=_optional(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=_size(config, "hidden_size", "n_embd", "d_model"),
        max_position_embeddings=_optional(config, "max_position_embeddings", "n_positions") or 1,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _size(config: Mapping[str, Any], *names: str) -> int:
    found = _optional(config, *names)
    if not found:
        raise ModelError(f"model: config.json has no {names[0]}: it takes a whole number of at least 1")
    return found


def _optional(config: Mapping[str, Any], *names: str) -> int | None:
    """Returns the value of the first name that exists and is not null; None if there is none."""
    name, value = next(((name, config[name]) for name in names if config.get(name) is not None), (names[0], None))
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_SIZE:
        raise ModelError(
            f"model: config.json has {name}={value!r:.80}: it takes a whole number from 0 to {LARGEST_SIZE}"
        )
    return value
