"""Proofs of ms-swift's weight syncs, without ms-swift: by two ranks as threads, and by a driver over fake actors."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from rl_safe_workers.adapters import sync_prover
from rl_safe_workers.adapters.hosting import HostedTrainer
from rl_safe_workers.adapters.job_verdict import JobVerdict
from rl_safe_workers.adapters.swift import proved_syncs
from rl_safe_workers.adapters.swift.proved_syncs import ColocatedSyncs, EngineReader, check_proof
from rl_safe_workers.adapters.swift.ray_proofs import log_proofs, prove_transfers
from rl_safe_workers.adapters.swift.ray_waits import RayWaits
from rl_safe_workers.adapters.swift.swift_settings import VARIABLE, SwiftTimeouts, job_settings
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.seal import new_secret
from rl_safe_workers.errors import ConfigError, PhaseTimeoutError, ResourceError, RlSafeError, WeightSyncError
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.rollout.sync_proof import HeldWeights, SentWeights

PATIENCE = timedelta(seconds=20)
NAME, CUT = "first.weight", "model.o_proj.weight"
WRONG = rf"{NAME}: sent [0-9a-f]{{16}}, held [0-9a-f]{{16}}"


class Model(torch.nn.Module):
    """Loads as vLLM's models do, and as often as it says flips a bit then."""

    def __init__(self, flips: int = 0) -> None:
        super().__init__()
        self.first, self.second, self.flips = (
            torch.nn.Linear(4, 4, bias=False),
            torch.nn.Linear(4, 4, bias=False),
            flips,
        )

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).copy_(self.mine(name, tensor))
        if self.flips:
            self.flips -= 1
            self.get_parameter(self.flipped).view(torch.int32)[0, 0] ^= 1

    flipped = NAME

    def mine(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class CutModel(Model):
    """The same of a rank of an engine with two ranks."""

    flipped = CUT

    def __init__(self, flips: int = 0) -> None:
        super().__init__(flips)
        self.model = torch.nn.Module()
        self.model.o_proj = torch.nn.Linear(4, 4, bias=False)

    def mine(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(2, dim=1)[RANK.get()] if name == CUT else tensor


class Bridge:
    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights, self.exports = weights, 0

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.exports += 1
        yield from self.weights.items()


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {NAME: torch.full((4, 4), value), "second.weight": torch.ones(4, 4)}


ONE_GPU = SimpleNamespace(world_size=1, tensor_parallel_size=1, data_parallel_size=1, enable_expert_parallel=False)
TWO_GPUS = SimpleNamespace(**vars(ONE_GPU) | {"world_size": 2, "tensor_parallel_size": 2})
RANK = ContextVar[int]("rank")
"""The rank that the current thread stands for."""


def config(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "parallel_config": ONE_GPU,
            "quant_config": None,
            "lora_config": None,
            "model_config": SimpleNamespace(is_multimodal_model=False, get_total_num_kv_heads=lambda: 2),
        }
        | more
    )


class Rank(HostedTrainer):
    """One rank, its engine and ms-swift's trainer."""

    group: Any = None

    def __init__(
        self,
        control: Any,
        rank: int,
        sent: dict[str, torch.Tensor],
        *,
        flips: int = 0,
        every: int = 1,
        layout: SimpleNamespace = ONE_GPU,
        patience: timedelta = PATIENCE,
    ) -> None:
        self.settings = job_settings({VARIABLE: f'{{"prove_sync_freq": {every}}}'})
        self._trainer: Any = SimpleNamespace(training_rank=rank, control=control, deadline=Deadline.after(patience))
        self.model = (Model if layout is ONE_GPU else CutModel)(flips)
        self.host = SimpleNamespace(
            bridge=Bridge(sent),
            state=SimpleNamespace(iteration=3),
            unwrapped_models=[torch.nn.Module()],
            _metrics={"train": defaultdict(list)},
            vllm_tp_group=self.group,
        )
        of_engine = config(parallel_config=layout)
        engine = SimpleNamespace(inner_model=self.model, engine=SimpleNamespace(vllm_config=of_engine))
        self.reader, self.syncs = EngineReader(engine, rank=rank), ColocatedSyncs(self)  # type: ignore[arg-type]
        self.syncs.add_engine(engine)

    def wait_for_all(self) -> None:
        self._trainer.control.barrier("sync", self._trainer.deadline)

    def sync(self) -> RlSafeError | None:
        try:
            self.syncs.sync(self.host, lambda: self.model.load_weights(self.host.bridge.export_weights()))
        except RlSafeError as error:
            return error
        return None


def synced(
    *sent: dict[str, torch.Tensor],
    flips: tuple[int, ...] = (0, 0),
    layout: SimpleNamespace = ONE_GPU,
    patience: timedelta = PATIENCE,
) -> tuple[list[Rank], list[Any]]:
    """Both ranks after a sync, and the error of each."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    secret = new_secret()

    def run(rank: int) -> tuple[Rank, Any]:
        store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
        control = ControlPlane(store, world="training world", rank=rank, members=trainer_ids(range(2)), secret=secret)
        RANK.set(rank)
        made = Rank(control, rank, sent[rank], flips=flips[rank], layout=layout, patience=patience)
        return made, made.sync()

    with ThreadPoolExecutor() as pool:
        ranks, errors = zip(*pool.map(run, range(2)), strict=True)
    return list(ranks), list(errors)


def test_a_sync_that_is_right_is_done_once_on_every_rank() -> None:
    ranks, errors = synced(weights(), weights())
    assert errors == [None, None]
    for rank in ranks:
        metrics = rank.host._metrics["train"]
        assert (metrics["rl_safe/sync_proved"], metrics["rl_safe/sync_redone"], rank.host.bridge.exports) == (
            [2.0],
            [0.0],
            1,
        )


def test_every_rank_sends_again_what_is_wrong_on_one() -> None:
    ranks, errors = synced(weights(), weights(), flips=(0, 1))
    assert errors == [None, None]
    assert [rank.host.bridge.exports for rank in ranks] == [2, 2]
    assert [rank.host._metrics["train"]["rl_safe/sync_redone"] for rank in ranks] == [[1.0], [1.0]]


def test_every_rank_ends_and_blames_the_one_whose_engine_is_wrong_twice() -> None:
    _, errors = synced(weights(), weights(), flips=(0, 2))
    for error in errors:
        assert error.culprit == trainer_id(1)
        assert re.search(f"the weight sync of step 4 has .*, twice: rollout rank 1: {WRONG}$", str(error))


class _Group:
    """vLLM's group of an engine's two ranks, which are threads."""

    def __init__(self) -> None:
        self._met, self._values = threading.Barrier(2, timeout=20), [None, None]

    def gather(self, value: Any, *, group: _Group) -> list[Any]:
        assert group is self
        self._values[RANK.get()] = json.loads(json.dumps(value))
        self._met.wait()
        found = list(self._values)
        self._met.wait()
        return found


@pytest.fixture
def _an_engine_of_both_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    group = _Group()
    monkeypatch.setattr(Rank, "group", group)
    monkeypatch.setattr(proved_syncs, "gather_json", group.gather)


@pytest.mark.usefixtures("_an_engine_of_both_ranks")
def test_the_ranks_of_an_engine_prove_together_what_they_hold() -> None:
    sent = {CUT: torch.arange(32.0).view(4, 8), **weights()}
    ranks, errors = synced(sent, sent, layout=TWO_GPUS)
    assert errors == [None, None]
    assert [rank.host._metrics["train"]["rl_safe/sync_proved"] for rank in ranks] == [[3.0], [3.0]]
    assert [rank.host.bridge.exports for rank in ranks] == [1, 1]


@pytest.mark.usefixtures("_an_engine_of_both_ranks")
def test_a_cut_that_one_rank_of_an_engine_has_wrong_twice_is_told_once() -> None:
    sent = {CUT: torch.arange(32.0).view(4, 8), **weights()}
    _, errors = synced(sent, sent, flips=(0, 2), layout=TWO_GPUS)
    wrong = WRONG.replace(NAME, CUT)
    for error in errors:
        assert re.search(f"twice: rollout rank 0: {wrong}$", str(error))


@pytest.mark.usefixtures("_an_engine_of_both_ranks")
def test_a_rank_of_an_engine_that_fails_in_its_sync_is_named_by_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other rank does not wait in vLLM's group, which cannot name it."""

    def load(model: CutModel, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        if RANK.get() == 1:
            raise ResourceError("out of memory")
        load_weights(model, weights)

    load_weights = CutModel.load_weights
    monkeypatch.setattr(CutModel, "load_weights", load)
    sent = {CUT: torch.arange(32.0).view(4, 8), **weights()}
    _, (waited, failed) = synced(sent, sent, layout=TWO_GPUS, patience=timedelta(seconds=3))
    assert str(failed) == "out of memory"
    assert isinstance(waited, PhaseTimeoutError)
    assert list(waited.missing) == [trainer_id(1)]


def test_a_rank_that_exports_other_weights_than_the_first_one_is_found() -> None:
    _, errors = synced(weights(), weights(2.0))
    assert [error.culprit for error in errors] == [trainer_id(1)] * 2
    assert re.search(f"rollout rank 1: {WRONG}$", str(errors[0]))


def test_an_engine_that_takes_no_weights_is_found() -> None:
    ranks, _ = synced(weights(), weights())
    rank = ranks[0]
    held = rank.reader.received(rank.host, rank, lambda: None)  # type: ignore[arg-type]
    assert held.differences({NAME: 1})[0] == "no weights have come in this sync"


def test_a_sync_that_is_not_due_is_left_alone() -> None:
    rank = Rank(None, 0, weights(), every=-1)
    assert rank.sync() is None
    assert rank.host._metrics == {"train": {}}
    assert rank.digests is None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"vllm_mode": "server"},
            "--vllm_mode server: a server is another process, and has no call that reads weights",
        ),
        ({"vllm_enable_lora": True}, "--vllm_enable_lora True: only whole weights are read back"),
    ],
)
def test_a_job_whose_syncs_cannot_be_proved_is_refused_on_one_line(given: dict[str, Any], complaint: str) -> None:
    fits = {"vllm_mode": "colocate", "vllm_enable_lora": False}
    check_proof(SimpleNamespace(**fits), every=0)
    with pytest.raises(ConfigError) as error:
        check_proof(SimpleNamespace(**fits | given), every=0)
    assert str(error.value).startswith(f"RL_SAFE_SWIFT.prove_sync_freq=0 with {complaint}")
    assert str(error.value).endswith("; set RL_SAFE_SWIFT.prove_sync_freq to -1")


def test_an_engine_that_cannot_be_read_back_is_refused_when_it_is_there() -> None:
    quantised = SimpleNamespace(inner_model=Model(), engine=SimpleNamespace(vllm_config=config(quant_config="fp8")))
    with pytest.raises(ConfigError, match="cannot be proved: its weights are quantised; set RL_SAFE_SWIFT"):
        EngineReader(quantised, rank=0)


class Engine:
    """An actor that holds the digests that it is given, and then what it was sent."""

    def __init__(self, *held: int) -> None:
        self.given = list(held)
        self.rl_safe_prove = SimpleNamespace(remote=lambda: None)
        self.rl_safe_held = SimpleNamespace(remote=self._held)

    def _held(self) -> HeldWeights:
        digest = self.given.pop(0) if self.given else 7
        return HeldWeights(digests=((NAME, digest),), converted=0, unread=(), faults=(), seconds=0.0)


def manager_of(*engines: Engine, every: int = 1) -> tuple[Any, RayWaits]:
    """ms-swift's, as far as a sync goes, with one training actor."""
    sent = SimpleNamespace(remote=lambda: SentWeights(digests={NAME: 7}, seconds=0.0))

    class Manager:
        def __init__(self) -> None:
            self.calls: list[str] = []
            announced = SimpleNamespace(remote=lambda: self.calls.append("prove"))
            self.train_actors = [SimpleNamespace(rl_safe_prove=announced, rl_safe_sent=sent)]
            self.rollout_actors = engines

        def _sync_weights_naive(self, merge_and_sync: bool) -> None:
            self.calls.append(f"naive {merge_and_sync}")

        def _sync_weights_nccl(self, merge_and_sync: bool) -> None:
            self.calls.append(f"nccl {merge_and_sync}")

    waits = RayWaits(SwiftTimeouts(), Path("failure"))
    prove_transfers(Manager, waits, every=every)
    return Manager(), waits


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_prover.ray, "get", lambda calls: calls)


@pytest.mark.usefixtures("without_ray")
def test_the_driver_proves_both_ways_to_send_weights() -> None:
    manager, waits = manager_of(Engine(), every=2)
    manager._sync_weights_naive(True)
    manager._sync_weights_naive(True)
    manager._sync_weights_nccl(False)
    assert manager.calls == ["prove", "naive True", "naive True", "prove", "nccl False"]
    assert waits.failure is None


@pytest.mark.usefixtures("without_ray")
def test_the_driver_logs_a_proved_sync_once_with_its_own_metrics() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.ckpt_manager, _ = manager_of(Engine(), Engine(8))

        def _build_grpo_log_metrics(self, reward: float) -> dict[str, float]:
            return {"reward": reward}

    log_proofs(Trainer)
    trainer = Trainer()
    trainer.ckpt_manager._sync_weights_naive(True)
    assert trainer._build_grpo_log_metrics(0.5) == {
        "reward": 0.5,
        "rl_safe/sync_proved": 2.0,
        "rl_safe/sync_not_proved": 0.0,
        "rl_safe/sync_redone": 1.0,
        "timing_s/rl_safe_sync_proof": 0.0,
    }
    assert trainer._build_grpo_log_metrics(0.5) == {"reward": 0.5}, "the next step has no proved sync"


@pytest.mark.usefixtures("without_ray")
def test_the_driver_sends_again_what_one_engine_holds_wrong() -> None:
    manager, _ = manager_of(Engine(), Engine(8))
    manager._sync_weights_nccl(False)
    assert manager.calls == ["prove", "nccl False"] * 2


@pytest.mark.usefixtures("without_ray")
def test_the_job_ends_with_what_an_engine_holds_wrong_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(JobVerdict, "on", lambda self, error, phase: error)
    manager, waits = manager_of(Engine(), Engine(7, 8, 8))
    manager._sync_weights_naive(True)  # the first is proved
    with pytest.raises(WeightSyncError, match=f"^weight sync 2 has .*, twice: rollout rank 1: {WRONG}$") as error:
        manager._sync_weights_naive(True)
    assert waits.failure is error.value
    assert f"the job has failed: {error.value}" in caplog.text
    with pytest.raises(WeightSyncError):
        manager._sync_weights_naive(True)
    assert manager.calls == ["prove", "naive True"] * 3, "nothing is sent any more"
