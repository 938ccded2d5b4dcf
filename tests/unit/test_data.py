"""Prompt files in verl's layout, and the order in which a run goes through them."""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from rl_safe_workers.driver.inputs.data import PromptDataset, PromptLoader
from rl_safe_workers.driver.inputs.prompt_lengths import check_prompt_lengths
from rl_safe_workers.driver.inputs.rewards import CHARACTER_CLASSES
from rl_safe_workers.errors import DataError, ModelError

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


def make_loader(
    source: Path | PromptDataset, *, batch_size: int = 2, shuffle: bool = True, seed: int = 0
) -> PromptLoader:
    """A loader of a file, or of a dataset that is read already: a process of its own reads each."""
    dataset = PromptDataset([source]) if isinstance(source, Path) else source
    return PromptLoader(dataset, batch_size=batch_size, shuffle=shuffle, seed=seed)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_source": None}, "row 1: data_source is missing"),
        ({"prompt": None}, "row 1: prompt must be a list of {role, content}, got None"),
        ({"prompt": [None]}, "row 1: prompt must be"),
        ({"prompt": [{"role": None, "content": "x"}]}, "row 1: prompt must be"),
        ({"reward_model": None}, "row 1: reward_model.ground_truth is missing, got None"),
    ],
)
def test_a_null_is_named_with_its_row(write: Write, change: dict[str, Any], message: str) -> None:
    assert message in complaint(write([make_row(0), make_row(1) | change]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": 3}, "row 0: prompt must be"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "row 0: prompt must be"),
        ({"prompt": [{"role": "user", "content": b"x" * 10**6}]}, "row 0: prompt must be"),
        ({"reward_model": "rule"}, "row 0: reward_model.ground_truth is missing"),
        ({"extra_info": "index"}, "row 0: extra_info must be a struct or null"),
    ],
)
def test_another_type_is_named_with_its_row(write: Write, change: dict[str, Any], message: str) -> None:
    assert message in (found := complaint(write([make_row(0) | change])))
    assert len(found) < 1_000


def write_table(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def good_columns(rows: int = 1) -> dict[str, Any]:
    return pa.Table.from_pylist([make_row(number) for number in range(rows)]).to_pydict()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["string many times", "messages many times", "rows of null"])
def test_a_small_file_that_decodes_to_much_is_refused(tmp_path: Path, kind: str) -> None:
    path, number = tmp_path / "bomb.parquet", 10**7
    columns: dict[str, Any] = {name: pa.array(values) for name, values in good_columns().items()}
    if kind == "string many times":
        rows = 10**5
        columns = {name: pa.array(values * rows) for name, values in good_columns().items()}
        columns["data_source"] = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * 2**20])
    elif kind == "messages many times":
        nulls = pa.nulls(number, pa.string())
        messages = pa.StructArray.from_arrays([nulls, nulls], ["role", "content"])
        columns["prompt"] = pa.ListArray.from_arrays(pa.array([0, number], pa.int32()), messages)
    else:
        columns = {name: pa.nulls(number, pa.array(values).type) for name, values in good_columns().items()}
    write_table(path, columns, compression="zstd")
    assert path.stat().st_size < 2**20
    peak = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    assert "bomb.parquet" in complaint(path)
    after = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    assert all(now - before < 2**20 for now, before in zip(after, peak, strict=True))


def test_columns_that_no_prompt_needs_are_not_read(tmp_path: Path) -> None:
    more = {f"column{number}": [1] for number in range(2_000)}
    assert len(PromptDataset([write_table(tmp_path / "wide.parquet", good_columns() | more)])) == 1
    lacking = complaint(write_table(tmp_path / "wide.parquet", more))
    assert "lacks column data_source, prompt, reward_model; it has column0, " in lacking
    assert lacking.endswith("and 1980 more")


def test_a_schema_of_many_levels_is_refused(tmp_path: Path) -> None:
    kind = pa.string()
    for _ in range(200):
        kind = pa.list_(kind)
    columns = good_columns() | {"prompt": pa.nulls(1, kind)}
    path = write_table(tmp_path / "deep.parquet", columns, store_schema=False)
    assert "too deeply nested" in complaint(path)


def test_a_categorical_column_is_read(tmp_path: Path) -> None:
    columns = good_columns(3) | {"data_source": pa.array(["a", "b", "a"]).dictionary_encode()}
    dataset = PromptDataset([write_table(tmp_path / "x.parquet", columns)])
    assert [prompt.data_source for prompt in dataset] == ["a", "b", "a"]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([2**31 - 1], pa.date32()),
        pa.array([2**62], pa.timestamp("ms")),
        pa.array([2**62 + 1], pa.timestamp("ns")),
        pa.array([2**63 - 1], pa.duration("s")),
        pa.array([0], pa.timestamp("s", "../../etc/passwd")),
        pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]),
    ],
    ids=lambda values: str(values.type),
)
def test_a_value_that_python_cannot_hold_is_refused(tmp_path: Path, values: pa.Array) -> None:
    info = pa.StructArray.from_arrays([values], ["info"])
    path = write_table(tmp_path / "x.parquet", good_columns() | {"extra_info": info})
    assert "x.parquet has " in complaint(path)


def test_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    broken = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    assert "cannot be read as parquet" in complaint(
        write_table(tmp_path / "x.parquet", good_columns() | {"data_source": broken})
    )


def test_every_cut_of_a_file_is_refused(write: Write) -> None:
    path = write()
    data = path.read_bytes()
    for length in (0, 3, 4, 11, 12, len(data) // 2, len(data) - 9, len(data) - 4, len(data) - 1):
        path.write_bytes(data[:length])
        assert "cannot be read as parquet" in complaint(path)


def test_a_damaged_byte_never_makes_a_traceback(write: Write) -> None:
    path, chance = write(), random.Random(7)
    data = path.read_bytes()
    refused = []
    for _ in range(20):
        damaged = bytearray(data)
        for _ in range(3):
            damaged[chance.randrange(4, len(data))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            PromptDataset([path])
        except DataError as error:
            refused.append(str(error))
    assert len(refused) > 5
    assert not any("\n" in message for message in refused)


@pytest.mark.timeout(20)
def test_a_fifo_and_names_of_no_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.parquet")
    for path in (tmp_path / "x.parquet", tmp_path, Path("x" * 300), Path("a\0b")):
        assert "data.train_files: " in complaint(path)


def test_a_prompt_longer_than_allowed_is_named_with_its_row(write: Write, tmp_path: Path) -> None:
    long = make_row(1) | {"prompt": [{"role": "user", "content": "x" * 65}]}
    dataset = PromptDataset([write(name="a.parquet"), write([make_row(0), long], name="b.parquet")])
    check_prompt_lengths(dataset, tmp_path / "none", most=65)
    with pytest.raises(DataError, match=r"b.parquet, row 1: prompt has at least 65 tokens, more than .*=64"):
        check_prompt_lengths(dataset, tmp_path / "none", most=64)


def test_long_prompts_are_counted_in_tokens(write: Write, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"word": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding(length=1_000)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    row = make_row(0) | {"prompt": [{"role": "user", "content": "word " * 50}, {"role": "user", "content": "word"}]}
    dataset = PromptDataset([write([row])])
    check_prompt_lengths(dataset, tmp_path, most=51)
    with pytest.raises(DataError, match="at least 51 tokens"):
        check_prompt_lengths(dataset, tmp_path, most=50)
    (tmp_path / "tokenizer.json").write_text("[" * 10**5)
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be loaded"):
        check_prompt_lengths(dataset, tmp_path, most=50)


def test_without_shuffling_prompts_come_in_file_order(write: Write) -> None:
    assert take(make_loader(write(), shuffle=False), 5) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_every_epoch_holds_every_prompt_once_in_an_order_of_its_own(write: Write) -> None:
    order = take(make_loader(write([make_row(i) for i in range(20)]), batch_size=4), 10)
    assert sorted(order[:20]) == sorted(order[20:]) == list(range(20))
    assert order[:20] != order[20:] != list(range(20))


def test_the_order_depends_on_the_seed_alone(write: Write) -> None:
    dataset = PromptDataset([write([make_row(i) for i in range(20)])])
    assert take(make_loader(dataset), 10) == take(make_loader(dataset), 10)
    assert take(make_loader(dataset), 10) != take(make_loader(dataset, seed=1), 10)


def test_a_batch_may_be_larger_than_the_dataset(write: Write) -> None:
    assert sorted(take(make_loader(write(), batch_size=10), 1)) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("batches_before", range(7))
def test_a_resumed_loader_continues_at_the_next_prompt(write: Write, batches_before: int) -> None:
    dataset = PromptDataset([write()])
    first = make_loader(dataset)
    take(first, batches_before)
    resumed = make_loader(dataset)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(resumed, 6) == take(first, 6)


def test_a_resumed_loader_may_use_another_batch_size(write: Write) -> None:
    dataset = PromptDataset([write()])
    first, resumed = make_loader(dataset), make_loader(dataset, batch_size=3)
    take(first, 2)
    resumed.load_state_dict(first.state_dict())
    assert take(resumed, 2) == take(first, 3)


def test_the_state_of_another_dataset_is_refused(write: Write) -> None:
    state = make_loader(write()).state_dict()
    with pytest.raises(DataError, match="5 prompts, data.train_files has 2"):
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
