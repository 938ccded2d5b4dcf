"""HF directories of every model family, with values in which nothing is zero, one or equal by chance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import Family, create_seeded_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 20000.0,
    "factor": 8.0,
    "beta_fast": 24.0,
    "beta_slow": 2.0,
    "truncate": True,
    "original_max_position_embeddings": 64,
}
"""Unlike the published models in every value, as are the layers of its kind."""
GROUPS = {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
PREDICTS = {"num_nextn_predict_layers": 1}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model of a family."""

    family: Family
    experts: int = 0
    is_tied: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


KINDS = {
    "qwen2": Kind(family=Family.QWEN2),
    "qwen2_tied": Kind(family=Family.QWEN2, is_tied=True),
    "qwen2_moe": Kind(family=Family.QWEN2, experts=8),
    "qwen2_moe_normalised": Kind(family=Family.QWEN2, experts=8, settings={"norm_topk_prob": True}),
    "qwen3": Kind(family=Family.QWEN3),
    "qwen3_moe_not_normalised": Kind(family=Family.QWEN3, experts=8, settings={"norm_topk_prob": False}),
    "llama3": Kind(family=Family.LLAMA, settings={"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 65536}),
    "mixtral": Kind(family=Family.LLAMA, experts=8),
    "glm4_moe": Kind(family=Family.GLM4_MOE, experts=8, settings={**GROUPS, **PREDICTS, "n_shared_experts": 2}),
    "deepseek_v3": Kind(
        family=Family.DEEPSEEK_V3,
        experts=8,
        settings={**GROUPS, **PREDICTS, "rope_parameters": YARN, "max_position_embeddings": 2560},
    ),
    "olmoe": Kind(family=Family.OLMOE, experts=8, settings={"num_key_value_heads": 4}),
    "olmoe_normalised": Kind(
        family=Family.OLMOE, experts=8, settings={"num_key_value_heads": 4, "norm_topk_prob": True}
    ),
    "gpt_oss": Kind(
        family=Family.GPT_OSS,
        experts=8,
        settings={
            "intermediate_size": 96,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": YARN_OF_GPT_OSS,
        },
    ),
    "deepseek_v3_plain": Kind(family=Family.DEEPSEEK_V3, experts=8, settings={"q_lora_rank": None}),
}


LIBRARIES = ["megatron_bridge"] if find_spec("megatron.bridge") else ["mbridge"]
"""The bridges whose conversions are tested in this environment."""
_UNMAPPED = {"mbridge": ("olmoe", "gpt_oss"), "megatron_bridge": ("qwen2_moe", "mixtral")}


def maps(library: str, kind: str) -> bool:
    """Returns True if a library has a mapping for the model of this name."""
    return not kind.startswith(_UNMAPPED[library])


def make(path: Path, name: str, *, dtype: str = "float32") -> Path:
    """Makes the directory, with its MTP layers, which transformers does not build."""
    kind = KINDS[name]
    spec = SeededModelConfig(num_experts=kind.experts)
    create_seeded_model(path, spec, family=kind.family, dtype=dtype, is_tied=kind.is_tied, settings=kind.settings)
    file, generator = path / "model.safetensors", torch.Generator().manual_seed(1)
    weights = {
        key: (value + 0.02 * torch.randn(value.shape, generator=generator)).to(value.dtype)
        for key, value in sorted(load_file(file).items())
    }
    config = json.loads((path / "config.json").read_text())
    for number in range(config.get("num_nextn_predict_layers") or 0):
        weights |= _mtp_layer(weights, config, number, generator)
    save_file(weights, file, metadata={"format": "pt"})
    return path


def _mtp_layer(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], number: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Returns a layer after the last one, under the names of DeepSeek-V3 and GLM-4.5."""
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    prefix, dtype = f"model.layers.{last + 1 + number}.", weights["model.norm.weight"].dtype
    like = {name: value for name, value in weights.items() if name.startswith(f"model.layers.{last}.")}
    shapes = {f"{prefix}{name.split('.', 3)[3]}": (value.shape, value.dtype) for name, value in like.items()}
    vocabulary = torch.Size((config["vocab_size"], hidden))
    for name, shape in {
        "enorm.weight": torch.Size((hidden,)),
        "hnorm.weight": torch.Size((hidden,)),
        "eh_proj.weight": torch.Size((hidden, 2 * hidden)),
        "embed_tokens.weight": vocabulary,
        "shared_head.norm.weight": torch.Size((hidden,)),
        "shared_head.head.weight": vocabulary,
    }.items():
        shapes[prefix + name] = (shape, dtype)
    return {name: torch.randn(shape, generator=generator).to(of) for name, (shape, of) in shapes.items()}
