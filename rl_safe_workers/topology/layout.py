"""Factors the training world into parallel sizes, and checks that a model divides over them.

Pure Python, so that a layout can be checked or planned on a machine without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_safe_workers.errors import LayoutError, ModelError
from rl_safe_workers.model_files import CONFIG, read_model_json

if TYPE_CHECKING:
    from rl_safe_workers.config import MegatronConfig

DENSE_AXES = ("tensor", "context", "pipeline")
"""Axes that span the training world together with data parallelism, for attention and dense layers."""
EXPERT_AXES = ("expert_tensor", "expert", "pipeline")
"""Axes that span the training world together with expert-data parallelism, for expert layers."""
WORLD_KEY = "cluster.num_trainers"
SETTINGS: Mapping[str, str] = {
    "tensor": "megatron.tensor_model_parallel_size",
    "pipeline": "megatron.pipeline_model_parallel_size",
    "expert": "megatron.expert_model_parallel_size",
    "expert_tensor": "megatron.expert_tensor_parallel_size",
    "context": "megatron.context_parallel_size",
}
"""Configuration key of each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """The coordinates of one training rank on each axis, counted from 0."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of the training world's axes.

    Example: ``ParallelLayout(world_size=4, tensor=1, pipeline=1, expert=2, expert_tensor=1, context=1)`` has
    data-parallel size 4 and expert-data-parallel size 2.

    ``check_layout`` verifies that the sizes factor the world. In an unchecked layout, ``data`` and ``expert_data`` may
    be rounded down.
    """

    world_size: int
    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int
    context: int

    @classmethod
    def of(cls, megatron: MegatronConfig, *, world_size: int) -> ParallelLayout:
        """Returns the layout of ``world_size`` trainers under Megatron's settings, unchecked."""
        return cls(
            world_size=world_size,
            tensor=megatron.tensor_model_parallel_size,
            pipeline=megatron.pipeline_model_parallel_size,
            expert=megatron.expert_model_parallel_size,
            expert_tensor=megatron.expert_tensor_parallel_size,
            context=megatron.context_parallel_size,
        )

    @property
    def data(self) -> int:
        """The data-parallel size: the number of ranks with the same dense parameters and different samples."""
        return self.world_size // self.product(DENSE_AXES)

    @property
    def expert_data(self) -> int:
        """The expert-data-parallel size: the number of ranks with the same experts."""
        return self.world_size // self.product(EXPERT_AXES)

    def size(self, axis: str) -> int:
        """Returns the size of the axis of that name."""
        return int(getattr(self, axis))

    def product(self, axes: Iterable[str]) -> int:
        """Returns the number of ranks that the axes span together."""
        return math.prod(map(self.size, axes))

    def coordinates(self, training_rank: int) -> RankCoordinates:
        """Returns the coordinates of a rank in Megatron's default order ``tp-cp-ep-dp-pp``; the first axis is fastest.

        Raises:
            LayoutError: If ``training_rank`` is not a rank of the training world.
        """
        if not 0 <= training_rank < self.world_size:
            raise LayoutError(f"training rank {training_rank} is outside a training world of {self.world_size} ranks")
        # Megatron orders expert ranks separately. The two orders share the pipeline axis, which is the slowest.
        tensor, context, data, pipeline = _unravel(training_rank, (self.tensor, self.context, self.data))
        expert_tensor, expert, expert_data, _ = _unravel(
            training_rank, (self.expert_tensor, self.expert, self.expert_data)
        )
        return RankCoordinates(
            tensor=tensor,
            context=context,
            data=data,
            pipeline=pipeline,
            expert_tensor=expert_tensor,
            expert=expert,
            expert_data=expert_data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of an HF model that decide if it divides over a layout."""

    model_type: str
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_experts: int
    """Number of experts per layer; 0 for a dense model."""
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    """Largest number of tokens of prompt and response together."""
    tie_word_embeddings: bool

    @classmethod
    def of_model(cls, path: str) -> ModelShape:
        """Reads the sizes of a model in Hugging Face layout.

        Args:
            path: Its folder.

        Raises:
            ModelError: As `from_hf_config`; or if there is no ``config.json``, or it is not JSON.
        """
        return cls.from_hf_config(read_model_json(Path(path, CONFIG)))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Reads the contents of a ``config.json``.

        Args:
            config: The contents.

        Raises:
            ModelError: If the model type is not supported, if the model is a variant that the conversion does not know,
                or if a size is missing or malformed.
        """
        model_type: Any = config.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise ModelError(f"model type {model_type!r:.80} is not supported: use {_either(SUPPORTED_MODEL_TYPES)}")
        _refuse_variants(config)
        _check_optional(config)
        is_moe = model_type in MOE_MODEL_TYPES
        return cls(
            model_type=model_type,
            num_layers=_size(config, "num_hidden_layers"),
            num_attention_heads=_size(config, "num_attention_heads"),
            num_key_value_heads=_size(config, "num_key_value_heads"),
            # transformers 5 writes num_local_experts, transformers 4 num_experts.
            num_experts=_size(config, "num_local_experts", "n_routed_experts", "num_experts") if is_moe else 0,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=_size(config, "hidden_size"),
            max_position_embeddings=_size(config, "max_position_embeddings"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        )


MOE_MODEL_TYPES = ("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", *MOE_MODEL_TYPES)
PLAIN_SETTINGS: Mapping[str, Any] = {
    "attention_bias": False,
    "clip_qkv": None,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "mlp_bias": False,
    "mlp_only_layers": [],
    "quantization_config": None,
    "use_sliding_window": False,
}
"""The only supported values of some settings. Other values change the arithmetic, and the conversion ignores them."""


LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Values of Llama 3.1 and later. Megatron-core has them as constants (common/embeddings/rotary_pos_embedding.py:92)."""
LARGEST_SIZE = 2**31 - 1
"""Largest accepted value of a size in a model's configuration."""
_LARGEST_NUMBER = 1e30
_OPTIONAL_SIZES = ("intermediate_size", "moe_intermediate_size", "head_dim", "num_experts_per_tok")
_OPTIONAL_NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range", "router_aux_loss_coef")
_OPTIONAL_FLAGS = ("tie_word_embeddings", "norm_topk_prob")


def check_layout(layout: ParallelLayout) -> None:
    """Raises LayoutError unless the sizes factor the training world. The message names sizes that would."""
    for axis, key in {"world_size": WORLD_KEY, **SETTINGS}.items():
        if layout.size(axis) < 1:
            raise LayoutError(f"{key}={layout.size(axis)} must be at least 1")
    for axes in (DENSE_AXES, EXPERT_AXES):
        if layout.world_size % layout.product(axes):
            sizes = " x ".join(f"{axis} {layout.size(axis)}" for axis in axes)
            raise LayoutError(
                f"{layout.world_size} trainers do not divide by {sizes} = {layout.product(axes)}: "
                + ", or ".join(_remedies(layout, axes))
            )


def check_model(layout: ParallelLayout, shape: ModelShape) -> None:
    """Raises LayoutError unless every rank gets an equal part of the model. The message names sizes that would work."""
    if layout.expert > 1 and not shape.num_experts:
        raise LayoutError(
            f"{SETTINGS['expert']}={layout.expert}, but a {shape.model_type} model has no experts: set it to 1"
        )
    for axis, what, count in (
        ("pipeline", "layers", shape.num_layers),
        ("tensor", "attention heads", shape.num_attention_heads),
        ("tensor", "key-value heads", shape.num_key_value_heads),
        ("tensor", "vocabulary entries", shape.vocab_size),
        ("expert", "experts", shape.num_experts),
    ):
        if count % layout.size(axis):
            fitting = [size for size in divisors(count) if size <= layout.world_size]
            raise LayoutError(
                f"{count} {what} do not divide by {SETTINGS[axis]}={layout.size(axis)}: set it to {_either(fitting)}"
            )


def check_rope(model_type: str, rope: Mapping[str, Any]) -> None:
    """Raises ModelError unless megatron-core computes these rotary embeddings.

    Args:
        model_type: The model's type.
        rope: What ``config.json`` has as ``rope_parameters``, or as ``rope_scaling`` in transformers 4.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = ("default", "yarn") if model_type in ("deepseek_v3", "gpt_oss") else ("default", "llama3")
    if kind not in known:
        raise ModelError(f"RoPE of type {kind!r:.80} is not supported for {model_type}: use {_either(known)}")
    if kind == "llama3":
        for key, value in LLAMA3_ROPE.items():
            if rope.get(key) != value:
                raise ModelError(f"RoPE of type 'llama3' has {key}={rope.get(key)!r:.80}: only {value} is supported")


def check_trainable(layout: ParallelLayout, shape: ModelShape) -> None:
    """Raises LayoutError if Megatron would let the copies of an expert diverge in training.

    Without expert parallelism, Megatron treats expert parameters as dense ones (tensor_parallel/layers.py:829 sets
    their ``allreduce`` accordingly), and reduces their gradients over the data-parallel group. If experts are less
    sharded than the rest, tensor-parallel ranks hold other copies of an expert, and these are not in that group.
    """
    if shape.num_experts and layout.expert == 1 and layout.expert_tensor != layout.tensor:
        raise LayoutError(
            f"{SETTINGS['expert_tensor']}={layout.expert_tensor} with {SETTINGS['tensor']}={layout.tensor} and "
            f"{SETTINGS['expert']}=1: Megatron would train the copies of an expert apart; set "
            f"{SETTINGS['expert_tensor']} to {layout.tensor}, or {SETTINGS['expert']} to more than 1"
        )


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive number in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _unravel(index: int, sizes: Iterable[int]) -> list[int]:
    """Splits an index into one position for each size, the fastest first, and the remaining quotient."""
    positions = []
    for size in sizes:
        index, position = divmod(index, size)
        positions.append(position)
    return [*positions, index]


def _factors(layout: ParallelLayout) -> bool:
    return all(layout.world_size % layout.product(axes) == 0 for axes in (DENSE_AXES, EXPERT_AXES))


def _remedies(layout: ParallelLayout, axes: Iterable[str]) -> Iterable[str]:
    """Yields remedies: the nearest world sizes that work; then, for each axis, sizes that work if the others stay."""
    step = math.lcm(layout.product(DENSE_AXES), layout.product(EXPERT_AXES))
    below = layout.world_size // step * step
    yield f"set {WORLD_KEY} to {_either([size for size in (below, below + step) if size])}"
    for axis in axes:
        sizes = [size for size in divisors(layout.world_size) if _factors(replace(layout, **{axis: size}))]
        if sizes:
            yield f"{SETTINGS[axis]} to {_either(sizes)}"


def _refuse_variants(config: Mapping[str, Any]) -> None:
    for key, plain in PLAIN_SETTINGS.items():
        if key == "attention_bias" and config.get("model_type") in ("glm4_moe", "gpt_oss"):
            continue  # with glm4_moe it means Q, K and V alone, which is what Megatron has; gpt_oss has all in Megatron
        if (value := config.get(key)) not in (None, plain):
            shown = type(value).__name__ if isinstance(value, dict) else f"{value!r:.80}"
            raise ModelError(f"config.json has {key}={shown}, which is not supported: only {plain!r} is")
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key) or {}
        if not isinstance(rope, Mapping):
            raise ModelError(f"config.json has {key}={rope!r:.80}: it must be an object")
        check_rope(str(config.get("model_type")), rope)


def _size(config: Mapping[str, Any], *names: str) -> int:
    """Returns the value of the first of the names that the configuration has.

    Raises:
        ModelError: If there is none, or the value is not a size.
    """
    value = next((config[name] for name in names if name in config), None)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_SIZE:
        raise ModelError(f"config.json has {names[-1]}={value!r:.80}: it must be a whole number of 1 to {LARGEST_SIZE}")
    return value


def _check_optional(config: Mapping[str, Any]) -> None:
    """Checks settings that have a default if they are absent or null."""
    for name in _OPTIONAL_SIZES:
        if config.get(name) is not None:
            _size(config, name)
    for name in _OPTIONAL_NUMBERS:
        value = config.get(name)
        if value is not None and (not isinstance(value, int | float) or not 0 <= value <= _LARGEST_NUMBER):
            raise ModelError(f"config.json has {name}={value!r:.80}: it must be a finite number of at least 0")
    for name in _OPTIONAL_FLAGS:
        if not isinstance(config.get(name), bool | None):
            raise ModelError(f"config.json has {name}={config[name]!r:.80}: it must be true or false")


def _either(values: Iterable[object]) -> str:
    *rest, last = map(str, values)
    return f"{', '.join(rest)} or {last}" if rest else last
