"""Checkpoints of one layout under others: every element of every tensor, and Megatron's own code as the judge.

What a run holds is described by Megatron's ``fully_reshardable`` code, which gathers it; what ours wrote and read is
compared with that, element by element.
"""

from __future__ import annotations

import io
import queue
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from rl_safe_workers.checkpoint.loader import Loader
from rl_safe_workers.checkpoint.optimizer_state import allocate_state, set_adam_steps
from rl_safe_workers.checkpoint.pieces import split
from rl_safe_workers.checkpoint.rng import rng_state, set_rng_state
from rl_safe_workers.checkpoint.save_plan import Replicas
from rl_safe_workers.checkpoint.saver import Saver
from rl_safe_workers.checkpoint.state import CONTENT_METADATA, restore_state, sharded_state
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.platforms import cpu
from rl_safe_workers.ranks import trainer_ids
from rl_safe_workers.trainer.policy import MegatronPolicy
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.recording import recorded_collectives
from tests.distributed.worker import run_config

HOMOGENEOUS = {**CONTENT_METADATA, "non_homogeneous_layers": False}
DP_RESHARDABLE = {**CONTENT_METADATA, "distrib_optim_sharding_type": "dp_reshardable"}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; the rest of the world is data-parallel."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1


SAVED = Layout(ep=2)
OTHERS = {
    "tp2_ep2": Layout(tp=2, ep=2),
    "tp2_ep2_etp2": Layout(tp=2, ep=2, etp=2),
    "pp2_ep2": Layout(pp=2, ep=2),
    "pp2_vpp2": Layout(pp=2, vpp=2),
    "ep4": Layout(ep=4),
    "ep1": Layout(),
    "tp2_ep1": Layout(tp=2),
}


@dataclass(frozen=True)
class Held:
    """What one rank would write of each global tensor, and the steps that its Adam counted."""

    shards: list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]
    """Key, global shape, offset, data: main replicas. bf16 as fp32, which is exact."""
    steps: set[float]


TIMEOUT = timedelta(seconds=60)


def _control() -> ControlPlane:
    """A place in the world, made anew for each save and load."""
    store = dist.PrefixStore("shards", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    return ControlPlane(store, world="training world", rank=rank, members=trainer_ids(range(size)), secret=bytes(32))


class Rank(MegatronPolicy):
    """One training rank under a layout, with the metadata that Megatron's own code is given."""

    def __init__(self, model: Path, layout: Layout, dtype: str = "float32") -> None:
        self.config = run_config(model, tp=layout.tp, pp=layout.pp, ep=layout.ep)
        self.config.model.dtype = dtype
        self.device = torch.device("cpu")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        self.build()

    def step(self, seed: int) -> dict[str, float]:
        """One step on a batch of all data-parallel ranks; the loss is that of all of them."""
        batch = reference.random_batch(rows=8, seed=seed)
        size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        shard = batch.select(slice(rank * 8 // size, (rank + 1) * 8 // size))
        (metrics,) = self.update_policy(shard.with_logprobs(old=shard.rollout_logprobs), mini_batch_size=len(shard))
        loss = torch.tensor(metrics["loss"])
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return {"loss": float(loss), "grad_norm": metrics["grad_norm"]}

    def step_on_anything(self) -> None:
        """One step on gradients that are the same on all ranks that share a parameter."""
        for parameter in (p for chunk in self.chunks for p in chunk.parameters()):
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        self.optimizer.step()

    def ours(self, *, is_loading: bool, **options: Any) -> dict[str, Any]:
        return sharded_state(
            self.chunks, self.optimizer, training_rank=dist.get_rank(), size=dist.get_world_size(),
            is_loading=is_loading, **options,
        )  # fmt: skip

    def stock(self, *, is_loading: bool) -> dict[str, Any]:
        """Megatron's own sharded state dict. Collective: it gathers the optimizer's state."""
        metadata = {
            **CONTENT_METADATA,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = {f"model{i}": c.module.sharded_state_dict(metadata=metadata) for i, c in enumerate(self.chunks)}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {**model, "optimizer": optimizer}

    def save(self, directory: Path, state: dict[str, Any], content_metadata: dict[str, Any] = CONTENT_METADATA) -> None:
        replicas = Replicas(
            dense=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            expert=parallel_state.get_expert_data_parallel_world_size(),
        )
        saver = Saver(_control(), replicas=replicas)
        saver.begin(
            state, directory, content_metadata=content_metadata, prepare=lambda: directory.mkdir(parents=True),
            commit=lambda files, notes: None, timeout=TIMEOUT, background=False,
        )  # fmt: skip
        saver.finish(TIMEOUT)

    def save_with_stock(self, directory: Path, state: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            directory.mkdir(parents=True)
        dist.barrier()
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        dist_checkpointing.save(state, str(directory), sharded_strategy=strategy, content_metadata=CONTENT_METADATA)

    def load(self, directory: Path, **options: Any) -> None:
        loader = Loader(_control())
        loader.load(
            lambda: self.ours(is_loading=True, **options),
            directory,
            timeout=TIMEOUT,
            restore=lambda loaded: restore_state(self.chunks, self.optimizer, loaded),
        )

    def load_with_stock(self, directory: Path) -> Held:
        """What Megatron's own code reads."""
        allocate_state(self.optimizer)
        loaded = dist_checkpointing.load(self.stock(is_loading=True), str(directory))
        for index, chunk in enumerate(self.chunks):
            chunk.load_state_dict(loaded[f"model{index}"])
        for index, part in enumerate(self.optimizer.chained_optimizers):
            # The load of the whole looks among the tensors for the step of torch's Adam (distrib_optimizer.py:944).
            for state in part.optimizer.state.values():
                del state["step"]
            part.load_parameter_state_from_fully_reshardable(loaded["optimizer"][index]["param_state"])
            set_adam_steps(part, loaded["optimizer"][index]["optimizer"]["param_groups"][0]["step"])
        return self.held()

    def held(self) -> Held:
        """As Megatron describes it."""
        return self._held(self.stock(is_loading=False))

    def described(self) -> Held:
        """As ours does."""
        return self._held(self.ours(is_loading=False, rng=False))

    def _held(self, state: dict[str, Any]) -> Held:
        tensors = split(state).tensors
        shards = [(s.key, s.global_shape, s.global_offset, _array(s)) for s in tensors if is_main_replica(s.replica_id)]
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return Held(shards, {float(state["step"]) for part in parts for state in part.optimizer.state.values()})


def _array(shard: ShardedTensor) -> np.ndarray:
    data = shard.data.detach().float().numpy().copy()
    return data.reshape((1,) * shard.prepend_axis_num + data.shape)


@contextmanager
def layout(model: Path, sizes: Layout, dtype: str = "float32") -> Iterator[Rank]:
    """A rank under a layout, whose groups are gone afterwards."""
    yield Rank(model, sizes, dtype)
    for group in parallel_state._global_process_group_list[1:]:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _join(rank: int, size: int, root: Path) -> None:
    cpu.apply()
    # Spares a helper process that would import the main program again.
    filesystem_async._results_queue = queue.Queue()
    dist.init_process_group(
        "gloo", init_method=f"file://{root / 'store'}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )


def _follows_a_moved_tensor(trainer: Rank) -> bool:
    """Whether a later description sees what took a tensor's place."""
    part = trainer.optimizer.chained_optimizers[0]
    main = part.optimizer.param_groups[0]["params"][0]
    before = part.optimizer.state[main]["exp_avg"]
    part.optimizer.state[main]["exp_avg"] = moved = before.clone()
    storages = {s.data.untyped_storage().data_ptr() for s in split(trainer.ours(is_loading=False)["optimizer"]).tensors}
    part.optimizer.state[main]["exp_avg"] = before
    return moved.untyped_storage().data_ptr() in storages


def _draw() -> tuple[float, float, float]:
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return random.random(), float(np.random.rand()), float(torch.rand(()))


def _draws_after_a_restore() -> list[tuple[float, float, float]]:
    """The first draws, and those after the state before them was restored from a file that may hold no code."""
    file = io.BytesIO()
    torch.save(rng_state(), file)
    file.seek(0)
    drawn = _draw()
    set_rng_state(torch.load(file, weights_only=True))
    return [drawn, _draw()]


def _save_and_reshard(rank: int, model: Path, root: Path) -> dict[str, Any]:
    _join(rank, 4, root)
    found: dict[str, Any] = {}
    with layout(model, SAVED) as trainer:
        trainer.step(0)
        trainer.step(1)
        found["saved"] = trainer.held()
        with recorded_collectives() as collectives:
            state = trainer.ours(is_loading=False)
        found["collectives"] = list(collectives)
        rows = [
            (s.local_shape[-1], s.global_shape[-1])
            for s in split(state["optimizer"]).tensors
            if len(s.global_shape) > 1
        ]
        found["cut rows"] = sum(length < whole for length, whole in rows)
        found["follows"] = _follows_a_moved_tensor(trainer)
        found["draws"] = _draws_after_a_restore()
        trainer.save(root / "ours", state)
        trainer.save_with_stock(root / "stock", trainer.stock(is_loading=False))
        trainer.save(root / "homogeneous", trainer.ours(is_loading=False, metadata=HOMOGENEOUS), HOMOGENEOUS)
        trainer.save(root / "dp_reshardable", trainer.ours(is_loading=False, metadata=DP_RESHARDABLE), DP_RESHARDABLE)
        found["after"] = [trainer.step(2), trainer.step(3)]
    for name, sizes in OTHERS.items():
        with layout(model, sizes) as trainer:
            trainer.load(root / "ours", rng=False)
            found[name], found[f"{name} described"] = trainer.held(), trainer.described()
    with layout(model, OTHERS["pp2_ep2"]) as trainer:
        found["ours by stock"] = trainer.load_with_stock(root / "ours")
        trainer.load(root / "stock", rng=False)
        found["stock by ours"] = trainer.held()
        trainer.load(root / "homogeneous", rng=False, metadata=HOMOGENEOUS)
        found["homogeneous"] = trainer.held()
    with layout(model, SAVED) as trainer:
        trainer.load(root / "dp_reshardable", rng=False, metadata=DP_RESHARDABLE)
        found["dp_reshardable"] = trainer.held()
    return found


def _continue_on_two(rank: int, model: Path, root: Path) -> dict[str, Any]:
    _join(rank, 2, root)
    with layout(model, SAVED) as trainer:
        trainer.load(root / "ours", rng=False)
        return {"held": trainer.held(), "after": [trainer.step(2), trainer.step(3)]}


def _round_trips(rank: int, model: Path, root: Path) -> dict[str, Any]:
    _join(rank, 4, root)
    found: dict[str, Any] = {}
    for name, dtype, saved, others in (
        ("vpp", "float32", Layout(pp=2, vpp=2), {"vpp": Layout(pp=2, vpp=2), "pp1": Layout(ep=2)}),
        ("bf16", "bfloat16", Layout(tp=2, ep=2), {"tp2": Layout(tp=2, ep=2), "ep4": Layout(ep=4)}),
    ):
        with layout(model, saved, dtype) as trainer:
            trainer.step_on_anything()
            trainer.step_on_anything()
            found[name] = {"saved": trainer.held()}
            trainer.save(root / name, trainer.ours(is_loading=False))
        for other, sizes in others.items():
            with layout(model, sizes, dtype) as trainer:
                trainer.load(root / name, rng=sizes == saved)
                found[name][other] = trainer.held()
    return found


def _whole(ranks: list[Held]) -> dict[str, np.ndarray]:
    """Global tensors by key; fails unless every element is held exactly once."""
    tensors: dict[str, np.ndarray] = {}
    times: dict[str, np.ndarray] = {}
    for key, shape, offset, data in (shard for held in ranks for shard in held.shards):
        place = tuple(slice(a, a + n) for a, n in zip(offset, data.shape, strict=True))
        tensors.setdefault(key, np.zeros(shape, np.float32))[place] = data
        times.setdefault(key, np.zeros(shape, np.int8))[place] += 1
    assert all((count == 1).all() for count in times.values())
    return tensors


def _assert_equal(ranks: list[Held], expected: list[Held]) -> None:
    mine, theirs = _whole(ranks), _whole(expected)
    assert mine.keys() == theirs.keys()
    assert [key for key in mine if not np.array_equal(mine[key], theirs[key])] == []
    assert {step for held in ranks for step in held.steps} == {step for held in expected for step in held.steps} == {2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 48 and 20 elements, which no data-parallel boundary respects; an output layer that is the embedding."""
    path = tmp_path_factory.mktemp("resharding") / "model"
    spec = SeededModelConfig(num_hidden_layers=4, hidden_size=48, head_dim=12, moe_intermediate_size=20)
    create_seeded_model(path, spec, is_tied=True)
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(model: Path, root: Path) -> list[dict[str, Any]]:
    return values(run_ranks(_save_and_reshard, 4, model, root))


@pytest.fixture(scope="module")
def two_ranks(model: Path, root: Path, ranks: list[Any]) -> list[dict[str, Any]]:
    (root / "store").unlink()
    return values(run_ranks(_continue_on_two, 2, model, root))


@pytest.fixture(scope="module")
def round_trips(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(_round_trips, 4, model, tmp_path_factory.mktemp("round_trips")))


def _of(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    return [rank[name] for rank in ranks]


@pytest.mark.parametrize("name", OTHERS)
def test_another_layout_of_four_ranks_loads_every_element(ranks, name) -> None:
    _assert_equal(_of(ranks, name), _of(ranks, "saved"))


@pytest.mark.parametrize("name", OTHERS)
def test_every_layout_would_write_each_element_exactly_once(ranks, name) -> None:
    _assert_equal(_of(ranks, f"{name} described"), _of(ranks, "saved"))


def test_half_the_ranks_load_every_element(ranks, two_ranks) -> None:
    _assert_equal(_of(two_ranks, "held"), _of(ranks, "saved"))


def test_the_state_compared_has_moments_and_parameters_of_every_kind(ranks) -> None:
    tensors = _whole(_of(ranks, "saved"))
    for state in ("param", "exp_avg", "exp_avg_sq"):
        of_state = {k: v for k, v in tensors.items() if k.startswith(f"optimizer.state.{state}.")}
        assert len(of_state) * 4 == len(tensors)
        assert all(v.any() for v in of_state.values())
    assert tensors["optimizer.state.exp_avg.decoder.layers.3.mlp.experts.experts.linear_fc1.weight"].shape == (
        8,
        40,
        48,
    )


@pytest.mark.parametrize("name", ["ours by stock", "stock by ours"])
def test_megatron_and_ours_read_each_others_checkpoints(ranks, name) -> None:
    _assert_equal(_of(ranks, name), _of(ranks, "saved"))


@pytest.mark.parametrize("name", ["homogeneous", "dp_reshardable"])
def test_a_foreign_format_loads_with_the_metadata_it_was_saved_with(ranks, name) -> None:
    _assert_equal(_of(ranks, name), _of(ranks, "saved"))


def test_describing_the_state_is_not_collective(ranks) -> None:
    assert _of(ranks, "collectives") == [[]] * 4


def test_a_description_follows_a_tensor_that_moved(ranks) -> None:
    assert _of(ranks, "follows") == [True] * 4


def test_random_state_is_restored_from_a_file_that_may_hold_no_code(ranks) -> None:
    for before, after in _of(ranks, "draws"):
        assert before == after


def test_some_rank_owns_a_part_of_a_row(ranks) -> None:
    """Else the tests above would not have met one."""
    assert any(_of(ranks, "cut rows"))


def test_training_goes_on_as_if_uninterrupted_where_data_parallelism_alone_changed(ranks, two_ranks) -> None:
    for mine, theirs in zip(two_ranks[0]["after"], ranks[0]["after"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", ["vpp", "pp1"])
def test_virtual_pipeline_stages_save_and_load_like_the_rest(round_trips, name) -> None:
    found = _of(round_trips, "vpp")
    _assert_equal(_of(found, name), _of(found, "saved"))


@pytest.mark.parametrize("name", ["tp2", "ep4"])
def test_bf16_weights_and_their_fp32_originals_both_come_back(round_trips, name) -> None:
    found = _of(round_trips, "bf16")
    _assert_equal(_of(found, name), _of(found, "saved"))
    tensors = _whole(_of(found, name))
    key = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
    originals = torch.from_numpy(tensors[f"optimizer.state.param.{key}"])
    assert not torch.equal(originals, originals.bfloat16().float())
    assert torch.equal(originals.bfloat16().float(), torch.from_numpy(tensors[key]))
