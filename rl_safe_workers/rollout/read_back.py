"""Reads the weights of a sync back from a vLLM model, after its loaders and layers have processed them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from rl_safe_workers.rollout.digest import Span, digests
from rl_safe_workers.rollout.engine_places import ONLY_RANK, EnginePlaces, EngineRank, Place
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.sync_proof import HeldCut, HeldWeights

_CONVERT = "process_weights_after_loading"


def obstacle(vllm_config: Any) -> str | None:
    """Returns the reason why an engine's weights cannot be read back; None if they can.

    Args:
        vllm_config: vLLM's ``VllmConfig`` of the engine.
    """
    if vllm_config.parallel_config.world_size > 1:
        return "it has more than one GPU"
    if vllm_config.quant_config is not None:
        return "its weights are quantised"
    if vllm_config.lora_config is not None:
        return "it is sent LoRA adapters"
    if vllm_config.model_config.is_multimodal_model:
        return "its model is multimodal"
    return None


class ReadBack:
    """Takes digests of a model's weights. One object serves one update.

    A layer may convert its weights to a layout that only its kernel reads. The digests of such weights are taken just
    before the conversion, when the loader has written them. All other digests are taken at the end.
    """

    def __init__(self, model: torch.nn.Module, specs: Sequence[WeightSpec], rank: EngineRank = ONLY_RANK) -> None:
        """Finds the places of the weights; reads nothing.

        Args:
            model: The model of one rank of an engine.
            specs: All weights of a sync.
            rank: The rank of the engine that has this model.
        """
        self._model = model
        self._found = EnginePlaces.of(specs, [name for name, _ in model.named_parameters()], rank)
        self._places: dict[str, list[Place]] = {}
        """Places by the name of the module that has the parameter."""
        for place in self._found.places:
            self._places.setdefault(place.parameter.rpartition(".")[0], []).append(place)
        self._converted: dict[Place, int] = {}
        self._sizes: dict[str, int] = {}
        self._seconds = 0.0
        self._watching = ExitStack()

    def watch(self) -> None:
        """Takes digests at each conversion from now on, until `finish` or `stop`."""
        for name in self._places:
            module = self._model.get_submodule(name)
            method = getattr(module, "quant_method", None)
            if hasattr(method, _CONVERT):
                self._wrap(module, name, method)

    def _wrap(self, module: torch.nn.Module, name: str, method: Any) -> None:
        convert = getattr(method, _CONVERT)

        def watched(layer: torch.nn.Module) -> None:
            if layer is module:
                self.around(name, lambda: convert(layer))
            else:
                convert(layer)

        before = vars(method).get(_CONVERT)
        setattr(method, _CONVERT, watched)
        if before is None:
            self._watching.callback(delattr, method, _CONVERT)
        else:
            self._watching.callback(setattr, method, _CONVERT, before)

    def around(self, name: str, convert: Callable[[], None]) -> None:
        """Runs a conversion of a module. For each weight that it changes, keeps the digest from before.

        Args:
            name: Name of the module.
            convert: Converts its weights.
        """
        before = self._read(self._places.get(name, []))
        convert()
        after = self._read(list(before))
        self._converted |= {place: digest for place, digest in before.items() if after.get(place) != digest}

    def stop(self) -> None:
        """Ends the effect of `watch`. Idempotent."""
        self._watching.close()

    def finish(self) -> HeldWeights:
        """Reads all weights that no layer has converted. Waits for the device."""
        self.stop()
        held = self._read([place for place in self._found.places if place not in self._converted])
        held |= self._converted
        whole = tuple((one.spec.name, held[one]) for one in self._found.places if one in held and one.cut is None)
        cuts = tuple(
            HeldCut(name=one.spec.name, digest=held[one], first=one.cut.first, length=one.cut.length, of=one.cut.of)
            for one in self._found.places
            if one in held and one.cut is not None
        )
        unread = [place.spec.name for place in self._found.places if place not in held]
        return HeldWeights(
            digests=whole,
            cuts=cuts,
            converted=len(self._converted),
            unread=(*self._found.unplaced, *unread),
            faults=(*self._found.faults, *self._found.gaps(self._sizes)),
            seconds=self._seconds,
        )

    def _read(self, places: Sequence[Place]) -> dict[Place, int]:
        started_s = time.monotonic()
        parameters: dict[str, torch.Tensor] = {}
        views: dict[Place, torch.Tensor] = {}
        spans: dict[Place, Span] = {}
        for place in places:
            if place.parameter not in parameters:
                parameters[place.parameter] = self._model.get_parameter(place.parameter)
            view, span = place.of(parameters[place.parameter]), place.span
            if view is not None and span is not None:
                views[place], spans[place] = view, span
                self._sizes[place.parameter] = parameters[place.parameter].numel()
        found = dict(zip(views, digests(list(views.values()), list(spans.values())).tolist(), strict=True))
        self._seconds += time.monotonic() - started_s
        return found
