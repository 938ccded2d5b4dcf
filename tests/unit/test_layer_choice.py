"""Which layers a model gets, and what is said when Transformer Engine's cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.errors import ModelError
from rl_safe_workers.models import layer_choice
from rl_safe_workers.models.layer_choice import takes_transformer_engine, why_no_transformer_engine

SYMBOL = "undefined symbol: cublasLtGroupedMatrixLayoutInit_internal"


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    why_no_transformer_engine.cache_clear()
    yield
    why_no_transformer_engine.cache_clear()


@pytest.fixture
def logged(infos_of: Callable[[ModuleType], list[str]]) -> list[str]:
    return infos_of(layer_choice)


def _install(monkeypatch: pytest.MonkeyPatch, *, gpu: bool = True, broken: bool = False) -> None:
    def imported(name: str) -> Any:
        if broken:
            raise OSError(SYMBOL)

    monkeypatch.setattr(layer_choice, "find_spec", lambda name: object())
    monkeypatch.setattr(layer_choice, "import_module", imported)
    monkeypatch.setattr(layer_choice, "version_of", lambda name: "2.12.0")
    monkeypatch.setattr(layer_choice.torch.cuda, "is_available", lambda: gpu)


def test_it_is_taken_where_it_imports_and_that_is_logged(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    _install(monkeypatch)
    assert takes_transformer_engine(MegatronConfig())
    assert takes_transformer_engine(MegatronConfig(fp8="hybrid"))
    assert not takes_transformer_engine(MegatronConfig(transformer_impl="local"))
    assert logged == [
        *["layers: those of Transformer Engine 2.12.0"] * 2,
        "layers: Megatron's local ones: transformer_impl is local",
    ]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (None, "Transformer Engine is not installed"),
        ({"gpu": False}, "there is no GPU"),
        ({"broken": True}, f"Transformer Engine does not import: OSError: {SYMBOL}"),
    ],
)
def test_without_it_the_local_layers_are_taken_unless_a_setting_needs_it(
    monkeypatch: pytest.MonkeyPatch, logged: list[str], state: dict[str, bool] | None, reason: str
) -> None:
    if state is not None:
        _install(monkeypatch, **state)
    assert not takes_transformer_engine(MegatronConfig())
    assert logged == [f"layers: Megatron's local ones: {reason}"]
    for needed in ({"transformer_impl": "transformer_engine"}, {"fp8": "e4m3"}, {"moe_grouped_gemm": True}):
        with pytest.raises(ModelError, match=f"need Transformer Engine's layers: {reason}"):
            takes_transformer_engine(MegatronConfig(**needed))
