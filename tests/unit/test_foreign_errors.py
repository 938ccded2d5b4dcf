"""Messages of torch, NCCL, gloo, Ray and the system are told apart; what is not known is unknown."""

from __future__ import annotations

import builtins
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError, WorkerCrashedError

from rl_safe_workers.foreign_errors import PATTERNS, ForeignCause, classify

MESSAGES: list[dict[str, str]] = json.loads(
    (Path(__file__).parent / "foreign_messages.json").read_text(encoding="utf-8")
)
"""Real ones: text, type where it is known, library and version, where it was seen, and what it is."""
SOURCE = re.compile(r"raised here: .+|[\w.-]+/[\w.-]+#\d+|(torch|ray|vllm|megatron)/[\w/.]+\.(py:\d+|so)")


def as_raised(message: dict[str, str]) -> BaseException | str:
    """The exception with the message, where its type is one of torch's or of Python's; else the text."""
    name, text = message.get("type", ""), message["text"]
    if system := re.fullmatch(r"\[Errno (\d+)\] (.+)", text):
        return OSError(int(system[1]), system[2])
    if message["library"] == "requests" or not name:
        return text
    cls: Any = getattr(builtins, name, None) or getattr(torch.distributed, name, None) or getattr(torch, name, None)
    return text if cls is None else cls(text)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: f"{message['kind']}: {message['text'][:60]!a}")
def test_a_real_message_is_what_it_is(message: dict[str, str]) -> None:
    raised = as_raised(message)
    assert classify(raised) == message["kind"]
    if type(raised) is RuntimeError:
        assert classify(message["text"]) == message["kind"]


def test_the_corpus_is_large_and_says_where_each_message_is_from() -> None:
    texts = Counter(message["text"] for message in MESSAGES)
    assert len(texts) == len(MESSAGES) >= 60
    assert {message["kind"] for message in MESSAGES} == set(ForeignCause)
    assert [message["seen"] for message in MESSAGES if not SOURCE.fullmatch(message["seen"])] == []
    assert [message for message in MESSAGES if not message["library"] or not message["version"]] == []


@pytest.mark.parametrize(("kind", "pattern"), [(kind, one) for kind, of in PATTERNS.items() for one in of])
def test_every_pattern_is_of_a_real_message(kind: ForeignCause, pattern: str) -> None:
    assert [message for message in MESSAGES if message["kind"] == kind and re.search(pattern, message["text"])]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerCrashedError(), ForeignCause.PEER_LOST),
        (ActorDiedError(), ForeignCause.PEER_LOST),
        (GetTimeoutError("Get timed out: some object(s) not ready."), ForeignCause.TIMEOUT),
        (RayTaskError("f", "Traceback", ValueError("x")), ForeignCause.UNKNOWN),
        (MemoryError(), ForeignCause.OUT_OF_MEMORY),
        (OSError(122, "Disk quota exceeded"), ForeignCause.NO_SPACE),
        (OSError(110, "Connection timed out", "/nfs/checkpoints"), ForeignCause.UNKNOWN),
        (TimeoutError("Timed out waiting 1500ms for recv operation to complete"), ForeignCause.UNKNOWN),
        (AssertionError("wait timeout after 300ms, keys: /never"), ForeignCause.UNKNOWN),
        (ValueError("Connection closed by peer [127.0.0.1]:36492"), ForeignCause.UNKNOWN),
        (RuntimeError(), ForeignCause.UNKNOWN),
        (KeyboardInterrupt(), ForeignCause.UNKNOWN),
    ],
)
def test_the_type_of_an_error_counts_before_its_text(error: BaseException, kind: ForeignCause) -> None:
    assert classify(error) is kind


def test_only_timeouts_and_lost_connections_are_about_others() -> None:
    about_others = {kind for kind in ForeignCause if kind.is_about_others}
    assert about_others == {ForeignCause.TIMEOUT, ForeignCause.PEER_LOST, ForeignCause.STORE_LOST}
