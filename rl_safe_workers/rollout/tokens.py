"""Converts chat messages to token ids, and responses to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from rl_safe_workers.errors import DataError, ModelError, first_line
from rl_safe_workers.model_files import stop_token_ids


class ChatTokenizer:
    """The model's own tokenizer and chat template. Remote code is never run."""

    def __init__(self, model_path: str, *, max_prompt_length: int) -> None:
        """Loads the tokenizer of a local HF directory.

        Raises:
            ModelError: If the tokenizer cannot be loaded or has no chat template, or if neither the model's
                configuration nor the tokenizer names an end-of-sequence token.
        """
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                model_path, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # a damaged file can make transformers and tokenizers raise any type
            raise ModelError(
                f"{model_path}: the tokenizer cannot be loaded: {type(error).__name__}: {first_line(error):.300}"
            ) from error
        if not self._tokenizer.chat_template:
            raise ModelError(f"{model_path}: the tokenizer has no chat template; add one to tokenizer_config.json")
        self._max_prompt_length = max_prompt_length
        self.stop_token_ids = _stop_token_ids(Path(model_path), self._tokenizer)

    def encode(self, messages: Sequence[Mapping[str, str]], *, where: str) -> list[int]:
        """Returns the token ids of a prompt, by the model's chat template.

        Args:
            messages: The chat messages of the prompt.
            where: Names the prompt in errors, e.g. ``"prompt 3 of step 7"``.

        Raises:
            DataError: If the prompt is longer than ``data.max_prompt_length``.
            ModelError: If the model's chat template does not accept the messages.
        """
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            raise ModelError(f"the chat template fails for {where}: {first_line(error):.300}") from error
        if len(ids) > self._max_prompt_length:
            raise DataError(
                f"{where} has {len(ids)} tokens, more than data.max_prompt_length={self._max_prompt_length}"
            )
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a response, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def _stop_token_ids(model_path: Path, tokenizer: Any) -> list[int]:
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = sorted({*stop_token_ids(model_path), *own})
    if not ids:
        raise ModelError(f"{model_path}: neither config.json nor the tokenizer names an end-of-sequence token")
    return ids
