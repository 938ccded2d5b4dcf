"""Lets megatron-core read ``common.pt``, and nothing in it that a checkpoint has no need of.

Megatron-LM, verl and NeMo RL keep there what is no tensor: arguments, enums, numpy scalars. Torch's restricted
unpickler refuses each class that it was not told of, and megatron-core tells it of some, which differ by version
(safe_globals.py:18 in 0.16.1). Here what the file asks for is read first, into records, and torch's unpickler is then
told exactly that, so that nothing is lost if the file changes between.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rl_safe_workers.checkpoint.format_names import COMMON_RECORDS
from rl_safe_workers.checkpoint.index import COMMON
from rl_safe_workers.checkpoint.unpickle import read_common_record
from rl_safe_workers.errors import CheckpointError

_TORCH_KNOWS = frozenset(
    {"__builtin__", "builtins", "_codecs", "collections", "torch", "torch._utils", "torch.storage"}
)
"""Modules of which torch's unpickler knows by itself what is harmless, and of which nothing is added."""


@contextmanager
def allowing_common(directory: Path) -> Iterator[None]:
    """Within it ``torch.load(weights_only=True)`` reads the ``common.pt`` of a directory of shards. Not collective.

    Without that file nothing is allowed: megatron-core >= 0.19 keeps the common state among the shards.

    Raises:
        UnsafeCheckpointError: On entry, if the file asks for a name that no checkpoint needs; the message has it.
        CheckpointError: On entry, if it is damaged, or of a class that is not installed here.
    """
    path = directory / COMMON
    known: Any = _classes_in(path) if path.is_file() else []
    with torch.serialization.safe_globals(known):
        yield


def _classes_in(path: Path) -> list[tuple[Any, str]]:
    _, asked = read_common_record(path)
    if ("numpy", "dtype") in asked:
        # A dtype is built through numpy.dtype and is then of one of these classes, which torch wants allowed too.
        asked |= {("numpy.dtypes", name) for name in COMMON_RECORDS["numpy.dtypes"]}
    # With the name that the file has for it: numpy 2 calls a class of numpy 1 by another.
    return [
        (_resolve(module, name, path), f"{module}.{name}")
        for module, name in sorted(asked)
        if module not in _TORCH_KNOWS
    ]


def _resolve(module: str, name: str, path: Path) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"{path} holds a {module}.{name}, which is not installed here: {error}") from error
