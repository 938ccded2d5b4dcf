"""Reads the weights of a sync back from a vLLM model, after its loaders and layers have processed them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rl_safe_workers.rollout.cuts import ONLY_RANK, EngineRank
from rl_safe_workers.rollout.digest import Span, digests_of, prepared
from rl_safe_workers.rollout.engine_places import EnginePlaces
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.sync_proof import HeldCut, HeldWeights

_CONVERT = "process_weights_after_loading"


def obstacle(vllm_config: Any) -> str | None:
    """Returns the reason why an engine's weights cannot be read back; None if they can.

    Args:
        vllm_config: vLLM's ``VllmConfig`` of the engine.
    """
    layout = vllm_config.parallel_config
    if layout.world_size > layout.tensor_parallel_size or layout.data_parallel_size > 1:
        return "it has pipeline or data parallelism"
    if layout.enable_expert_parallel and (layout.enable_eplb or layout.expert_placement_strategy != "linear"):
        return "its experts are not in order on its ranks"
    if vllm_config.quant_config is not None:
        return "its weights are quantised"
    if vllm_config.lora_config is not None:
        return "it is sent LoRA adapters"
    if vllm_config.model_config.is_multimodal_model:
        return "its model is multimodal"
    return None


def engine_rank(vllm_config: Any, rank: int) -> EngineRank:
    """Returns a vLLM worker's rank in its engine. The engine must not have an `obstacle`.

    Args:
        vllm_config: vLLM's ``VllmConfig`` of the engine.
        rank: The worker's rank in vLLM's world, in which an engine's ranks are consecutive.
    """
    layout = vllm_config.parallel_config
    if layout.tensor_parallel_size == 1:
        return ONLY_RANK
    return EngineRank(
        rank=rank % layout.tensor_parallel_size,
        size=layout.tensor_parallel_size,
        kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
        expert_parallel=layout.enable_expert_parallel,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The memory of some places in a model."""

    numbers: tuple[int, ...]
    """Numbers of the places."""
    take: Callable[[], torch.Tensor]
    """Takes the places' digests: int64, ``[number of places]``."""
    sizes: Mapping[str, int]
    """Number of elements of each parameter that has one of the places, by name."""
    lasts: bool
    """True if later updates can use the layout while the parameters stay where they are. It then holds no parameter."""


_LAST_LAYOUT: WeakKeyDictionary[torch.nn.Module, tuple[EnginePlaces, Hashable, _Layout]] = WeakKeyDictionary()
"""The last layout of all places of a model, with its key. Making a layout takes longer than reading the weights."""


_LAST_PLACES: WeakKeyDictionary[torch.nn.Module, tuple[Hashable, EnginePlaces]] = WeakKeyDictionary()
"""The last places of a model, with the arguments that they were found for."""


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
        self._found = _places_of(model, tuple(specs), rank)
        self._converted: dict[int, int] = {}
        """Digests from before a conversion, by the number of the place."""
        self._prepared: _Layout | None = None
        """The layout of all places for `finish`; None if `finish` must find it."""
        self._sizes: dict[str, int] = {}
        self._seconds = 0.0
        self._watching = ExitStack()

    def watch(self) -> None:
        """Takes digests at each conversion from now on, until `finish` or `stop`."""
        for name in self._numbers:
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
        """Runs the conversion of a module. Keeps the earlier digest of each weight that the conversion changes.

        Args:
            name: Name of the module.
            convert: Converts the module's weights.
        """
        started_s = time.monotonic()
        layout = self._layout(self._numbers.get(name, []))
        before = self._read(layout)
        self._sizes |= layout.sizes
        del layout  # it holds the weights, whose memory the conversion may free
        self._seconds += time.monotonic() - started_s
        convert()
        started_s = time.monotonic()
        after = self._read(self._layout(before))
        self._converted |= {number: digest for number, digest in before.items() if after.get(number) != digest}
        self._seconds += time.monotonic() - started_s

    def stop(self) -> None:
        """Ends the effect of `watch`. Idempotent."""
        self._watching.close()

    def prepare(self) -> None:
        """Looks for the layout of an earlier update. Call it if this update leaves all parameters where they are."""
        started_s = time.monotonic()
        self._prepared = self._known_layout(self._layout_key())
        self._seconds += time.monotonic() - started_s

    def finish(self) -> HeldWeights:
        """Reads all weights that no layer has converted; returns all digests. Waits for the device."""
        self.stop()
        started_s = time.monotonic()
        layout = self._prepared
        if layout is None:
            layout = self._full_layout() if not self._converted else self._layout(self._unconverted())
        held = self._read(layout) | self._converted
        whole: list[tuple[str, int]] = []
        cuts: list[HeldCut] = []
        unread: list[str] = []
        for number, place in enumerate(self._found.places):
            name, cut, digest = place.spec.name, place.cut, held.get(number)
            if digest is None:
                unread.append(name)
            elif cut is None:
                whole.append((name, digest))
            else:
                cuts.append(
                    HeldCut(name=name, digest=digest, first=cut.first, length=cut.length, whole_length=cut.whole_length)
                )
        self._sizes |= layout.sizes
        return HeldWeights(
            digests=tuple(whole),
            cuts=tuple(cuts),
            converted=len(self._converted),
            unread=(*self._found.unplaced, *unread),
            faults=(*self._found.faults, *self._found.gaps(self._sizes)),
            seconds=self._seconds + time.monotonic() - started_s,
        )

    def _unconverted(self) -> list[int]:
        return [number for number in range(len(self._found.places)) if number not in self._converted]

    @cached_property
    def _numbers(self) -> dict[str, list[int]]:
        """Numbers of places by the name of the module that has the parameter."""
        found: dict[str, list[int]] = {}
        for number, place in enumerate(self._found.places):
            found.setdefault(place.parameter.rpartition(".")[0], []).append(number)
        return found

    def _layout_key(self) -> Hashable:
        """Returns the properties of the parameters that a layout depends on."""
        return tuple(
            (name, each.data_ptr(), each.shape, each.stride(), each.dtype)
            for name, each in self._model.named_parameters()
        )

    def _known_layout(self, key: Hashable) -> _Layout | None:
        """Returns the layout of an earlier update if all parameters are where they were; else None."""
        found, known_key, layout = _LAST_LAYOUT.get(self._model, (None, None, None))
        return layout if found is self._found and known_key == key else None

    def _full_layout(self) -> _Layout:
        """Returns the layout of all places. Keeps it, if it lasts, until a parameter moves."""
        key = self._layout_key()
        if (known := self._known_layout(key)) is not None:
            return known
        layout = self._layout(range(len(self._found.places)), keep=True)
        if layout.lasts:
            _LAST_LAYOUT[self._model] = self._found, key, layout
        return layout

    def _layout(self, numbers: Iterable[int], *, keep: bool = False) -> _Layout:
        """Finds the memory of places. Leaves out a place whose rule does not fit its parameter.

        Args:
            numbers: Numbers of the places.
            keep: True to prepare a layout that can be used again.
        """
        parameters: dict[str, torch.Tensor] = {}
        read: list[int] = []
        views: list[torch.Tensor] = []
        spans: list[Span] = []
        are_views = True
        for number in numbers:
            place = self._found.places[number]
            parameter = parameters.get(place.parameter)
            if parameter is None:
                parameter = parameters[place.parameter] = self._model.get_parameter(place.parameter).detach()
            view, span = place.view_in(parameter), place.span
            if view is not None and span is not None:
                read.append(number)
                views.append(view)
                spans.append(span)
                # The view of a weight that the model holds in a wider dtype is a copy. It must live until it is read.
                are_views &= view.dtype == parameter.dtype
        take = prepared(views, spans) if keep and are_views else None
        names = {self._found.places[number].parameter for number in read}
        return _Layout(
            numbers=tuple(read),
            take=take or partial(digests_of, views, spans),
            sizes={name: parameters[name].numel() for name in names},
            lasts=take is not None,
        )

    def _read(self, layout: _Layout) -> dict[int, int]:
        """Returns the digests of places, by their numbers. Waits for the device."""
        return dict(zip(layout.numbers, layout.take().tolist(), strict=True))


def _places_of(model: torch.nn.Module, specs: tuple[WeightSpec, ...], rank: EngineRank) -> EnginePlaces:
    """Returns `EnginePlaces.of(...)`, and caches it.

    With many experts, finding the places takes longer than reading them.
    """
    parts = specs, tuple(name for name, _ in model.named_parameters()), rank
    kept, places = _LAST_PLACES.get(model, (None, None))
    # Compare, do not hash: Python compares identical objects fast, but would hash thousands of them anew.
    if places is None or kept != parts:
        places = EnginePlaces.of(*parts)
        _LAST_PLACES[model] = parts, places
    return places
