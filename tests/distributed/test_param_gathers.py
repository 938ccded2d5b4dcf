"""With ``overlap_param_gather`` a rank has old values of other shards after a step: nothing of ours reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rl_safe_workers.checkpoint.folders.manifest import SHARDS, step_dir
from rl_safe_workers.compat.param_gathers import complete_param_gathers
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models import build
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store

SIZE = 2
Weights = dict[str, torch.Tensor]


def nothing(worker: Worker, folder: Path) -> None:
    """Leaves the gathers to the next forward pass."""


def gather(worker: Worker, folder: Path) -> None:
    """Completes the gathers. A second call finds none."""
    complete_param_gathers(worker.chunks)
    assert complete_param_gathers(worker.chunks) == 0


def save(worker: Worker, folder: Path) -> None:
    worker.save_checkpoint(folder / "saves", step=1, fingerprint="a", layout={}, driver_state={})


def export(worker: Worker, folder: Path) -> None:
    worker.export_hf(folder / "exported", source=folder / "model")


def save_and_export(worker: Worker, folder: Path) -> None:
    save(worker, folder)
    export(worker, folder)


READERS = {function.__name__: function for function in (nothing, gather, save, export, save_and_export)}


def train(rank: int, folder: Path, address: StoreAddress, reader: str, overlaps: bool) -> Weights:
    """Returns this rank's parameters after a step and what ``reader`` does, and after another step."""
    if overlaps:
        build.DistributedDataParallelConfig = partial(
            DistributedDataParallelConfig, overlap_param_gather=True, overlap_grad_reduce=True
        )
        build.OptimizerConfig = partial(OptimizerConfig, overlap_param_gather=True)
    worker = Worker(run_config(folder / "model"), rank=rank, size=SIZE)
    worker.start(address)
    worker.convert()
    batch = reference.random_batch(rows=4, length=24)
    found: Weights = {}
    for step in (1, 2):
        worker.step(batch)
        READERS[reader if step == 1 else "gather"](worker, folder)
        found |= {f"{step} {name}": value.detach().clone() for name, value in worker.chunks[0].named_parameters()}
    worker.teardown()
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, list[Weights]]]:
    """Runs two ranks; returns their folder and their parameters."""

    def run(reader: str, *, overlaps: bool = True) -> tuple[Path, list[Weights]]:
        folder = tmp_path_factory.mktemp("gathers")
        create_seeded_model(folder / "model", SeededModelConfig(num_experts=0))
        with served_store() as address:
            return folder, values(run_ranks(train, SIZE, folder, address, reader, overlaps))

    return run


@pytest.fixture(scope="module")
def plain(run: Callable[..., tuple[Path, list[Weights]]]) -> tuple[Path, list[Weights]]:
    """Two ranks whose gathers are not put off, with a save and an export."""
    return run("save_and_export", overlaps=False)


def test_parameters_are_a_mixture_until_they_are_gathered(run: Callable[..., tuple[Path, list[Weights]]]) -> None:
    _, (one, other) = run("nothing")
    assert _differing(one, other) > 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("reader", ["gather", "save", "export"])
def test_what_reads_parameters_completes_their_gathers(
    reader: str, run: Callable[..., tuple[Path, list[Weights]]], plain: tuple[Path, list[Weights]]
) -> None:
    folder, (one, other) = run(reader)
    assert _differing(one, other) == 0
    # The second step is the one that a run without overlap makes.
    assert _differing(one, plain[1][0], step=2) == 0
    if reader == "export":
        assert _differing(*(load_file(each / "exported" / "model.safetensors") for each in (folder, plain[0]))) == 0
    if reader == "save":
        assert _differing(*(_saved(each / "saves") for each in (folder, plain[0]))) == 0


def _differing(one: Weights, other: Weights, *, step: int = 1) -> int:
    """Counts the tensors that differ; of parameters, those after a step."""
    names = [name for name in one if not name[0].isdigit() or name.startswith(f"{step} ")]
    assert names
    return sum(not torch.equal(one[name], other[name]) for name in names)


def _saved(root: Path) -> Weights:
    """Returns all tensors of the model in a checkpoint."""
    reader = FileSystemReader(step_dir(root, 1) / SHARDS)
    tensors = {
        key: torch.empty(stored.size, dtype=stored.properties.dtype)
        for key, stored in reader.read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and not key.startswith("optimizer")
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors
