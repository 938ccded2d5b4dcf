"""Finds prompts that are certainly too long, by a cheap check before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rl_safe_workers.driver.inputs.data import Prompt, PromptDataset
from rl_safe_workers.errors import DataError, ModelError, first_line
from rl_safe_workers.models.hf_directory import TOKENIZER

_BATCH = 256


def check_prompt_lengths(dataset: PromptDataset, model: Path, *, most: int) -> None:
    """Refuses a prompt whose messages alone are longer than ``data.max_prompt_length``.

    A token has at least one byte. So this tokenizes only prompts with more bytes than allowed tokens, which are rare.
    The tokens that the chat template adds are counted later, when the prompt is rolled out.

    Args:
        dataset: The prompts.
        model: The model's folder. If it does not exist yet, the run will make a seeded model there, which has one token
            per character.
        most: Largest number of tokens of a prompt.

    Raises:
        DataError: If a prompt is too long; names its file and row.
        ModelError: If the tokenizer is needed and cannot be loaded.
    """
    long = [prompt for prompt in dataset if sum(len(m["content"].encode()) for m in prompt.messages) > most]
    if not long:
        return
    count = _counter(model / TOKENIZER) if model.exists() else _characters
    for start in range(0, len(long), _BATCH):
        prompts = long[start : start + _BATCH]
        for prompt, tokens in zip(prompts, count(prompts), strict=True):
            if tokens > most:
                raise DataError(
                    f"data.train_files: {dataset.where(prompt.index)}: prompt has at least {tokens} tokens, more than "
                    f"data.max_prompt_length={most}; shorten it, or raise data.max_prompt_length"
                )


def _characters(prompts: Sequence[Prompt]) -> list[int]:
    return [sum(len(message["content"]) for message in prompt.messages) for prompt in prompts]


def _counter(file: Path) -> Callable[[Sequence[Prompt]], list[int]]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"{file} cannot be loaded: {first_line(error):.300}; download the model again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(prompts: Sequence[Prompt]) -> list[int]:
        contents = [message["content"] for prompt in prompts for message in prompt.messages]
        lengths = iter([len(found) for found in tokenizer.encode_batch(contents, add_special_tokens=False)])
        return [sum(next(lengths) for _ in prompt.messages) for prompt in prompts]

    return count
