"""Reads prompts from parquet files in verl's layout, and yields them in an endless, resumable order."""

from __future__ import annotations

import random
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_safe_workers.driver.inputs.parquet_rows import read_rows
from rl_safe_workers.errors import DataError
from rl_safe_workers.foreign_files import kind_of

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")
OPTIONAL_COLUMNS = ("extra_info",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a prompt file.

    Example: ``Prompt(index=3, data_source="char_class", messages=({"role": "user", "content": "abc"},),
    ground_truth="lowercase", extra_info=None)``
    """

    index: int
    """Index in the dataset, over all files, from 0."""
    data_source: str
    messages: tuple[Mapping[str, str], ...]
    """Chat messages, each with ``role`` and ``content``."""
    ground_truth: str
    extra_info: Mapping[str, Any] | None


class PromptDataset:
    """All prompts of the given parquet files in memory, in file order.

    Raises:
        DataError: If a file is missing, is not parquet, lacks a column or has a malformed row. The message names the
            file.
    """

    def __init__(self, files: Sequence[str | Path]) -> None:
        self._prompts: list[Prompt] = []
        self._first: list[tuple[int, str | Path]] = []
        """Index of the first prompt of each file."""
        for file in files:
            self._first.append((len(self._prompts), file))
            for row_number, row in enumerate(_read_rows(Path(file))):
                self._prompts.append(_parse(row, index=len(self._prompts), where=f"{file}, row {row_number}"))
        if not self._prompts:
            raise DataError(f"data.train_files: no prompts in {', '.join(map(str, files)) or 'an empty list'}")

    def where(self, index: int) -> str:
        """Returns the file and row of the prompt at ``index``, e.g. ``"train.parquet, row 3"``."""
        first, file = max((entry for entry in self._first if entry[0] <= index), key=lambda entry: entry[0])
        return f"{file}, row {index - first}"

    def __iter__(self) -> Iterator[Prompt]:
        """Yields the prompts in file order."""
        return iter(self._prompts)

    def __len__(self) -> int:
        """Returns the number of prompts in all files."""
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        """Returns the prompt at ``index``."""
        return self._prompts[index]


class PromptLoader:
    """Yields endless batches of prompts, in an order that depends only on the seed and the epoch.

    A batch may span the end of an epoch. The state is the epoch and the position in it, so a resumed run continues at
    the next prompt. The position counts prompts, not batches, so the batch size may change when a run is resumed.
    """

    def __init__(self, dataset: PromptDataset, *, batch_size: int, shuffle: bool, seed: int) -> None:
        if batch_size < 1:
            raise DataError(f"data.train_batch_size must be at least 1, got {batch_size}")
        self._dataset, self._batch_size = dataset, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._epoch, self._position = 0, 0
        self._order = self._make_order()

    def next_batch(self) -> list[Prompt]:
        """Returns the next ``batch_size`` prompts."""
        return [self._next_prompt() for _ in range(self._batch_size)]

    def state_dict(self) -> dict[str, int]:
        """Returns the state: the epoch, the position in it, and the number of prompts of the dataset."""
        return {"epoch": self._epoch, "position": self._position, "num_prompts": len(self._dataset)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues from the position of a ``state_dict``.

        Raises:
            DataError: If the state is malformed, or belongs to a dataset of another length.
        """
        if (wrong := check_position(state)) is not None:
            raise DataError(f"cannot resume: the checkpoint has no usable data position ({wrong}); use another one")
        if state["num_prompts"] != len(self._dataset):
            raise DataError(
                f"cannot resume: the dataset of the checkpoint has {state['num_prompts']} prompts, data.train_files "
                f"has {len(self._dataset)}; use the files of the first run or trainer.resume_mode=disable"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._make_order()

    def _next_prompt(self) -> Prompt:
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._make_order()
        prompt = self._dataset[self._order[self._position]]
        self._position += 1
        return prompt

    def _make_order(self) -> list[int]:
        order = list(range(len(self._dataset)))
        if self._shuffle:
            # A string seed is hashed as a whole, so neighbouring seeds and epochs give different orders.
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


def check_position(state: object) -> str | None:
    """Returns in a few words why a value is not a state of `PromptLoader.state_dict`; None if it is one."""
    if not isinstance(state, Mapping):
        return "it is missing"
    for key in ("epoch", "position", "num_prompts"):
        if type(value := state.get(key)) is not int or not 0 <= value < 2**53:
            return f"{key} is not a count"
    position, length = state["position"], state["num_prompts"]
    return f"position {position} of {length} prompts" if position > length else None


def _read_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        kind = kind_of(file)
    except OSError as error:
        raise DataError(f"data.train_files: {file!s:.200} cannot be read: {error.strerror or error}") from error
    if kind != "file":
        raise DataError(f"data.train_files: {file} does not exist or is no file (looked from {Path.cwd()})")
    return read_rows(file, required=REQUIRED_COLUMNS, optional=OPTIONAL_COLUMNS)


def _parse(row: Mapping[str, Any], *, index: int, where: str) -> Prompt:
    reward_model, extra_info = row["reward_model"], row.get("extra_info")
    if not isinstance(reward_model, Mapping) or reward_model.get("ground_truth") is None:
        raise _malformed(where, "reward_model.ground_truth is missing", reward_model)
    if row["data_source"] is None:
        raise _malformed(where, "data_source is missing", None)
    if not isinstance(extra_info, Mapping | None):
        raise _malformed(where, "extra_info must be a struct or null", extra_info)
    return Prompt(
        index=index,
        data_source=str(row["data_source"]),
        messages=_parse_messages(row["prompt"], where=where),
        ground_truth=str(reward_model["ground_truth"]),
        extra_info=extra_info,
    )


def _parse_messages(value: Any, *, where: str) -> tuple[Mapping[str, str], ...]:
    well_formed = isinstance(value, list) and value and all(_is_message(message) for message in value)
    if not well_formed:
        raise _malformed(where, "prompt must be a list of {role, content}", value)
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _malformed(where: str, what: str, value: object) -> DataError:
    # Quotes only the beginning, because a value may be large.
    return DataError(f"data.train_files: {where}: {what}, got {reprlib.repr(value)}")
