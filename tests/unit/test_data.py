"""Prompt files in verl's layout, and the order in which a run goes through them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_safe_workers.driver.data import PromptDataset, PromptLoader
from rl_safe_workers.driver.rewards import CHARACTER_CLASSES
from rl_safe_workers.errors import DataError

Write = Callable[..., Path]
QUICKSTART = Path(__file__).parents[2] / "recipes/data/char_class.parquet"


def make_row(number: int) -> dict[str, Any]:
    return {
        "data_source": "test",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"p{number}"}],
        "reward_model": {"style": "rule", "ground_truth": f"g{number}"},
        "extra_info": {"index": number},
    }


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows to a parquet file; by default five good ones."""

    def _write(rows: list[dict[str, Any]] | None = None, name: str = "prompts.parquet") -> Path:
        path = tmp_path / name
        pq.write_table(pa.Table.from_pylist(rows if rows is not None else [make_row(i) for i in range(5)]), path)
        return path

    return _write


def make_loader(path: Path, *, batch_size: int = 2, shuffle: bool = True, seed: int = 0) -> PromptLoader:
    return PromptLoader(PromptDataset([path]), batch_size=batch_size, shuffle=shuffle, seed=seed)


def take(loader: PromptLoader, batches: int) -> list[int]:
    return [prompt.index for _ in range(batches) for prompt in loader.next_batch()]


def complaint(*files: Path) -> str:
    with pytest.raises(DataError) as caught:
        PromptDataset(files)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_row_becomes_a_prompt(write: Write) -> None:
    prompt = PromptDataset([write()])[3]
    assert (prompt.index, prompt.data_source, prompt.ground_truth) == (3, "test", "g3")
    assert prompt.messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "p3"})
    assert prompt.extra_info == {"index": 3}


def test_extra_info_may_be_absent(write: Write) -> None:
    row = make_row(0)
    del row["extra_info"]
    assert PromptDataset([write([row])])[0].extra_info is None


def test_indices_run_on_over_several_files(write: Write) -> None:
    dataset = PromptDataset([write(name="a.parquet"), write(name="b.parquet")])
    assert [dataset[i].index for i in range(len(dataset))] == list(range(10))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "absent.parquet does not exist" in complaint(tmp_path / "absent.parquet")


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("hello, this is no parquet file")
    assert "text.parquet cannot be read as parquet" in complaint(tmp_path / "text.parquet")


@pytest.mark.parametrize("column", ["data_source", "prompt", "reward_model"])
def test_a_missing_column_is_named_with_its_file(write: Write, column: str) -> None:
    row = make_row(0)
    del row[column]
    assert f"prompts.parquet lacks column {column};" in complaint(write([row]))


def test_a_missing_ground_truth_is_named_with_its_row(write: Write) -> None:
    rows = [make_row(0), make_row(1) | {"reward_model": {"style": "rule", "ground_truth": None}}]
    message = complaint(write(rows))
    assert "row 1" in message
    assert "reward_model.ground_truth" in message


@pytest.mark.parametrize("prompt", ["plain text", [], [{"role": "user"}]])
def test_a_malformed_prompt_is_named_with_its_row(write: Write, prompt: Any) -> None:
    assert "row 0: prompt must be a list of {role, content}" in complaint(write([make_row(0) | {"prompt": prompt}]))


def test_a_dataset_without_prompts_is_refused(write: Write) -> None:
    empty = write()
    pq.write_table(pq.read_table(empty).slice(0, 0), empty)
    assert "no prompts" in complaint(empty)
    assert "an empty list" in complaint()


def test_without_shuffling_prompts_come_in_file_order(write: Write) -> None:
    assert take(make_loader(write(), shuffle=False), 5) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_every_epoch_holds_every_prompt_once_in_an_order_of_its_own(write: Write) -> None:
    order = take(make_loader(write([make_row(i) for i in range(20)]), batch_size=4), 10)
    assert sorted(order[:20]) == sorted(order[20:]) == list(range(20))
    assert order[:20] != order[20:] != list(range(20))


def test_the_order_depends_on_the_seed_alone(write: Write) -> None:
    path = write([make_row(i) for i in range(20)])
    assert take(make_loader(path), 10) == take(make_loader(path), 10)
    assert take(make_loader(path), 10) != take(make_loader(path, seed=1), 10)


def test_a_batch_may_be_larger_than_the_dataset(write: Write) -> None:
    assert sorted(take(make_loader(write(), batch_size=10), 1)) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("batches_before", range(7))
def test_a_resumed_loader_continues_at_the_next_prompt(write: Write, batches_before: int) -> None:
    path = write()
    first = make_loader(path)
    take(first, batches_before)
    resumed = make_loader(path)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(resumed, 6) == take(first, 6)


def test_a_resumed_loader_may_use_another_batch_size(write: Write) -> None:
    first, resumed = make_loader(write()), make_loader(write(), batch_size=3)
    take(first, 2)
    resumed.load_state_dict(first.state_dict())
    assert take(resumed, 2) == take(first, 3)


def test_the_state_of_another_dataset_is_refused(write: Write) -> None:
    state = make_loader(write()).state_dict()
    with pytest.raises(DataError, match="5 prompts, data.train_files holds 2"):
        make_loader(write([make_row(0), make_row(1)])).load_state_dict(state)


def test_a_batch_size_of_zero_is_refused(write: Write) -> None:
    with pytest.raises(DataError, match="train_batch_size must be at least 1, got 0"):
        make_loader(write(), batch_size=0)


def test_the_committed_prompts_ask_for_known_classes_in_few_words() -> None:
    dataset = PromptDataset([QUICKSTART])
    assert len(dataset) == 64
    for index in range(len(dataset)):
        assert dataset[index].ground_truth in CHARACTER_CLASSES
        assert sum(len(m["content"]) for m in dataset[index].messages) <= 32
