"""Writes HF weights into safetensors files as they come, one tensor in memory at a time.

A safetensors file begins with a header that lists every tensor's place. The places are known only after the last
tensor. So the writer reserves room for the header and fills it at the end. The format allows that: "The header data
MUST begin with a `{` character (0x7B)" and "The header data MAY be trailing padded with whitespace (0x20)"
(safetensors, README, section Format).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from rl_safe_workers.checkpoint.folders.publish import publish, removed_on_failure, start_pending
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import read_foreign

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Largest file; transformers uses the same limit for a large model."""
HEADER_BYTES = 2**18
"""Room for the header of one file, enough for some 1500 tensors. When it is full, the writer begins the next file."""
COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*")
"""Files of an HF directory besides weights: configuration, tokenizer, licence. No code."""
COPIED_BYTES = 2**30
"""Largest size of such a file; a tokenizer has some megabytes."""
_METADATA = {"format": "pt"}
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def _entry(name: str, tensor: torch.Tensor, start: int) -> dict[str, Any]:
    return {
        name: {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
    }


def _length(entry: Mapping[str, Any]) -> int:
    """Returns the bytes that an entry takes in the header, with its separator."""
    return len(json.dumps(entry, separators=(",", ":")))


class ShardFile:
    """One safetensors file being written.

    Attributes:
        path: The file.
        names: Names of the tensors that it holds so far.
        size_bytes: Bytes of tensors so far.
    """

    def __init__(self, path: Path, *, header_bytes: int) -> None:
        """Creates the file and leaves room for its header.

        Args:
            path: A file that does not exist yet.
            header_bytes: Room for the header; a multiple of 8 keeps the tensors aligned.
        """
        self.path, self._header_bytes = path, header_bytes
        self._header: dict[str, Any] = {"__metadata__": _METADATA}
        self._used = _length(self._header)
        self._file = path.open("xb", buffering=0)
        self._file.seek(8 + header_bytes)
        self.size_bytes = 0

    @property
    def names(self) -> list[str]:
        """The names that it holds so far."""
        return [name for name in self._header if name != "__metadata__"]

    def has_room(self, name: str, tensor: torch.Tensor) -> bool:
        """Returns True if the header has room for a tensor, and the end of the data is aligned for its dtype.

        The format allows no gap between tensors, and readers map them as arrays, which must be aligned.
        """
        is_aligned = self.size_bytes % tensor.itemsize == 0
        return is_aligned and self._used + _length(_entry(name, tensor, self.size_bytes)) <= self._header_bytes

    def append(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor for which `has_room` is True. The tensor is contiguous and in host memory.

        Raises:
            OSError: If it cannot be written.
        """
        entry = _entry(name, tensor, self.size_bytes)
        self._header |= entry
        self._used += _length(entry)
        _write_all(self._file, tensor)
        self.size_bytes += tensor.nbytes

    def close(self) -> None:
        """Writes the header and closes the file. The caller makes it durable together with its directory.

        Raises:
            OSError: If it cannot be written.
        """
        header = json.dumps(self._header, separators=(",", ":")).encode().ljust(self._header_bytes)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.close()

    def abandon(self) -> None:
        """Closes the file as it is."""
        self._file.close()


def _write_all(file: Any, tensor: torch.Tensor) -> None:
    storage, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize
    # A slice of a storage shares its memory, and an offload can still resize the storage. After numpy() on the tensor,
    # which may be a live parameter, it could not.
    alias = torch.empty(0, dtype=torch.uint8).set_(storage[start : start + tensor.nbytes])
    rest = memoryview(cast(Any, alias.numpy()))
    while len(rest):
        rest = rest[file.write(rest) :]  # one write to an unbuffered file may be partial, at most 2 GiB on Linux


class HfWeightsWriter:
    """Distributes tensors over the files of an HF directory in the order they come."""

    def __init__(
        self, directory: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES, header_bytes: int = HEADER_BYTES
    ) -> None:
        """Writes nothing yet.

        Args:
            directory: Existing directory without weights.
            max_shard_bytes: Most bytes of tensors in a file; a larger tensor has a file of its own.
            header_bytes: Room for the header of each file; a multiple of 8.
        """
        self._directory, self._max_shard_bytes, self._header_bytes = directory, max_shard_bytes, header_bytes
        self._files: list[ShardFile] = []
        self._file_of: dict[str, int] = {}

    @property
    def names(self) -> set[str]:
        """The names of all tensors written."""
        return set(self._file_of)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor to disk; nothing of it is kept.

        Args:
            name: Its HF name.
            tensor: Any shape and device, of a dtype that safetensors knows.

        Raises:
            CheckpointError: If the name was there before, or no file has room for it.
            OSError: If it cannot be written.
        """
        if name in self._file_of:
            raise CheckpointError(f"the export yields {name} twice: its model and its HF directory do not fit")
        host = tensor.detach().to("cpu").contiguous()
        if not self._files or not self._fits(self._files[-1], name, host):
            self._begin_file()
        if not self._files[-1].has_room(name, host):
            raise CheckpointError(f"the name of {name[:80]} is longer than the {self._header_bytes} bytes of a header")
        self._files[-1].append(name, host)
        self._file_of[name] = len(self._files)

    def _fits(self, file: ShardFile, name: str, tensor: torch.Tensor) -> bool:
        is_small = not file.size_bytes or file.size_bytes + tensor.nbytes <= self._max_shard_bytes
        return is_small and file.has_room(name, tensor)

    def _begin_file(self) -> None:
        if self._files:
            self._files[-1].close()
        path = self._directory / f"model-{len(self._files) + 1:05d}.safetensors"
        self._files.append(ShardFile(path, header_bytes=self._header_bytes))

    def finish(self) -> None:
        """Closes the last file and gives all files transformers' names: one name alone, or several and an index.

        Raises:
            OSError: If a header or the index cannot be written, or a file cannot be renamed.
        """
        if not self._files:
            self._begin_file()
        self._files[-1].close()
        count = len(self._files)
        if count == 1:
            self._files[0].path.rename(self._directory / "model.safetensors")
            return
        for number, file in enumerate(self._files, 1):
            file.path.rename(self._directory / _file_name(number, count))
        index = {
            "metadata": {"total_size": sum(file.size_bytes for file in self._files)},
            "weight_map": {name: _file_name(number, count) for name, number in sorted(self._file_of.items())},
        }
        (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> HfWeightsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the files. Without `finish`, nobody can read them."""
        for file in self._files:
            file.abandon()


def _file_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def copy_hf_files(source: Path, target: Path, *, dtype: str | None = None) -> None:
    """Copies an HF directory without its weights: configuration, generation config, tokenizer, licence.

    Args:
        source: The HF directory.
        target: An existing directory.
        dtype: The dtype of the weights to write into ``config.json``, e.g. ``"bfloat16"``; None leaves it unchanged.

    Raises:
        OSError: If something cannot be read or written.
    """
    for path in sorted({path for pattern in COPIED for path in source.glob(pattern)}):
        if path.is_file() and path.name != INDEX:
            (target / path.name).write_bytes(read_foreign(path, limit_bytes=COPIED_BYTES))
    if dtype is None:
        return
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    # transformers 4 calls it torch_dtype.
    config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config} or {"dtype": dtype}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_hf_directory(
    final: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    source: Path,
    dtypes: Mapping[str, torch.dtype],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes an HF directory from a stream of weights. It appears whole or not at all. Not collective by itself.

    Args:
        final: The directory to make.
        weights: Names and whole tensors, on any device. At most one tensor is in memory, with a copy in the file's
            dtype.
        source: The model's original HF directory, for configuration and tokenizer.
        dtypes: The dtype of each weight in ``source``. A weight that is not listed keeps its own dtype.
        dtype: One dtype for all weights instead.
        max_shard_bytes: Most bytes of tensors in a file.
        overwrite: True to replace an existing directory, once the new one is complete.

    Raises:
        CheckpointError: If it cannot be written. The final name then has what it had before, or nothing.
    """
    pending = start_pending(final, what="HF weights")
    with removed_on_failure(pending, what="the HF weights"):
        with HfWeightsWriter(pending, max_shard_bytes=max_shard_bytes) as writer:
            for name, tensor in weights:
                writer.add(name, tensor.to(dtype or dtypes.get(name, tensor.dtype)))
                del tensor  # else the loop would keep it while the next one is made
            writer.finish()
        if absent := sorted(dtypes.keys() - writer.names):
            logger.warning(
                "%s: %d weights of %s are not in the export, the first is %s", final, len(absent), source, absent[0]
            )
        copy_hf_files(source, pending, dtype=None if dtype is None else str(dtype).removeprefix("torch."))
        publish(pending, final, overwrite=overwrite)
