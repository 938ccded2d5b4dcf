"""Extra states of layers in 8 bits: what Transformer Engine pickles comes back, and nothing else is run."""

from __future__ import annotations

import enum
import io
import os
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject

from rl_safe_workers.checkpoint.folders.manifest import SHARDS
from rl_safe_workers.checkpoint.format.unpickle import LAYER_BYTES
from rl_safe_workers.checkpoint.load.loader import Loader
from rl_safe_workers.checkpoint.save.save_plan import Replicas
from rl_safe_workers.checkpoint.save.saver import Saver
from rl_safe_workers.checkpoint.state.layer_states import extra_states, layer_state_value, safe_layer_state
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.seal import new_secret
from rl_safe_workers.errors import CheckpointError, UnsafeCheckpointError
from rl_safe_workers.ranks import trainer_ids
from tests.hostile.pickles import Runs

TIMEOUT = timedelta(seconds=60)
KEY = "decoder.layers.0.mlp.linear_fc1._extra_state"
RECIPES = "transformer_engine.common.recipe"


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """As transformer_engine/common/recipe/__init__.py has it in 2.12."""

    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)


@dataclass
class DelayedScaling:
    """The fields that tell the recipes apart here."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"


@pytest.fixture(autouse=True)
def recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for Transformer Engine's recipes, which need a GPU's libraries to import."""
    for name in ("transformer_engine", "transformer_engine.common", RECIPES):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for kind in (Format, _FormatHelper, DelayedScaling):
        monkeypatch.setattr(kind, "__module__", RECIPES)
        setattr(sys.modules[RECIPES], kind.__name__, kind)


def _state() -> dict[str, Any]:
    """The extra state of a layer in 8 bits."""
    return {
        "recipe": DelayedScaling(margin=1, amax_history_len=4),
        "scale_fwd": torch.tensor([1.5, 0.25, 3.0]),
        "amax_history_fwd": torch.arange(12, dtype=torch.float32).view(4, 3),
        "scale_bwd": torch.arange(6, dtype=torch.float32)[1:3],
        "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": 1, "name": "linear_fc1", "sizes": [1, (2, None)]},
    }


def _bytes(value: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=protocol)), dtype=torch.uint8)


def _assert_equal(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)
        else:
            assert found[name] == value


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_layer_unpickles_the_state_that_was_saved(protocol: int) -> None:
    state = safe_layer_state(_bytes(_state(), protocol), KEY)
    _assert_equal(pickle.loads(state.numpy().tobytes()), _state())


def test_a_state_may_name_the_function_that_megatron_core_puts_in_the_place_of_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def safe_load_from_bytes(content: bytes) -> Any:
        return load(content)

    load, module = torch.storage._load_from_bytes, types.ModuleType("megatron.core.safe_globals")
    safe_load_from_bytes.__module__, safe_load_from_bytes.__qualname__ = module.__name__, "safe_load_from_bytes"
    vars(module)["safe_load_from_bytes"] = safe_load_from_bytes
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", safe_load_from_bytes)
    state = _bytes(_state())
    assert b"safe_load_from_bytes" in state.numpy().tobytes()
    _assert_equal(layer_state_value(state, KEY), _state())


@pytest.mark.parametrize("value", [None, torch.empty(0, dtype=torch.uint8), {"plain": 1}])
def test_what_no_layer_unpickles_stays(value: Any) -> None:
    assert safe_layer_state(value, KEY) is value


def _hostile(place: str, ran: Path) -> Any:
    program, state = Runs(os.system, f"touch {ran}"), _state()
    if place == "the whole":
        return program
    if place == "a field of the recipe":
        return state | {"recipe": DelayedScaling(amax_compute_algo=program)}
    if place == "a function of the recipe":
        return state | {"recipe": DelayedScaling(amax_compute_algo=os.system)}
    # Bytes that torch unpickles when it makes a storage of them.
    storage = Runs(torch.storage._load_from_bytes, pickle.dumps(program, protocol=2))
    return state | {"scale_fwd": Runs(torch._utils._rebuild_tensor_v2, storage, 0, (1,), (1,), False, OrderedDict())}


@pytest.mark.parametrize("place", ["the whole", "a field of the recipe", "a function of the recipe", "a storage"])
def test_a_state_that_calls_a_program_is_refused_by_name_and_not_run(place: str, tmp_path: Path) -> None:
    state = _bytes(_hostile(place, tmp_path / "ran"))
    with pytest.raises(UnsafeCheckpointError, match=r"asks for posix\.system"):
        safe_layer_state(state, KEY)
    assert not (tmp_path / "ran").exists()


def test_a_state_does_not_change_a_class() -> None:
    # BUILD with a pair sets attributes of whatever lies on the stack.
    class_itself = b"\x8c\x20" + RECIPES.encode() + b"\x8c\x0eDelayedScaling\x93"
    change = b"\x80\x04" + class_itself + b"N}\x8c\x06marginK\x07s\x86b."
    with pytest.raises(CheckpointError, match=KEY):
        safe_layer_state(torch.frombuffer(bytearray(change), dtype=torch.uint8), KEY)
    assert DelayedScaling.margin == 0


@pytest.mark.parametrize(
    "damaged",
    [
        b"\x80\x04",
        b"not a pickle",
        bytes(LAYER_BYTES + 1),
        pickle.dumps(_state() | {"scale_fwd": Runs(torch.storage._load_from_bytes, b"")}),
    ],
    ids=["cut", "text", "too long", "an empty storage"],
)
def test_a_damaged_state_is_an_error_with_its_key(damaged: bytes) -> None:
    with pytest.raises(CheckpointError, match=KEY):
        safe_layer_state(torch.frombuffer(bytearray(damaged), dtype=torch.uint8), KEY)


def test_a_storage_with_fewer_bytes_than_it_says_is_refused() -> None:
    content = pickle.dumps(_state()["scale_fwd"])
    assert content.count(b"\x03\x00\x00\x00\x00\x00\x00\x00") == 1
    cut = content.replace(b"\x00\x00\x40\x40", b"", 1)  # the last of three numbers
    with pytest.raises(CheckpointError, match=KEY):
        layer_state_value(torch.frombuffer(bytearray(cut), dtype=torch.uint8), KEY)


class _Layer(torch.nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = torch.empty(0, dtype=torch.uint8) if state is None else _bytes(state)

    def get_extra_state(self) -> torch.Tensor:
        return self.state


def test_extra_states_of_a_model_are_told_by_layer_without_the_empty_ones() -> None:
    model = torch.nn.Sequential(_Layer(_state()), _Layer(None), torch.nn.Linear(1, 1))
    found = extra_states(model)
    assert [*found] == ["0._extra_state"]
    _assert_equal(found["0._extra_state"], _state())


@pytest.fixture(scope="module")
def control() -> Iterator[ControlPlane]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=0, world_size=1)
    yield ControlPlane(store, world="training world", rank=0, members=trainer_ids([0]), secret=new_secret())
    dist.destroy_process_group()


def _described(data: Any, *keys: str) -> dict[str, Any]:
    return {"model": {key: ShardedObject(key, data, (1,), (0,), replica_id=0) for key in keys}}


def _saved(control: ControlPlane, state: Any, directory: Path) -> Any:
    """Saves a state as a layer's and returns what a load gives the layer."""
    saver = Saver(control, replicas=Replicas())
    saver.begin(
        _described(state, KEY),
        directory,
        content_metadata={},
        prepare=directory.mkdir,
        commit=lambda files, notes: len(files),
        timeout=TIMEOUT,
        background=False,
    )
    saver.finish(TIMEOUT)
    return Loader(control).load(lambda: _described(None, KEY), directory, timeout=TIMEOUT)["model"][KEY]


def test_a_checkpoint_gives_layers_states_that_run_nothing(control: ControlPlane, tmp_path: Path) -> None:
    loaded = _saved(control, _bytes(_state()), tmp_path / SHARDS)
    _assert_equal(pickle.loads(loaded.numpy().tobytes()), _state())
    with pytest.raises(UnsafeCheckpointError, match=r"posix\.system"):
        _saved(control, _bytes(_hostile("the whole", tmp_path / "ran")), tmp_path / "hostile")
    assert not (tmp_path / "ran").exists()


def test_layers_of_another_kind_load_what_the_others_saved(control: ControlPlane, tmp_path: Path) -> None:
    # Local layers have no extra states, so a checkpoint may have fewer or more of them than the layers ask for.
    _saved(control, _bytes(_state()), tmp_path / SHARDS)
    another = KEY.replace("layers.0", "layers.1")
    loaded = Loader(control).load(lambda: _described(None, another), tmp_path / SHARDS, timeout=TIMEOUT)
    assert loaded["model"] == {another: None}


@pytest.mark.parametrize("state", [None, {"scale_fwd": torch.ones(2)}], ids=["none", "scales"])
def test_a_state_from_before_version_2_comes_back(state: Any, control: ControlPlane, tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(state, stream)
    loaded = _saved(control, stream, tmp_path / SHARDS)
    if state is None:
        assert loaded is None
    else:
        _assert_equal(pickle.loads(loaded.numpy().tobytes()), state)
