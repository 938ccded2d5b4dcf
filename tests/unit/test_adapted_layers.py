"""A layer within a wrapper whose state dict has it under the wrapper's own name, as Megatron-Bridge's adapters do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_safe_workers.checkpoint.state.adapted_layers import load_layers


class _Wrapper(torch.nn.Module):
    """Names its state as the AdapterWrapper of peft/adapter_wrapper.py does."""

    def __init__(self) -> None:
        super().__init__()
        self.to_wrap, self.adapter = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        destination = {} if destination is None else destination
        self.to_wrap.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        self.adapter.state_dict(destination=destination, prefix=f"{prefix}adapter.", keep_vars=keep_vars)
        return destination


class _Outer(torch.nn.Module):
    """As Float16Module: its state dict is that of the model within."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def state_dict(self, **options: Any) -> Any:
        return self.module.state_dict(**options)

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        return self.module.load_state_dict(state, strict=strict)


def _model() -> torch.nn.Module:
    return torch.nn.ModuleDict({"adapter": torch.nn.Linear(2, 2), "layers": torch.nn.ModuleList([_Wrapper()])})


@pytest.mark.parametrize("outer", [0, 2])
def test_a_model_loads_its_own_state_dict(outer: int) -> None:
    model, other = _model(), _model()
    for _ in range(outer):
        model, other = _Outer(model), _Outer(other)
    state = model.state_dict()
    assert "layers.0.weight" in state
    load_layers(other, state)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_name_that_the_model_lacks_is_an_error() -> None:
    model = _model()
    with pytest.raises(RuntimeError, match=r"layers\.0\.to_wrap\.other"):
        load_layers(model, {**model.state_dict(), "layers.0.other": torch.zeros(1)})
