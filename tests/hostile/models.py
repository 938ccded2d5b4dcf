"""A good HF model directory, as small as one can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "vocab_size": 128,
    "hidden_size": 128,
    "max_position_embeddings": 96,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
}
WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"


def put_model(folder: Path) -> None:
    """Writes ``config.json``, a tokenizer that nobody reads here, and weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / WEIGHTS).write_bytes(good_weights())


def good_weights() -> bytes:
    """A safetensors file of the two tensors that a model must have, and one more."""
    embedding = np.arange(CONFIG["vocab_size"] * CONFIG["hidden_size"], dtype=np.float16)
    return save(
        {
            EMBEDDING: embedding.reshape(CONFIG["vocab_size"], -1),
            "model.norm.weight": np.ones(128, np.float32),
            "c": np.arange(3),
        }
    )


def safetensors(header: bytes, data: bytes = bytes(64), *, length: int | None = None) -> bytes:
    """The bytes of a safetensors file with any header, and any length of it."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data
