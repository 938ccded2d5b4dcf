"""Reads single weights from the safetensors files of an HF directory, and opens each file only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rl_safe_workers.errors import ModelError
from rl_safe_workers.model_files import read_weight_map
from rl_safe_workers.models.hf_directory import mtp_layers


class HfReader:
    """Reads weights by name. Files stay open and memory-mapped, so only the pages of the wanted weights are loaded.

    mbridge's own reader opens a file again for every weight. Without an index, it opens every file for every weight.
    """

    def __init__(self, directory: str | Path) -> None:
        """Reads the index; without an index it opens all files.

        Args:
            directory: A local HF directory.

        Raises:
            ModelError: If the index is malformed, or a file cannot be read.
        """
        self._directory = Path(directory)
        self._files: dict[str, Any] = {}
        self._file_of = self._read_index()

    def _read_index(self) -> dict[str, str]:
        weight_map = read_weight_map(self._directory)
        if weight_map is not None:
            return weight_map
        files = sorted(path.name for path in self._directory.glob("*.safetensors"))
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                # No context manager: the handle lives as long as the reader.
                self._files[file] = safe_open(self._directory / file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{self._directory / file} cannot be read: {error}; download the model again"
                ) from error
        return self._files[file]

    @property
    def names(self) -> list[str]:
        """The names of all weights."""
        return list(self._file_of)

    def load_one_hf_weight(self, name: str) -> torch.Tensor:
        """Returns one weight, on the CPU, in the file's dtype and shape. The method's name is mbridge's.

        Raises:
            ModelError: If no file has the weight, or its file is damaged.
        """
        if name not in self._file_of:
            raise ModelError(f"{self._directory} has no weight {name}: its files do not fit its config.json")
        try:
            weight: torch.Tensor = self._open(self._file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self._directory}: weight {name} cannot be read: {error}") from error
        return weight

    def load_some_hf_weight(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Returns several weights by name."""
        return {name: self.load_one_hf_weight(name) for name in names}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Returns the dtype of every weight by name. Reads the headers, and the data of scalars only."""
        return {name: self._dtype(name) for name in self._file_of}

    def _dtype(self, name: str) -> torch.dtype:
        file = self._open(self._file_of[name])
        part = file.get_slice(name)
        # A scalar cannot be sliced, so its value is read.
        found: torch.Tensor = part[:0] if part.get_shape() else file.get_tensor(name)
        return found.dtype


def mtp_weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights of an HF directory's MTP layers, on the CPU, in the order of their names.

    Megatron-core can build such layers. Its forward pass then needs labels and adds a loss of its own
    (models/gpt/gpt_model.py:612), but a policy asks for logits. So the layers are not built. An export takes their
    weights unchanged from the model's files.

    Raises:
        ModelError: If the directory cannot be read.
    """
    prefixes = tuple(f"model.layers.{number}." for number in mtp_layers(directory))
    reader = HfReader(directory)
    for name in sorted(name for name in reader.names if name.startswith(prefixes)):
        yield name, reader.load_one_hf_weight(name)
