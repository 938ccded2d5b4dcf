"""Weights of an engine that go wrong: what the hosts' doubles of a vLLM worker do to them. Needs nothing but torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

OUT = "model.layers.0.self_attn.o_proj.weight"
GATE = "model.layers.1.mlp.gate.weight"
NORM = "model.norm.weight"
EXPERTS = "model.layers.1.mlp.experts.routed_experts.w2_weight"


def flip_a_bit(tensor: torch.Tensor) -> None:
    """Changes one bit of a tensor of 16-bit elements."""
    tensor.view(-1).view(torch.int16)[7] ^= 1


def reverse_weight(layer: Any, remove_weight: bool) -> None:
    """Converts a layer's weight as a kernel of a GPU would, in the place of vLLM's ``dispatch_cpu_unquantized_gemm``.

    vLLM's CPU build packs a weight and frees the parameter, into which a host loads the next one.
    """
    layer.weight.data = layer.weight.data.flip(0)
    layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, weight.flip(0), bias)


class FaultyParameters:
    """Changes parameters between vLLM's loaders and its layers."""

    def __init__(self) -> None:
        self._before = torch.empty(0)
        """The weight `GATE` of the sync before."""

    @torch.no_grad()
    def change(self, fault: str | None, held: Mapping[str, torch.Tensor]) -> None:
        """Call it in every sync.

        Args:
            fault: ``"a bit"``, ``"experts"``, ``"stale"``; another text or None: nothing is changed.
            held: The parameters by vLLM's name.
        """
        gate = held[GATE]
        now = gate.clone()
        if fault == "a bit":
            flip_a_bit(held[OUT])
        elif fault == "experts":
            held[EXPERTS][[0, 1]] = held[EXPERTS][[1, 0]]
        elif fault == "stale":
            assert not torch.equal(now, self._before), "the step has changed it"
            gate.copy_(self._before)
        self._before = now
