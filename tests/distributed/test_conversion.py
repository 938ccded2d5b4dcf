"""HF weights to Megatron's shards under one layout, from there into another, and back: every bit as it was."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch.distributed import PrefixStore
from torch.utils._python_dispatch import TorchDispatchMode

from rl_safe_workers.adapters.nemo_rl.import_groups import end_groups_since
from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS, model_fingerprint, read_manifest
from rl_safe_workers.checkpoint.save import hf_writer
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError, LifecycleError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.models.seeded import Family, create_seeded_model
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store
from tests.distributed import reference
from tests.distributed.families import LIBRARIES, make, maps
from tests.distributed.ranks import run_ranks, values
from tests.distributed.recording import is_connected
from tests.distributed.worker import Worker, run_config, served_store

ALL_TRIPS_S = 600.0
"""Most seconds of all round trips, on a busy machine; on two idle cores they take 150."""
pytestmark = pytest.mark.timeout(ALL_TRIPS_S + 60)

SIZE = 4
DTYPES = ("float32", "bfloat16")
MODELS = {
    "qwen3": {"num_experts": 0},
    "qwen3_moe": {},
    "llama": {"num_experts": 0, "family": Family.LLAMA},
    "llama_tied": {"num_experts": 0, "family": Family.LLAMA, "is_tied": True},
    "mixtral": {"family": Family.LLAMA},
}
FAMILIES = ("qwen2", "qwen2_tied", "qwen2_moe", "llama3", "glm4_moe", "deepseek_v3", "olmoe", "gpt_oss")
"""Kinds of `families`. They have what those above lack: biases, shared experts and their gate, dense layers before the
experts, latent attention, MTP layers."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes over four trainers."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1


TRIPS = {
    "qwen3": (Layout(tp=2, pp=2), Layout()),
    "qwen3_moe": (Layout(tp=2, ep=2), Layout(pp=2, ep=2)),
    "llama": (Layout(pp=2), Layout(tp=2)),
    "llama_tied": (Layout(pp=2, tp=2), Layout(tp=2)),
    "mixtral": (Layout(ep=2, etp=2), Layout(tp=2, ep=4)),
    "mixtral_etp_alone": (Layout(tp=2, etp=1), Layout(etp=2, pp=2)),
    "qwen3_moe_etp_above_tp": (Layout(etp=4), Layout(tp=2, etp=2, ep=2)),
    "qwen2": (Layout(tp=2, pp=2), Layout()),
    "qwen2_tied": (Layout(pp=2), Layout(tp=2)),
    "qwen2_moe": (Layout(ep=2), Layout(tp=2, ep=2)),
    "llama3": (Layout(tp=2), Layout(pp=2)),
    "glm4_moe": (Layout(tp=2, ep=2), Layout(pp=2, ep=2)),
    "glm4_moe_etp2": (Layout(etp=2, ep=2), Layout(ep=2)),
    "deepseek_v3": (Layout(pp=2), Layout(tp=2, ep=2)),
    "deepseek_v3_from_tp2": (Layout(tp=2, ep=2), Layout(ep=2)),
    "olmoe": (Layout(ep=2), Layout(pp=2, ep=2)),
    "gpt_oss": (Layout(tp=2, ep=2), Layout(pp=2, ep=2)),
}
"""From the first layout to the second."""
CASES = [(library, trip) for library in LIBRARIES for trip in TRIPS if maps(library, trip)]


def model_of(trip: str) -> str:
    return max((name for name in (*MODELS, *FAMILIES) if trip.startswith(name)), key=len)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model in both dtypes; norms and all else are random, so that no two weights are equal by chance."""
    root = tmp_path_factory.mktemp("hf")
    for name, kind in MODELS.items():
        options = dict(kind)
        spec = SeededModelConfig(num_experts=options.pop("num_experts", 8))
        for dtype in DTYPES:
            path = root / f"{name}-{dtype}"
            create_seeded_model(path, spec, dtype=dtype, **options)
            file, generator = path / "model.safetensors", torch.Generator().manual_seed(1)
            weights = {
                key: torch.randn(value.shape, generator=generator).to(value.dtype)
                for key, value in sorted(load_file(file).items())
            }
            save_file(weights, file, metadata={"format": "pt"})
    for name in FAMILIES:
        for dtype in DTYPES:
            make(root / f"{name}-{dtype}", name, dtype=dtype)
    return root


def worker(rank: int, model: Path, dtype: str, layout: Layout, size: int = SIZE) -> Worker:
    config = run_config(model, tp=layout.tp, pp=layout.pp, ep=layout.ep)
    config.megatron.expert_tensor_parallel_size = layout.etp
    config.model.dtype = dtype
    return Worker(config, rank=rank, size=size)


def rebuilt(made: Worker, layout: Layout, model: Path, dtype: str) -> Worker:
    """Another model in the same world; under another layout only once the groups have been rebuilt."""
    safe = made.safe
    other = worker(safe.training_rank, model, dtype, layout)
    other.safe.store, other.safe.world, other.safe._control = safe.store, safe.world, safe.control
    other.safe.lifecycle.__dict__.update(safe.lifecycle.__dict__)
    return other


def regroup(made: Worker) -> None:
    """Takes the groups of another layout; the threads of gloo groups that nobody destroys take up all cores."""
    parallel_state.destroy_model_parallel()
    end_groups_since([dist.group.WORLD], timeout=timedelta(seconds=60))
    made.init_groups(seed=0)
    made.bootstrap()


def scramble(made: Worker) -> None:
    with torch.no_grad():
        for chunk in made.chunks:
            for tensor in (*chunk.parameters(), *chunk.buffers()):
                tensor.fill_(7.0)


def _started(rank: int, address: StoreAddress, model: Path, layout: Layout, size: int = SIZE) -> Worker:
    made = worker(rank, model, "float32", layout, size)
    made.start(address)
    made.build_model()
    return made


def _round_trips(rank: int, address: StoreAddress, models: Path, root: Path) -> None:
    made = worker(rank, models / "llama-float32", "float32", Layout())
    made.start(address)
    for library, trip in CASES:
        for layout, move in zip(TRIPS[trip], (_there, _back), strict=True):
            for dtype in DTYPES:
                model = models / f"{model_of(trip)}-{dtype}"
                made = rebuilt(made, layout, model, dtype)
                made.config.model.bridge = library
                if dtype == DTYPES[0]:
                    regroup(made)
                made.build_model()
                scramble(made)
                move(made, model, root / f"{library}-{trip}-{dtype}")


def _there(made: Worker, model: Path, out: Path) -> None:
    made.convert_checkpoint(model, out)


def _back(made: Worker, model: Path, out: Path) -> None:
    made.load_model_weights(out)
    made.export_hf(out.with_name(f"{out.name}-hf"), source=model)


@pytest.fixture(scope="module")
def converted(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("converted")
    with served_store() as address:
        values(run_ranks(_round_trips, SIZE, address, models, root, timeout_s=ALL_TRIPS_S))
    return root


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("library", "trip"), CASES)
def test_a_round_trip_brings_every_bit_back(library: str, trip: str, dtype: str, models: Path, converted: Path) -> None:
    expected = load_file(models / f"{model_of(trip)}-{dtype}" / "model.safetensors")
    got = load_file(converted / f"{library}-{trip}-{dtype}-hf" / "model.safetensors")
    assert got.keys() == expected.keys()
    assert {name: weight.dtype for name, weight in got.items()} == {name: w.dtype for name, w in expected.items()}
    assert [name for name, weight in got.items() if not torch.equal(weight, expected[name])] == []


@pytest.mark.parametrize("trip", ["qwen3", "mixtral"])
def test_the_manifest_says_what_was_converted_and_how(trip: str, models: Path, converted: Path) -> None:
    manifest = read_manifest(converted / f"mbridge-{trip}-bfloat16")
    layout = TRIPS[trip][0]
    assert manifest.model_fingerprint == model_fingerprint(models / f"{trip}-bfloat16")
    assert manifest.driver_state == {"conversion": {"dtype": "bfloat16"}}
    assert (manifest.layout["world_size"], manifest.layout["expert_tensor"]) == (SIZE, layout.etp)


def test_nothing_is_left_beside_the_conversions(converted: Path) -> None:
    cases = [f"{library}-{trip}-{dtype}" for library, trip in CASES for dtype in DTYPES]
    names = {f"{case}{suffix}" for case in cases for suffix in ("", "-hf")}
    assert {path.name for path in converted.iterdir()} == names


def _logits(rank: int, address: StoreAddress, model: Path, tokens: np.ndarray) -> np.ndarray:
    made = _started(rank, address, model, Layout(), size=1)
    made.load_hf_weights(str(model))
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        logits = made.chunks[0].eval()(torch.from_numpy(tokens), positions, attention_mask=None)
    return logits.numpy()


@pytest.mark.parametrize("experts", [0, 8], ids=["llama", "mixtral"])
def test_a_converted_model_computes_what_transformers_computes(experts: int, tmp_path: Path) -> None:
    create_seeded_model(tmp_path / "m", SeededModelConfig(num_experts=experts), family=Family.LLAMA)
    tokens = reference.random_batch(rows=1).tokens
    with torch.no_grad():
        expected = reference.load(tmp_path / "m")(input_ids=torch.from_numpy(tokens)).logits.numpy()
    with served_store() as address:
        (logits,) = values(run_ranks(_logits, 1, address, tmp_path / "m", tokens))
    assert np.abs(logits - expected).max() <= 5e-6


EP2 = Layout(ep=2)


def _files(path: Path) -> dict[str, int]:
    """Every file with the time it was last written."""
    return {str(p.relative_to(path)): p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}


def _truncate(path: Path) -> None:
    file = max((path / SHARDS).glob("*.distcp"), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[:-100])


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except (CheckpointError, CheckpointMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _places(rank: int, address: StoreAddress, models: Path, root: Path) -> dict[str, Any]:
    """Conversions to a place that holds something already, one after the other in one world."""
    model, other = models / "qwen3_moe-float32", models / "mixtral-float32"
    made = _started(rank, address, model, EP2)
    out, seen = made.convert_checkpoint(model, root / "out"), {}

    def on_rank_0(work: Callable[[], object]) -> None:
        made.safe.control.barrier(Phase.CONVERT, Deadline.after(30))
        if rank == 0:
            work()
        made.safe.control.barrier(Phase.CONVERT, Deadline.after(30))

    first = _files(out)
    made.convert_checkpoint(model, out)
    seen["reused"] = _files(out) == first
    on_rank_0(lambda: _truncate(out))
    made.convert_checkpoint(model, out)
    seen["truncated, redone"] = read_manifest(out).model_fingerprint
    on_rank_0(lambda: (out / MANIFEST).rename(root / MANIFEST))
    seen["foreign shards"] = _message(lambda: made.convert_checkpoint(model, out))
    on_rank_0(lambda: (root / MANIFEST).rename(out / MANIFEST))
    on_rank_0(lambda: (root / "new.incomplete").mkdir())
    on_rank_0(lambda: (root / "new.incomplete" / "notes.txt").write_text("mine"))
    seen["foreign pending"] = _message(lambda: made.convert_checkpoint(model, root / "new"))
    on_rank_0(lambda: (root / "locked.lock").write_text("mine"))
    seen["lock"] = _message(lambda: made.convert_checkpoint(model, root / "locked"))
    seen["notes"] = (root / "new.incomplete" / "notes.txt").read_text() + (root / "locked.lock").read_text()
    before = _files(out)
    seen["foreign model"] = _message(lambda: made.convert_checkpoint(other, out))
    seen["foreign files"] = _message(lambda: made.convert_checkpoint(model, models))
    seen["unwritable"] = _message(lambda: made.convert_checkpoint(model, out / MANIFEST / "x"))
    seen["kept"] = _files(out) == before
    on_rank_0(lambda: (out / "notes.txt").write_text("mine"))
    made.convert_checkpoint(model, out, overwrite=True)
    seen["overwritten"] = (out / "notes.txt").exists()
    on_rank_0(lambda: _hold_lock(root / "held.lock"))
    made.safe.rl_safe.timeouts.convert = 3.0
    seen["held"] = _message(lambda: made.convert_checkpoint(model, root / "held"))
    assert made.teardown() == {}
    return seen


def _hold_lock(path: Path) -> None:
    """From a process that ends with this one."""
    code = f"""if True:
        import sys, time
        from datetime import timedelta
        from pathlib import Path
        from rl_safe_workers.checkpoint.folders.lock import exclusive
        with exclusive(Path({str(path)!r}), timeout=timedelta(seconds=5), setting="s"):
            print(1, flush=True)
            time.sleep(20)
    """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()


@pytest.fixture(scope="module")
def places(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with served_store() as address:
        return values(run_ranks(_places, SIZE, address, models, tmp_path_factory.mktemp("places")))


def test_a_complete_conversion_is_used_again(places: list[dict[str, Any]]) -> None:
    assert [rank["reused"] for rank in places] == [True] * SIZE


def test_a_torn_conversion_is_made_again(places: list[dict[str, Any]], models: Path) -> None:
    assert {rank["truncated, redone"] for rank in places} == {model_fingerprint(models / "qwen3_moe-float32")}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("foreign model", "out is a conversion of another model (fingerprint "),
        ("foreign files", "hf0 has no manifest.json of ours"),
        ("foreign shards", "out has no manifest.json of ours: choose another place, or overwrite it"),
        ("foreign pending", "new.incomplete is no work in progress of ours: it is left alone"),
        ("lock", "locked.lock cannot be locked: it is no lock of ours, so it is left alone"),
        ("unwritable", "cannot make "),
        ("held", "rl_safe.timeouts.convert"),
    ],
)
def test_every_rank_is_told_why_a_place_is_refused(case: str, reason: str, places: list[dict[str, Any]]) -> None:
    kind = "CheckpointMismatchError" if case.startswith("foreign") else "CheckpointError"
    for rank in places:
        assert rank[case].startswith(f"{kind}: ")
        assert reason in rank[case]


def test_what_is_refused_stays_as_it_was_and_gives_way_when_overwritten(places: list[dict[str, Any]]) -> None:
    assert [(rank["kept"], rank["overwritten"], rank["notes"]) for rank in places] == [(True, False, "minemine")] * SIZE


def _exports(rank: int, address: StoreAddress, model: Path, root: Path) -> dict[str, Any]:
    """Exports of a model in training, on four ranks."""
    made = worker(rank, model, "bfloat16", Layout(tp=2, ep=2))
    made.start(address)
    made.convert()
    batch, seen = reference.random_batch(rows=8), {}
    made.step(batch)
    digest = made.digest()
    peaks = []
    for _ in range(4):
        with allocations() as peak:
            made.export_hf(root / "hf", source=model, overwrite=True)
        # gloo's thread lets go of a tensor when it comes to it: at times after the next has been made.
        peaks.append(peak[0])
    weights = {name: tensor.clone() for name, tensor in made.export_hf_weights()}
    seen["peak"], seen["largest"] = min(peaks), max(map(_whole_bytes, made.chunks[0].parameters()))
    seen["unchanged"], seen["weights"] = made.digest() == digest, _as_bytes(weights) if rank == 0 else {}
    made.step(batch)
    seen["taken"] = _message(lambda: made.export_hf(root / "hf", source=model))
    hf_writer._write_all = _full_disk
    seen["full disk"] = _message(lambda: made.export_hf(root / "full", source=model))
    made.offload()
    try:
        made.export_hf(root / "offloaded", source=model)
    except LifecycleError as error:
        seen["offloaded"] = str(error)
    made.onload()
    moved = made.digest()
    made.load_model_weights(made.convert_checkpoint(model, root / "again"))
    made.step(batch)
    seen["reloaded"] = made.digest() != moved
    assert made.teardown() == {}
    return seen


def _whole_bytes(parameter: Any) -> int:
    """Bytes of a parameter of all tensor-parallel ranks together; Megatron fuses some of HF's."""
    return int(parameter.nbytes) * (2 if parameter.tensor_model_parallel else 1)


def _as_bytes(weights: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in weights.items()}


def _full_disk(file: object, tensor: torch.Tensor) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that operators return, while a tensor over them is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.before = {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) in TENSORS}
        self.alive: dict[int, tuple[int, int]] = {}
        self.peak = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.nbytes:
                self._count(tensor)
        self.peak[0] = max(self.peak[0], sum(size for size, _ in self.alive.values()))
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in self.before:
            return
        _, users = self.alive.get(pointer, (0, 0))
        self.alive[pointer] = (tensor.untyped_storage().nbytes(), users + 1)
        weakref.finalize(tensor, self._release, pointer)

    def _release(self, pointer: int) -> None:
        size, users = self.alive.pop(pointer)
        if users > 1:
            self.alive[pointer] = (size, users - 1)


TENSORS = (torch.Tensor, torch.nn.Parameter)


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Yields a list whose one entry becomes the largest sum of bytes alive that the body has added."""
    with _Allocations() as mode:
        yield mode.peak


@pytest.fixture(scope="module")
def exports(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("exports")
    with served_store() as address:
        return root, values(run_ranks(_exports, SIZE, address, models / "qwen3_moe-bfloat16", root))


def test_an_export_needs_twice_the_largest_weight_at_most(exports: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in exports[1]:
        assert rank["largest"] < rank["peak"] <= 2 * rank["largest"]


def test_a_model_in_training_is_exported_as_it_is_and_stays_so(exports: tuple[Path, list[dict[str, Any]]]) -> None:
    root, ranks = exports
    assert [rank["unchanged"] for rank in ranks] == [True] * SIZE
    assert _as_bytes(load_file(root / "hf" / "model.safetensors")) == ranks[0]["weights"]


def test_a_full_disk_on_rank_0_reaches_every_rank_and_leaves_nothing(
    exports: tuple[Path, list[dict[str, Any]]],
) -> None:
    root, ranks = exports
    assert all("No space left on device" in rank["full disk"] for rank in ranks)
    assert sorted(path.name for path in root.iterdir()) == ["again", "hf"]


def test_a_place_that_is_taken_is_refused_on_every_rank(exports: tuple[Path, list[dict[str, Any]]]) -> None:
    assert all(rank["taken"].startswith("CheckpointMismatchError: ") for rank in exports[1])


def test_an_offloaded_model_is_not_exported(exports: tuple[Path, list[dict[str, Any]]]) -> None:
    assert all("its state is in host memory; call onload() first" in rank["offloaded"] for rank in exports[1])


def test_training_goes_on_after_weights_were_loaded(exports: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [rank["reloaded"] for rank in exports[1]] == [True] * SIZE


def _carved(joint_rank: int, address: StoreAddress, model: Path, root: Path, sleeper: int) -> dict[str, Any]:
    """Two trainers in a host's default group of three, whose other rank sleeps throughout."""
    store = connect_store(address, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=PrefixStore("host", store), rank=joint_rank, world_size=3, timeout=timedelta(seconds=60)
    )
    trainers = [rank for rank in range(3) if rank != sleeper]
    if joint_rank == sleeper:
        store.wait([f"done/{rank}" for rank in trainers])
        return {"entered a collective": is_connected(dist.group.WORLD)}
    host_group = dist.group.WORLD
    made = Worker(run_config(model, ep=2), rank=trainers.index(joint_rank), size=2)
    made.carve_world(address, training_joint_ranks=trainers)
    made.init_groups(seed=0)
    made.bootstrap()
    made.build_model()
    made.convert_checkpoint(model, root / "out")
    scramble(made)
    made.load_model_weights(root / "out")
    made.export_hf(root / "hf", source=model)
    made.teardown()
    store.set(f"done/{joint_rank}", "")
    return {"entered a collective": is_connected(host_group)}


@pytest.mark.parametrize("sleeper", [0, 2], ids=["joint_rank_0_sleeps", "the_last_rank_sleeps"])
def test_a_rollout_rank_sleeps_through_conversion_and_export(sleeper: int, models: Path, tmp_path: Path) -> None:
    model = models / "qwen3_moe-float32"
    with served_store() as address:
        ranks = values(run_ranks(_carved, 3, address, model, tmp_path, sleeper))
    assert [rank["entered a collective"] for rank in ranks] == [False] * 3
    assert _as_bytes(load_file(tmp_path / "hf" / "model.safetensors")) == _as_bytes(
        load_file(model / "model.safetensors")
    )


def _two_runs(rank: int, address: StoreAddress, model: Path, root: Path, run: int) -> bool:
    made = Worker(run_config(model, ep=2), rank=rank, size=2)
    made.start(address)
    made.build_model()
    worked = []
    load = made.load_hf_weights
    made.load_hf_weights = lambda path: (worked.append(path), load(path))[1]  # type: ignore[method-assign]
    made.convert_checkpoint(model, root / "out")
    return bool(worked)


def test_of_two_runs_at_one_place_one_works_and_both_have_the_result(models: Path, tmp_path: Path) -> None:
    model = models / "qwen3_moe-float32"
    with served_store() as first, served_store() as second, ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_ranks, _two_runs, 2, a, model, tmp_path, i) for i, a in enumerate((first, second))]
        worked = [values(run.result()) for run in runs]
    assert sorted(worked) == [[False, False], [True, True]]
    assert read_manifest(tmp_path / "out").model_fingerprint == model_fingerprint(model)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
