"""Digests of weights on their way out: of each, in its order, before it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_safe_workers.rollout import sent_digests
from rl_safe_workers.rollout.digest import digests_of
from rl_safe_workers.rollout.read_back import obstacle
from rl_safe_workers.rollout.sent_digests import SentDigests

WEIGHTS = {f"layers.{number}.weight": torch.arange(number + 3, dtype=torch.float32) for number in range(7)}


@pytest.mark.parametrize("at_once_bytes", [0, 40, 10**6])
def test_weights_pass_in_their_order_and_their_digests_are_those_of_before(at_once_bytes: int) -> None:
    found = SentDigests()
    passed = []
    weights = ((name, tensor.clone()) for name, tensor in WEIGHTS.items())
    for name, tensor in found.passing(weights, at_once_bytes=at_once_bytes):
        passed.append((name, tensor.clone()))
        tensor.fill_(-1)
    assert [name for name, _ in passed] == list(WEIGHTS)
    assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in passed)
    assert found.sent().digests == dict(zip(WEIGHTS, digests_of(list(WEIGHTS.values())).tolist(), strict=True))


def test_a_large_last_weight_leaves_no_digests_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of no tensors are on the CPU. ``torch.cat`` refuses them beside those of a GPU."""
    found, taken = SentDigests(), []

    def noted(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        taken.append(len(tensors))
        return digests_of(tensors)

    monkeypatch.setattr(sent_digests, "digests_of", noted)
    for _ in found.passing(iter(WEIGHTS.items()), at_once_bytes=0):
        pass
    for _ in found.passing_on_their_streams(iter(())):
        pass
    assert taken == [1] * len(WEIGHTS)


@pytest.mark.parametrize("at_once_bytes", [0, 40])
def test_no_more_weights_are_held_than_fit(at_once_bytes: int) -> None:
    taken = []

    def weights() -> Any:
        for name, tensor in WEIGHTS.items():
            taken.append(tensor)
            yield name, tensor

    passing = SentDigests().passing(weights(), at_once_bytes=at_once_bytes)
    ahead = [sum(one.nbytes for one in taken[passed:]) for passed, _ in enumerate(passing)]
    assert max(ahead) <= at_once_bytes + max(tensor.nbytes for tensor in WEIGHTS.values())


@dataclass(frozen=True)
class Stream:
    """Stands for a stream of a GPU, and notes who waits for it."""

    name: str
    waited: list[str] = field(default_factory=list, compare=False)

    def synchronize(self) -> None:
        self.waited.append(self.name)


@pytest.mark.parametrize("at_once_bytes", [0, 20, 10**6])
def test_weights_of_several_streams_pass_as_they_come_and_are_digested_on_their_own_stream(
    at_once_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, current, digested, waited = SentDigests(), [Stream("before")], [], []
    first, second = Stream("first", waited), Stream("second", waited)
    monkeypatch.setattr(sent_digests, "_stream_of", lambda tensor: current[-1])

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def add(self: SentDigests, names: Sequence[str], take: Callable[[], torch.Tensor]) -> None:
        digested.append((current[-1], [len(WEIGHTS[name]) for name in names]))
        of_class(self, names, take)

    of_class = SentDigests.add
    monkeypatch.setattr(sent_digests.torch.cuda, "stream", on)
    monkeypatch.setattr(SentDigests, "add", add)
    weights = found.passing_on_their_streams(iter(WEIGHTS.items()), at_once_bytes=at_once_bytes)
    # A host that sends from two streams in turns, and asks in vain for one more weight on the second.
    turns = [*[first] * 3, *[second] * 2, *[first] * 2]
    passed = []
    for stream in (*turns, second):
        assert waited == []
        with on(stream):
            passed += [name for name, _ in [next(weights, ("", torch.empty(0)))] if name]
    assert passed == list(WEIGHTS) == list(found.sent().digests)
    taken_on = [(size, stream) for stream, sizes in digested for size in sizes]
    assert taken_on == list(zip(range(3, 10), turns, strict=True))
    assert len(digested) == {0: 7, 20: 6, 10**6: 3}[at_once_bytes]
    assert waited == ["first", "second"]
    assert found.sent().digests == dict(zip(WEIGHTS, digests_of(list(WEIGHTS.values())).tolist(), strict=True))


def test_held_weights_are_digested_many_at_once_and_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(tensors: Sequence[torch.Tensor], *, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
        calls.append(len(tensors))
        return digests_of(tensors, sizes=sizes)

    monkeypatch.setattr(sent_digests, "digests_of", counted)
    monkeypatch.setattr(sent_digests, "AT_ONCE_BYTES", 100)
    weights = {f"weight{number}": torch.randn(10) for number in range(7)}
    taken = SentDigests()
    for name, tensor in weights.items():
        assert name not in taken
        taken.hold([name], [tensor], [[tensor.nbytes]])
        assert name in taken
    joined = torch.randn(4)
    taken.hold(["first", "second"], [joined], [[8, 8]])
    found = taken.sent().digests
    assert calls == [3, 3, 2]
    weights |= {"first": joined[:2], "second": joined[2:]}
    assert found == {name: int(digests_of([tensor])) for name, tensor in weights.items()}


def test_a_sync_without_weights_has_no_digests() -> None:
    assert SentDigests().sent().digests == {}
    found = SentDigests()
    assert list(found.passing_on_their_streams(iter(()))) == []
    assert found.sent().digests == {}


def parallel(**more: Any) -> SimpleNamespace:
    """Returns vLLM's configuration of the ranks of an engine with two tensor-parallel ranks."""
    plain = {"world_size": 2, "tensor_parallel_size": 2, "data_parallel_size": 1, "enable_expert_parallel": False}
    return SimpleNamespace(**{**plain, "enable_eplb": False, "expert_placement_strategy": "linear", **more})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"parallel_config": parallel()}, None),
        ({"parallel_config": parallel(enable_expert_parallel=True)}, None),
        ({"parallel_config": parallel(world_size=4)}, "it has pipeline or data parallelism"),
        ({"parallel_config": parallel(data_parallel_size=2)}, "it has pipeline or data parallelism"),
        (
            {"parallel_config": parallel(enable_expert_parallel=True, enable_eplb=True)},
            "its experts are not in order on its ranks",
        ),
        (
            {"parallel_config": parallel(enable_expert_parallel=True, expert_placement_strategy="round_robin")},
            "its experts are not in order on its ranks",
        ),
        ({"quant_config": object()}, "its weights are quantised"),
        ({"lora_config": object()}, "it is sent LoRA adapters"),
        ({"model_config": SimpleNamespace(is_multimodal_model=True)}, "its model is multimodal"),
    ],
)
def test_an_engine_that_cannot_be_read_back_says_why(changed: dict[str, Any], reason: str | None) -> None:
    plain = {
        "parallel_config": parallel(world_size=1, tensor_parallel_size=1),
        "quant_config": None,
        "lora_config": None,
        "model_config": SimpleNamespace(is_multimodal_model=False),
    }
    assert obstacle(SimpleNamespace(**plain | changed)) == reason
