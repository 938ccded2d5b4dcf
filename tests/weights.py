"""Safetensors files without their bytes: headers as the library writes them, and a hole for the data."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_header(path: Path, header: object, data_bytes: int) -> None:
    """Writes a header, whatever it says, before so many bytes of zero."""
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + data_bytes)


def write_weights(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Writes a file of float32 tensors that are zero and take no disk space."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": [*shape], "data_offsets": [start, end]}
    write_header(path, header, end)


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes by which a model of a ``config.json`` is known."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    norms = {f"model.layers.{layer}.input_layernorm.weight": (hidden,) for layer in range(layers)}
    return {"model.embed_tokens.weight": (config["vocab_size"], hidden), **norms}
