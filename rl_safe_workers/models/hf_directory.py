"""Checks an HF model folder by its configuration and the headers of its weight files.

Imports no torch, so that a bad folder is refused before anything is started.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_safe_workers.errors import ModelError
from rl_safe_workers.foreign_files import kind_of
from rl_safe_workers.model_files import (
    CONFIG,
    TensorEntry,
    read_header,
    read_model_json,
    read_weight_map,
    stop_token_ids,
)
from rl_safe_workers.topology.layout import LARGEST_SIZE, ModelShape

PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth")
TOKENIZER = "tokenizer.json"
_TOKENIZER_BYTES = 2**26
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"model\.layers\.\d+\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.")
Weights = Mapping[str, TensorEntry]


def read_hf_directory(path: Path, *, has_weights: bool = True) -> ModelShape:
    """Reads ``config.json`` and the headers of the weight files, and returns the shape of the model.

    Args:
        path: The directory.
        has_weights: True if the directory must hold weights.

    Raises:
        ModelError: If the directory is missing, is incomplete or damaged, or has an unsupported architecture.
    """
    _check_entries(path)
    config = read_model_json(path / CONFIG)
    try:
        shape = ModelShape.from_hf_config(config)
    except ModelError as error:
        raise ModelError(f"model.path={path}: {error}") from error
    if has_weights:
        _check_against_config(path, _read_headers(path), shape, config)
    return shape


def mtp_layers(path: Path) -> range:
    """Returns the numbers of the model's MTP layers, which follow its last layer.

    MTP (multi-token prediction) layers guess tokens after the next one. They are neither built nor trained: a policy
    does not use them.

    Raises:
        ModelError: If ``config.json`` cannot be read, or has no valid number of them.
    """
    return _mtp_layers(read_model_json(path / CONFIG))


def check_mtp_source(path: Path) -> None:
    """Refuses a folder as the source of an export if the model has MTP layers, and the folder has no weights.

    Raises:
        ModelError: If the folder is refused.
    """
    if mtp_layers(path) and not any(path.glob("*.safetensors")):
        raise ModelError(
            f"{path} has no weights, and the export needs those of the model's MTP layers, which are not trained: give "
            "model.path=DIR, the HF directory that the model came from"
        )


def check_tokenizer(path: Path) -> None:
    """Refuses a folder whose tokenizer file is missing or too large, or whose end-of-sequence tokens are malformed.

    Raises:
        ModelError: If the folder is refused.
    """
    file = path / TOKENIZER
    if not file.is_file():
        raise ModelError(f"model.path={path} has no {TOKENIZER}; save the model's fast tokenizer there")
    if (size := file.stat().st_size) > _TOKENIZER_BYTES:
        raise ModelError(f"{file} has {size} bytes, more than {_TOKENIZER_BYTES}; download the model again")
    stop_token_ids(path)


def _check_entries(path: Path) -> None:
    """Refuses a folder with a FIFO, a device or a socket, because opening one may block forever.

    Raises:
        ModelError: If the folder is refused, does not exist, or cannot be read.
    """
    try:
        if kind_of(path) is None:
            raise ModelError(f"model.path={path} does not exist; give a directory in Hugging Face layout")
        for entry in sorted(path.iterdir()):
            if entry.exists() and not entry.is_file() and not entry.is_dir():
                raise ModelError(f"{entry} is not a regular file; download the model again")
    except OSError as error:
        raise ModelError(f"model.path={path} cannot be read: {error.strerror or error}; check it") from error


def _read_headers(path: Path) -> dict[str, TensorEntry]:
    present = sorted(file.name for file in path.glob("*.safetensors"))
    if not present:
        pickled = sorted(file.name for pattern in PICKLED_WEIGHTS for file in path.glob(pattern))
        found = f"only pickled weights ({pickled[0]}), which are not read" if pickled else "no weights"
        raise ModelError(f"model.path={path} has {found}; save the model as safetensors")
    weight_map = read_weight_map(path)
    if weight_map is None:
        return _together(path, {file: read_header(path / file) for file in present})
    if absent := sorted({*weight_map.values()} - {*present}):
        raise ModelError(f"model.path={path} lacks {', '.join(absent[:5])}; download the model again")
    headers = {file: read_header(path / file) for file in sorted({*weight_map.values()})}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ModelError(f"{path / file} lacks weight {name:.100}; download the model again")
    return {name: headers[file][name] for name, file in weight_map.items()}


def _together(path: Path, headers: Mapping[str, Weights]) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for file, weights in headers.items():
        if twice := sorted(found.keys() & weights.keys()):
            raise ModelError(f"{path / file} has weight {twice[0]:.100}, and so has another file; keep one of them")
        found |= weights
    return found


def _check_against_config(path: Path, weights: Weights, shape: ModelShape, config: Mapping[str, Any]) -> None:
    """Raises ModelError if sizes in the configuration do not match the weights.

    Such a model would fail late, or take memory without bounds.
    """
    for name, expected in _expected_shapes(shape, config):
        if name in weights and weights[name].shape != expected:
            raise ModelError(
                f"model.path={path}: weight {name} has shape {list(weights[name].shape)}, but {CONFIG} asks for "
                f"{list(expected)}; download the model again"
            )
    if "model.embed_tokens.weight" not in weights:
        raise ModelError(f"model.path={path} has no weight model.embed_tokens.weight; download the model again")
    mtp = _mtp_layers(config)
    for what, pattern, count in (("layers", _LAYER, shape.num_layers), ("experts", _EXPERT, shape.num_experts)):
        numbers = {int(found.group(1)) for name in weights if (found := pattern.match(name))}
        if what == "layers":
            numbers -= {*mtp}
        if (numbers and numbers != set(range(max(numbers) + 1))) or (numbers and len(numbers) != count):
            raise ModelError(
                f"model.path={path} has weights of {len(numbers)} {what}, but {CONFIG} asks for {count}; download the "
                "model again"
            )


def _mtp_layers(config: Mapping[str, Any]) -> range:
    first, count = (_count(config, name) for name in ("num_hidden_layers", "num_nextn_predict_layers"))
    return range(first, first + count)


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name) or 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_SIZE:
        raise ModelError(f"{CONFIG} has {name}={value!r:.80}: it must be a whole number of 0 to {LARGEST_SIZE}")
    return value


def _expected_shapes(shape: ModelShape, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, first = shape.hidden_size, "model.layers.0"
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    head = config.get("head_dim") or hidden // shape.num_attention_heads
    yield f"{first}.self_attn.q_proj.weight", (shape.num_attention_heads * head, hidden)
    yield f"{first}.self_attn.k_proj.weight", (shape.num_key_value_heads * head, hidden)
    if inner := config.get("intermediate_size"):
        yield f"{first}.mlp.gate_proj.weight", (inner, hidden)
    if inner := config.get("moe_intermediate_size"):
        yield f"{first}.mlp.experts.0.gate_proj.weight", (inner, hidden)
