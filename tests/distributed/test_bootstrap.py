"""The bootstrap connects everything that a run uses, expert data-parallel groups first, and names who does not come."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer import dot_product_attention

from rl_safe_workers.comms.bootstrap import Bootstrap
from rl_safe_workers.comms.live_groups import live_groups
from rl_safe_workers.config import RunConfig
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.supervision import Supervision
from rl_safe_workers.errors import CommunicatorError, ConfigError, LifecycleError, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.topology.groups import EXPERT_DATA_PARALLEL, OpClass
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.recording import Collective, is_connected, recorded_collectives
from tests.distributed.worker import Worker, run_config, served_store

SIZE, STEPS = 4, 3
LAYOUTS: dict[str, dict[str, int]] = {
    "tp1_ep2": {"ep": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "pp2_ep2": {"pp": 2, "ep": 2},
    "pp2_vpp2_ep2": {"pp": 2, "vpp": 2, "ep": 2},
    "cp2_ep2": {"cp": 2, "ep": 2},
    "ep2_instances2": {"ep": 2, "instances": 2},
    "ep1": {},
}
REDUCE, GATHER, ALL_TO_ALL = OpClass.REDUCE, OpClass.GATHER_SCATTER, OpClass.ALL_TO_ALL
WORLD = "default_pg"


def _config(model: Path, *, cp: int = 1, instances: int = 1, **sizes: int) -> RunConfig:
    config = run_config(model, **sizes, ppo_micro_batch_size_per_gpu=1)
    config.megatron.context_parallel_size = cp
    config.megatron.num_distributed_optimizer_instances = instances
    return config


def _worker(rank: int, address: StoreAddress, config: RunConfig) -> Worker:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.init_world(address, backend="gloo")
    worker.init_groups(seed=0)
    return worker


@contextmanager
def _recorded_bootstrap() -> Iterator[list[Collective]]:
    """As `recorded_collectives`, for those of a bootstrap, which issues them in threads."""
    collectives: list[Collective] = []
    issue = Bootstrap._issue

    def recorded(self: Bootstrap, *args: Any) -> Any:
        with recorded_collectives() as found:
            value = issue(self, *args)
        collectives.extend(found)
        return value

    Bootstrap._issue = recorded
    try:
        yield collectives
    finally:
        Bootstrap._issue = issue


def _let_local_layers_stand_in_for_context_parallelism() -> None:
    """Megatron refuses it without Transformer Engine, and pins memory for it.

    What the attention itself would do over the context-parallel group is in the table only.
    """
    init, tensor = dot_product_attention.DotProductAttention.__init__, torch.tensor

    def without_context(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        size, config.context_parallel_size = config.context_parallel_size, 1
        init(self, config, *args, **kwargs)
        config.context_parallel_size = size

    dot_product_attention.DotProductAttention.__init__ = without_context
    torch.tensor = lambda *args, pin_memory=False, **kwargs: tensor(*args, **kwargs)


def _use_everything(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[str, Any]:
    if config.megatron.context_parallel_size > 1:
        _let_local_layers_stand_in_for_context_parallelism()
    worker = _worker(rank, address, config)
    groups = [(g.description, g.ranks) for g in live_groups()]
    with _recorded_bootstrap() as bootstrap:
        reports = [worker.bootstrap()]
    with _recorded_bootstrap() as again:
        reports.append(worker.bootstrap())
    with recorded_collectives() as used:
        worker.convert()
        worker.compute_logprobs(worker.shard(reference.random_batch(rows=8)))
        for _ in range(STEPS):
            worker.step(reference.random_batch(rows=8))
        worker.weight_specs()
        worker.offload()
        worker.onload()
        if config.megatron.num_distributed_optimizer_instances == 1:
            worker.save_checkpoint(root, step=1, fingerprint="", layout={}, driver_state={})
    late = worker.late_allocations()
    worker.teardown()
    return {"groups": groups, "bootstrap": bootstrap, "again": again, "used": used, "reports": reports, "late": late}


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request, seeded_models, tmp_path_factory) -> list[dict[str, Any]]:
    sizes = LAYOUTS[request.param]
    config = _config(seeded_models["deep" if "vpp" in sizes else "moe"], **sizes)
    with served_store() as address:
        return values(run_ranks(_use_everything, SIZE, address, config, tmp_path_factory.mktemp("checkpoints")))


def _connections(collectives: list[Collective]) -> set[tuple[str, tuple[int, ...], OpClass]]:
    return {collective.connection for collective in collectives}


def test_the_first_collective_is_on_an_expert_data_parallel_group(ranks) -> None:
    for r in ranks:
        # Without expert parallelism experts are reduced with all else.
        has_one = any(EXPERT_DATA_PARALLEL in entry.group for entry in r["reports"][0].entries)
        assert has_one == (EXPERT_DATA_PARALLEL in r["bootstrap"][0].group)
        assert has_one == any("EXPERT_MODEL" in entry.group for entry in r["reports"][0].entries)


def test_each_op_class_is_issued_once_for_each_group(ranks) -> None:
    for r in ranks:
        entries = [(e.group, e.ranks, e.op_class) for e in r["reports"][0].entries]
        assert max(Counter(entries).values()) == 1
        issued = _connections(r["bootstrap"])
        assert {(g.replace("WORLD", WORLD), members, c) for g, members, c in entries} <= issued


def test_nothing_that_a_run_uses_was_left_unconnected(ranks) -> None:
    for r in ranks:
        used = {c for c in _connections(r["used"]) if len(c[1]) > 1}
        assert used - _connections(r["bootstrap"]) == set()
        assert len({c for c in used if c[0] != WORLD}) >= 3


def test_groups_of_one_rank_that_megatron_fires_are_connected_too(ranks) -> None:
    for r in ranks:
        alone = {c[:2] for c in _connections(r["used"]) if len(c[1]) == 1}
        assert alone <= {c[:2] for c in _connections(r["bootstrap"])}
        assert alone


def test_nothing_is_connected_that_a_run_does_not_use(ranks) -> None:
    for r in ranks:
        fired = {c[:2] for c in _connections(r["used"])}
        # What is not known of the model may be: tied embeddings. Context parallelism works in Transformer Engine only.
        # Of several optimizer instances a host may use the whole group.
        may_be = {"EMBEDDING_GROUP", "CONTEXT_PARALLEL_GROUP", EXPERT_DATA_PARALLEL}
        several = {c[:2] for c in _connections(r["bootstrap"]) if len(c[1]) > 1}
        assert {c for c in several if c[0] not in may_be} <= fired
        assert r["reports"][0].skipped > 3


def test_the_table_of_groups_has_every_group(ranks) -> None:
    for r in ranks:
        assert r["reports"][0].unknown == ()


def test_the_first_steps_find_nothing_late(ranks) -> None:
    for r in ranks:
        assert r["late"] == []


def test_a_second_bootstrap_repeats_the_first(ranks) -> None:
    for r in ranks:
        assert r["again"] == r["bootstrap"]
        assert r["reports"][0].groups == r["reports"][1].groups


def _disagree(rank: int, address: StoreAddress, config: RunConfig) -> tuple[str, int]:
    if rank == 1:
        config.megatron.moe_token_dispatcher_type = "allgather"
    worker = _worker(rank, address, config)
    with _recorded_bootstrap() as collectives:
        try:
            worker.bootstrap()
        except CommunicatorError as error:
            return str(error), len(collectives)
    return "", len(collectives)


def test_plans_that_differ_are_refused_on_every_rank_before_any_collective(address, seeded_models) -> None:
    outcomes = values(run_ranks(_disagree, SIZE, address, _config(seeded_models["moe"], ep=2), timeout_s=30))
    for message, collectives in outcomes:
        assert "EXPERT_MODEL_PARALLEL_GROUP" in message
        assert "their configurations differ" in message
        assert collectives == 0


TIMEOUT_S = 1.0
CULPRIT = 2


class _LeftError(Exception):
    """Ends a bootstrap without a word to the others."""


@contextmanager
def _patched(part: Callable[..., Any]) -> Iterator[None]:
    original = Supervision.part
    Supervision.part = part
    try:
        yield
    finally:
        Supervision.part = original


def _stray(rank: int, address: StoreAddress, config: RunConfig, late: bool) -> list[tuple[str, Any, float]]:
    """For each part in turn the culprit does not come to it, or only after the timeout."""
    worker = _worker(rank, address, config)
    mine = _parts_of(worker)
    if rank == CULPRIT:
        worker.safe.store.set("parts", "\n".join(mine))
    parts = worker.safe.store.get("parts").decode()
    config.rl_safe.timeouts.bootstrap = TIMEOUT_S
    found, part = [], Supervision.part
    for number, absent in enumerate(parts.split("\n")):

        def stray(self: Supervision, name: str, *args: Any, absent: str = absent) -> Any:
            if rank == CULPRIT and name == absent:
                if not late:
                    raise _LeftError
                time.sleep(TIMEOUT_S + 0.5)
            return part(self, name, *args)

        started_s, error = time.monotonic(), None
        with _patched(stray):
            try:
                worker.bootstrap()
            except (PhaseTimeoutError, _LeftError) as raised:
                error = raised
        found.append((absent, error, time.monotonic() - started_s))
        if worker.safe.store.add(f"met/{number}", 1) == SIZE:
            worker.safe.store.set(f"all/{number}", "")
        worker.safe.store.wait([f"all/{number}"])
    return found


def _parts_of(worker: Worker) -> list[str]:
    names: list[str] = []
    part = Supervision.part

    def noting(self: Supervision, name: str, *args: Any) -> Any:
        names.append(name)
        return part(self, name, *args)

    with _patched(noting):
        worker.bootstrap()
    return names


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.every_case), True], ids=["never", "late"])
def test_a_rank_that_does_not_come_in_time_is_named_at_every_group(late: bool, address, seeded_models) -> None:
    config = _config(seeded_models["moe"], pp=2, ep=2)
    outcomes = values(run_ranks(_stray, SIZE, address, config, late, timeout_s=90))
    for rank, found in enumerate(outcomes):
        assert len(found) >= 8
        for part, error, seconds in found:
            if rank == CULPRIT and not late:
                continue
            assert isinstance(error, PhaseTimeoutError), (rank, part)
            assert error.missing == {trainer_id(CULPRIT)}
            # One of those where it is waited for; where it would have been alone, one after it.
            assert trainer_id(CULPRIT) in (error.awaited.members or ())
            assert error.setting == "rl_safe.timeouts.bootstrap"
            assert seconds < TIMEOUT_S + 10


MUTE, JUDGE = 1, 2
"""Without the first one's plan, the second one goes on: it is no neighbour of that rank in any group."""


def _plan_late(rank: int, address: StoreAddress, config: RunConfig) -> set[int] | None:
    """One rank publishes no plan in time; returns the ranks that this rank misses."""
    worker = _worker(rank, address, config)
    if rank == MUTE:
        compare = Supervision.compare

        def late(self: Supervision, *args: Any) -> None:
            time.sleep(TIMEOUT_S + 2)
            compare(self, *args)

        Supervision.compare = late
    if rank != JUDGE:
        judge = Supervision._let_one_judge

        def later(self: Supervision) -> None:
            time.sleep(0.5)
            judge(self)

        Supervision._let_one_judge = later
    config.rl_safe.timeouts.bootstrap = TIMEOUT_S
    try:
        worker.bootstrap()
    except PhaseTimeoutError as error:
        return {one.rank for one in error.missing}
    return None


def test_a_rank_without_a_plan_is_named_and_not_those_who_wait_for_its_plan(address, seeded_models) -> None:
    outcomes = values(run_ranks(_plan_late, SIZE, address, _config(seeded_models["moe"], ep=2), timeout_s=90))
    assert [found for rank, found in enumerate(outcomes) if rank != MUTE] == [{MUTE}] * (SIZE - 1)


def _fail(rank: int, address: StoreAddress, config: RunConfig, number: int) -> tuple[str, str, float]:
    """The culprit's collective of a part raises; returns the part, this rank's error, and after how long."""
    worker = _worker(rank, address, config)
    issue, issued = Bootstrap._issue, []

    def failing(self: Bootstrap, op_class: OpClass, group: Any) -> Any:
        issued.append(f"{group} {op_class}")
        if rank == CULPRIT and len(issued) == number + 1:
            raise ValueError("no such device")
        return issue(self, op_class, group)

    Bootstrap._issue = failing
    started_s = time.monotonic()
    try:
        worker.bootstrap()
    except CommunicatorError as error:
        return (issued or [""])[-1], str(error), time.monotonic() - started_s
    return "", "", 0.0


@pytest.mark.parametrize("number", range(9))
def test_a_rank_that_fails_inside_a_group_is_named_by_all_others(number: int, address, seeded_models) -> None:
    config = _config(seeded_models["moe"], pp=2, ep=2)
    config.rl_safe.timeouts.bootstrap = 20.0
    outcomes = values(run_ranks(_fail, SIZE, address, config, number, timeout_s=60))
    part = outcomes[CULPRIT][0]
    for _, message, seconds in outcomes:
        assert f"training rank {CULPRIT} failed in {part}: ValueError: no such device" in message
        assert seconds < 4


def _stall(rank: int, address: StoreAddress, config: RunConfig) -> str:
    """The culprit's collective never ends, though all have come."""
    worker = _worker(rank, address, config)
    if rank == CULPRIT:
        Bootstrap._issue = lambda self, op_class, group: threading.Event().wait()
    try:
        worker.bootstrap()
    except PhaseTimeoutError as error:
        return str(error)
    return ""


def test_a_collective_that_does_not_end_fails_all_within_the_timeout(address, seeded_models) -> None:
    config = _config(seeded_models["moe"], ep=2)
    config.rl_safe.timeouts.bootstrap = 2.0
    for message in values(run_ranks(_stall, SIZE, address, config, timeout_s=30)):
        # All have come and all are alive, but one is not in the collective.
        assert f"phase bootstrap: rank {CULPRIT} of EXPERT_DATA_PARALLEL_GROUP" in message


def _freeze(rank: int, address: StoreAddress, config: RunConfig) -> tuple[int, ...]:
    """The culprit's process stops in the middle of a collective."""
    worker = _worker(rank, address, config)
    if rank == CULPRIT:
        Bootstrap._issue = lambda self, op_class, group: os.kill(os.getpid(), signal.SIGSTOP)
    try:
        worker.bootstrap()
    except PhaseTimeoutError as error:
        return tuple(one.rank for one in sorted(error.missing))
    return ()


def test_a_process_that_stops_in_a_collective_is_named_by_all_others(address, seeded_models) -> None:
    config = _config(seeded_models["moe"], ep=2)
    config.rl_safe.timeouts.bootstrap = 2.0
    others = [rank for rank in range(SIZE) if rank != CULPRIT]
    outcomes = run_ranks(_freeze, SIZE, address, config, timeout_s=15)
    assert [outcomes[rank].value for rank in others] == [(CULPRIT,)] * len(others)


def _block_the_store(rank: int, address: StoreAddress, config: RunConfig) -> tuple[str, float]:
    """All but the culprit wait in the store's connection, as NCCL does for a rank that never gets there."""
    worker = _worker(rank, address, config)

    def issue(self: Bootstrap, op_class: OpClass, group: Any) -> Any:
        if rank == CULPRIT:
            raise ValueError("no such device")
        return worker.safe.store.get("never")

    Bootstrap._issue = issue
    started_s = time.monotonic()
    try:
        worker.bootstrap()
    except CommunicatorError as error:
        return str(error), time.monotonic() - started_s
    return "", 0.0


def test_a_failure_is_heard_of_while_a_collective_holds_the_stores_connection(address, seeded_models) -> None:
    config = _config(seeded_models["moe"], ep=2)
    config.rl_safe.timeouts.bootstrap = 20.0
    for message, seconds in values(run_ranks(_block_the_store, SIZE, address, config, timeout_s=60)):
        assert f"training rank {CULPRIT} failed in" in message
        assert seconds < 4


def _repeat(rank: int, address: StoreAddress, config: RunConfig) -> list[int]:
    """Bootstraps again and again; the number of keys after each, once all are through."""
    worker, keys = _worker(rank, address, config), []
    for turn in range(4):
        worker.bootstrap()
        for step in ("counting", "counted"):
            if worker.safe.store.add(f"{step}/{turn}", 1) == SIZE:
                worker.safe.store.set(f"{step}/{turn}/all", "")
            worker.safe.store.wait([f"{step}/{turn}/all"])
            if step == "counting":
                keys.append(worker.safe.store.num_keys() - 4 * turn)
    return keys


def test_bootstraps_leave_no_keys_behind(address, seeded_models) -> None:
    for keys in values(run_ranks(_repeat, SIZE, address, _config(seeded_models["moe"], pp=2, ep=2))):
        # A barrier's own keys may be half there.
        assert max(keys[1:]) - min(keys[1:]) <= 4, keys


def _rebuild(rank: int, address: StoreAddress, config: RunConfig) -> bool:
    worker = _worker(rank, address, config)
    worker.bootstrap()
    parallel_state.destroy_model_parallel()
    worker.safe.megatron.moe_token_dispatcher_type = "allgather"
    worker.init_groups(seed=0)
    known = worker.safe.lifecycle.has_completed(Phase.BOOTSTRAP)
    barrier = worker.safe.control.barrier

    def meet_and_dawdle(*args: Any, **kwargs: Any) -> None:
        barrier(*args, **kwargs)
        time.sleep(0.2 * rank)

    worker.safe.control.barrier = meet_and_dawdle
    worker.bootstrap()
    return known


def test_rebuilt_groups_need_a_bootstrap_and_its_plans_are_not_taken_for_the_old_ones(address, seeded_models) -> None:
    assert values(run_ranks(_rebuild, SIZE, address, _config(seeded_models["moe"], ep=2))) == [False] * SIZE


def _limit(rank: int, address: StoreAddress, config: RunConfig, limits: dict[str, int]) -> tuple[str, bool]:
    for key, limit in limits.items():
        setattr(config.rl_safe.bootstrap.max_ctas, key, limit)
    worker = Worker(config, rank=rank, size=SIZE)
    worker.init_world(address, backend="gloo")
    message = ""
    try:
        worker.init_groups(seed=0)
    except ConfigError as error:
        message = str(error)
    # Whoever left now would take the connections of those who are still in init_world.
    worker.safe.control.barrier(Phase.TEARDOWN, Deadline.after(worker.safe.timeout(Phase.TEARDOWN)))
    return message, parallel_state.model_parallel_is_initialized()


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ({"inter_ep_dp": 4}, "max_ctas.inter_ep_dp: Megatron creates none in this layout"),
        ({"ep_dp": 0}, "rl_safe.bootstrap.max_ctas.ep_dp=0 must be from 1 to 64 CTAs"),
        ({"ep_dp": -1}, "rl_safe.bootstrap.max_ctas.ep_dp=-1 must be from 1 to 64 CTAs"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_before_any_group_is_made(limits, complaint, address, seeded_models) -> None:
    for message, has_groups in values(run_ranks(_limit, SIZE, address, _config(seeded_models["moe"], ep=2), limits)):
        assert complaint in message
        assert not has_groups


def _offload_first(rank: int, address: StoreAddress, config: RunConfig) -> tuple[str, bool]:
    worker = _worker(rank, address, config)
    try:
        worker.offload()
    except LifecycleError as error:
        return str(error), is_connected(live_groups()[0].group)
    return "", is_connected(live_groups()[0].group)


def test_an_offload_before_the_bootstrap_is_refused(address, seeded_models) -> None:
    for message, connected in values(run_ranks(_offload_first, SIZE, address, _config(seeded_models["moe"], ep=2))):
        assert "the bootstrap has not run" in message
        assert "rl_safe.bootstrap.on_missing=bootstrap" in message
        assert not connected


def _offload_bootstraps(rank: int, address: StoreAddress, config: RunConfig) -> list[bool]:
    worker = _worker(rank, address, config)
    worker.bootstrap()
    worker.convert()
    worker.safe.lifecycle.invalidate(Phase.BOOTSTRAP)
    with _recorded_bootstrap() as collectives:
        worker.offload()
    safe = worker.safe
    return [safe.lifecycle.has_completed(Phase.BOOTSTRAP), safe.offloader.is_offloaded, len(collectives) > 0]


def test_an_offload_bootstraps_first_if_so_configured(address, seeded_models) -> None:
    config = _config(seeded_models["moe"], ep=2)
    config.rl_safe.bootstrap.on_missing = "bootstrap"
    assert values(run_ranks(_offload_bootstraps, SIZE, address, config)) == [[True] * 3] * SIZE
