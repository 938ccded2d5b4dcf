"""Weights that are read back: at the end, or before a layer converts them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn

from rl_safe_workers.rollout import read_back
from rl_safe_workers.rollout.digest import Span, digests_of
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.read_back import ReadBack
from tests.slow_digest import slow_digest

ROWS, COLUMNS = 6, 4
SPECS = [WeightSpec(name=f"{name}.weight", dtype="float32", shape=(ROWS, COLUMNS)) for name in ("plain", "packed")]


class Transposing:
    """A quantisation method as vLLM has them."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight.data = layer.weight.data.t().contiguous()


class Emptying:
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight.data = torch.empty(0)


class Shuffling:
    """As a kernel does that wants another order of rows in the same shape."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight.data = layer.weight.data.flip(0)


class Keeping:
    def process_weights_after_loading(self, layer: nn.Module) -> None: ...


def model(method: object) -> nn.ModuleDict:
    made = nn.ModuleDict({name: nn.Linear(COLUMNS, ROWS, bias=False) for name in ("plain", "packed")})
    made["packed"].quant_method = method
    return made


def updated(method: object) -> tuple[ReadBack, nn.ModuleDict, dict[str, int]]:
    made = model(method)
    loaded = {f"{name}.weight": slow_digest(layer.weight) for name, layer in made.items()}
    read_back = ReadBack(made, SPECS)
    read_back.watch()
    made["packed"].quant_method.process_weights_after_loading(made["packed"])
    return read_back, made, loaded


def test_a_weight_that_a_layer_converts_is_read_before() -> None:
    for method in (Transposing(), Emptying(), Shuffling()):
        read_back, _, loaded = updated(method)
        held = read_back.finish()
        assert (held.differences(loaded), held.converted, held.unread, held.faults) == ([], 1, (), ())


def test_a_weight_that_a_layer_keeps_is_read_at_the_end() -> None:
    read_back, made, loaded = updated(Keeping())
    with torch.no_grad():
        made["packed"].weight[0, 0] += 1
    held = read_back.finish()
    assert [sentence.split(":")[0] for sentence in held.differences(loaded)] == ["packed.weight"]
    assert held.converted == 0


def test_an_update_without_conversions_is_read_at_the_end() -> None:
    made = model(Transposing())
    held = ReadBack(made, SPECS).finish()
    assert held.differences({f"{name}.weight": slow_digest(layer.weight) for name, layer in made.items()}) == []


def test_a_weight_that_was_converted_unwatched_is_unread() -> None:
    made = model(Emptying())
    made["packed"].quant_method.process_weights_after_loading(made["packed"])
    assert ReadBack(made, SPECS).finish().unread == ("packed.weight",)


def test_the_methods_of_the_layers_are_as_before() -> None:
    read_back, made, _ = updated(Keeping())
    read_back.finish()
    assert "process_weights_after_loading" not in vars(made["packed"].quant_method)


def held_by(made: nn.Module) -> dict[str, int]:
    return dict(ReadBack(made, SPECS).finish().digests)


def expected_of(made: nn.ModuleDict) -> dict[str, int]:
    return {f"{name}.weight": slow_digest(layer.weight) for name, layer in made.items()}


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors of each preparation, which knows the tensors' memory only, as on a GPU."""
    found: list[int] = []

    def prepared(tensors: Sequence[torch.Tensor], spans: Sequence[Span]) -> Callable[[], torch.Tensor]:
        found.append(len(tensors))
        return partial(digests_of, [tensor.detach() for tensor in tensors], spans)

    monkeypatch.setattr(read_back, "prepared", prepared)
    return found


@pytest.mark.parametrize("lasts", [True, False], ids=["kept", "found anew"])
def test_weights_are_read_as_they_are_at_the_end_also_if_that_was_prepared(
    lasts: bool, request: pytest.FixtureRequest
) -> None:
    if lasts:
        request.getfixturevalue("preparations")
    made = model(Keeping())
    of_update = ReadBack(made, SPECS)
    of_update.prepare()
    with torch.no_grad():
        made["plain"].weight.add_(1)
    assert dict(of_update.finish().digests) == expected_of(made)


def test_each_update_is_read_anew_though_the_layout_is_kept(preparations: list[int]) -> None:
    made = model(Keeping())
    assert held_by(made) == expected_of(made)
    with torch.no_grad():
        made["plain"].weight.add_(1)
    assert held_by(made) == expected_of(made)
    assert preparations == [2]


def test_a_parameter_that_has_moved_is_read_where_it_is(preparations: list[int]) -> None:
    made = model(Keeping())
    before = held_by(made)
    made["plain"].weight.data = made["plain"].weight.data + 1
    assert held_by(made) == expected_of(made) != before
    made["packed"].weight = nn.Parameter(made["packed"].weight.detach() + 1)
    assert held_by(made) == expected_of(made)
    assert preparations == [2, 2, 2]


def test_a_weight_that_is_held_in_a_wider_dtype_is_read_anew(preparations: list[int]) -> None:
    made = model(Keeping()).double()
    for shift in range(2):
        with torch.no_grad():
            made["plain"].weight.fill_(shift)
        expected = {f"{name}.weight": slow_digest(layer.weight.float()) for name, layer in made.items()}
        assert held_by(made) == expected
    assert preparations == []


def test_no_model_is_kept(preparations: list[int]) -> None:
    made = model(Keeping())
    held_by(made)
    kept = weakref.ref(made)
    del made
    gc.collect()
    assert kept() is None
    assert preparations == [2]
