"""Groups outlive their communicators: released and rebuilt, they carry what they carried before, or all ranks fail."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.comms.channel import Channel
from rl_safe_workers.comms.releasable import GroupState, register_backend
from rl_safe_workers.comms.release import rebuild, releasable_groups, release
from rl_safe_workers.config import RunConfig, SeededModelConfig
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import CommunicatorError, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.collectives import COLLECTIVES, all_collectives, batch
from tests.distributed.ranks import run_ranks, values
from tests.distributed.recording import Collective, recorded_collectives
from tests.distributed.releasing import PATIENCE, SIZE, Ranks, error_of, facts_of, three_threads
from tests.distributed.worker import Worker, run_config, served_store

SHORT = timedelta(seconds=1.5)
CYCLES = int(os.environ.get("RL_SAFE_RELEASE_CYCLES", "60"))
"""Releases and rebuilds. The figure in docs/communicators.md is of 200."""
STEP_EVERY = 10
"""A training step follows each tenth of them."""
WARM = CYCLES // 4
"""Cycles after which nothing may grow."""


# Every collective.


def _use_everything(rank: int, address: StoreAddress) -> dict[str, Any]:
    world = Ranks(rank, address, backend="gloo")
    plain = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    seen: dict[str, Any] = {"plain": [all_collectives(g) for g in (dist.group.WORLD, plain)]}
    dist.destroy_process_group()

    world = Ranks(rank, address)
    pairs = [
        dist.new_group(r, timeout=timedelta(seconds=7), pg_options=three_threads(), group_desc="PAIR")
        for r in ([0, 1], [2, 3])
    ]
    groups: list[Any] = [dist.group.WORLD, pairs[rank // 2]]
    seen |= {"used": [], "facts": [], "reports": [], "dispatched": []}
    for cycle in range(3):
        if cycle:
            seen["reports"] += [world.release(), world.rebuild()]
        with recorded_collectives() as dispatched:
            dist.all_reduce(torch.zeros(1), group=groups[1])
        seen["dispatched"] += dispatched
        seen["used"].append([all_collectives(group) for group in groups])
        seen["facts"].append([facts_of(group) for group in groups])
    dist.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    with served_store() as address:
        return values(run_ranks(_use_everything, SIZE, address))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_gives_what_a_plain_group_gives_before_and_after_each_release(ranks, collective) -> None:
    for r in ranks:
        for used in r["used"]:
            for group, plain in zip(used, r["plain"], strict=True):
                assert group[collective] == plain[collective]


def test_a_group_keeps_its_identity_timeout_options_and_description(ranks) -> None:
    # miles#3131 lost timeout and options at the first reload, and then died at 600 s.
    for rank, r in enumerate(ranks):
        first = r["facts"][0]
        assert r["facts"] == [first] * 3
        assert (first[0]["desc"], first[0]["ranks"], first[0]["timeout"]) == ("default_pg", list(range(SIZE)), PATIENCE)
        assert (first[1]["desc"], first[1]["timeout"], first[1]["threads"]) == ("PAIR", timedelta(seconds=7), 3)
        assert first[0]["backend"] == first[1]["backend"] == "rl_safe_gloo"
        members = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert r["dispatched"] == [Collective("allreduce_", "PAIR", members)] * 3


def test_the_default_group_is_released_and_rebuilt_like_any_other(ranks) -> None:
    for r in ranks:
        assert [report.groups for report in r["reports"]] == [2] * 4
        assert [report.generation for report in r["reports"][1::2]] == [1, 2]


# What a released group answers.


def _use_released(rank: int, address: StoreAddress) -> dict[str, Any]:
    world = Ranks(rank, address, size=2)
    (group,) = releasable_groups()
    seen: dict[str, Any] = {}
    world.release(missing_call="onload()")
    c10d._set_pg_timeout(timedelta(seconds=1))
    seen["raised"] = {
        name: error_of(lambda c=collective: c(group, torch.zeros(3)))[:2] for name, collective in COLLECTIVES.items()
    }
    seen["state"] = group.state
    seen["again"] = world.release().groups
    seen["rebuilt"] = [world.rebuild().groups, world.rebuild().groups]
    seen["timeout"] = group.timeout
    if rank == 0:
        seen["late"] = error_of(lambda: dist.recv(torch.zeros(1), src=1))
        world.store.set("late", "1")
    world.store.wait(["late"])
    return seen


@pytest.fixture(scope="module")
def released() -> list[dict[str, Any]]:
    with served_store() as address:
        return values(run_ranks(_use_released, 2, address))


def test_a_released_group_refuses_every_collective_and_connects_nothing(released) -> None:
    for r in released:
        for kind, message in r["raised"].values():
            assert kind is CommunicatorError
            assert "default_pg [0, 1]" in message
            assert "call onload() first" in message
        assert r["raised"]["all_reduce"][1].startswith("allreduce on group")
        assert r["state"] is GroupState.RELEASED


def test_releasing_and_rebuilding_twice_does_nothing_the_second_time(released) -> None:
    for r in released:
        assert (r["again"], r["rebuilt"]) == (0, [1, 0])


def test_a_timeout_set_while_a_group_is_released_bounds_its_next_generation(released) -> None:
    assert [r["timeout"] for r in released] == [timedelta(seconds=1)] * 2
    assert 0.9 < released[0]["late"][2] < 5


def _destroy(rank: int, address: StoreAddress) -> list[Any]:
    world = Ranks(rank, address, size=2)
    first, second, third = (dist.new_group([0, 1], group_desc=f"GROUP_{i}") for i in range(3))
    dist.destroy_process_group(first)
    seen: list[Any] = [world.release([dist.group.WORLD, first, second, third]).groups]
    dist.destroy_process_group(second)
    seen.append(world.rebuild([dist.group.WORLD, first, second, third]).groups)
    seen.append([error_of(lambda g=g: dist.all_reduce(torch.zeros(1), group=g))[1] for g in (first, second)])
    seen.append(error_of(lambda: first.allreduce([torch.zeros(1)]))[1])
    dist.all_reduce(torch.zeros(1), group=third)
    seen.append(world.release().groups)
    dist.destroy_process_group()
    seen.append(world.release().groups)
    return seen


def test_groups_that_were_destroyed_are_passed_over(address) -> None:
    # slime#909: the release failed on a group that was not valid any more.
    for released, rebuilt, refused, direct, rest, after_all in values(run_ranks(_destroy, 2, address)):
        assert (released, rebuilt, rest, after_all) == (3, 2, 2, 0)
        assert all("not initialized in the world group map" in message for message in refused), refused
        assert direct == "allreduce on group GROUP_0 [0, 1]: the group was destroyed"


# Nobody is left behind, and nobody runs ahead.


def _one_is_slow(rank: int, address: StoreAddress) -> tuple[float, float]:
    world = Ranks(rank, address)
    world.release()
    connect = Channel.connect

    def slowly(*args: Any, **kwargs: Any) -> None:
        connect(*args, **kwargs)
        time.sleep(0.6 if rank == 2 else 0)

    Channel.connect = slowly  # type: ignore[method-assign]
    start_s = time.monotonic()
    world.rebuild()
    connected_s = time.monotonic() - start_s
    world.rebuild(bootstrap=lambda patience: time.sleep(0.6 if rank == 1 else 0))
    dist.all_reduce(torch.zeros(1))
    return connected_s, time.monotonic() - start_s


def test_nobody_leaves_a_rebuild_before_all_are_done(address) -> None:
    # miles#384: without a barrier after the reload a rank began, and a run failed after 1600 steps.
    for connected_s, bootstrapped_s in values(run_ranks(_one_is_slow, SIZE, address)):
        assert connected_s > 0.5
        assert bootstrapped_s > 1.1


def _work_is_pending(rank: int, address: StoreAddress) -> tuple[set[bool], list[float]]:
    world = Ranks(rank, address)
    summed, received = torch.full((1_000_000,), float(rank)), torch.zeros(1_000_000)
    works: list[Any] = [dist.all_reduce(summed, async_op=True)]
    if rank == 1:
        works.append(dist.irecv(received, src=0))
    if rank == 0:
        works.append(dist.isend(torch.ones(1_000_000), dst=1))
    world.release()
    return {work.is_completed() for work in works}, [summed.min().item(), summed.max().item(), received.min().item()]


def test_pending_works_end_before_the_release(address) -> None:
    for rank, (completed, seen) in enumerate(values(run_ranks(_work_is_pending, SIZE, address))):
        assert completed == {True}
        assert seen == [6.0, 6.0, float(rank == 1)]


def _receive_in_vain(rank: int, address: StoreAddress) -> tuple[Any, Any]:
    world = Ranks(rank, address)
    works = [dist.irecv(torch.zeros(1), src=3)] if rank == 2 else []
    error = error_of(lambda: world.release(timeout=SHORT))
    assert len(works) == (rank == 2)
    return error, {group.state for group in releasable_groups()}


def test_an_operation_that_does_not_end_fails_the_release_on_every_rank(address) -> None:
    for (kind, message, took_s), states in values(run_ranks(_receive_in_vain, SIZE, address)):
        assert kind is CommunicatorError
        assert "training rank 2: group default_pg [0, 1, 2, 3] has an operation that does not end" in message
        assert took_s < SHORT.total_seconds() + 2
        assert states == {GroupState.CONNECTED}


def _one_does_not_come(rank: int, address: StoreAddress, which: str) -> Any:
    world = Ranks(rank, address)
    if which == "rebuild":
        world.release()
    if rank == 1:
        time.sleep(SHORT.total_seconds() + 1)
        return None
    return error_of(lambda: getattr(world, which)(timeout=SHORT))


@pytest.mark.parametrize(("which", "phase"), [("release", "offload"), ("rebuild", "onload")])
def test_a_rank_that_does_not_come_is_named(address, which, phase) -> None:
    outcomes = values(run_ranks(_one_does_not_come, SIZE, address, which))
    for kind, message, took_s in (outcomes[0], *outcomes[2:]):
        assert kind is PhaseTimeoutError
        assert message.startswith(f"phase {phase}: rank 1 of training world did not arrive within 1.")
        assert took_s < SHORT.total_seconds() + 2


def _fail_once(rank: int, address: StoreAddress, where: str) -> tuple[Any, Any, float]:
    world = Ranks(rank, address)
    world.release()
    connect = Channel.connect

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory\nwith a trace")

    if rank == 2 and where == "connect":
        Channel.connect = fail  # type: ignore[method-assign]
    bootstrap = fail if rank == 2 and where == "bootstrap" else lambda patience: dist.all_reduce(torch.zeros(1))
    error = error_of(lambda: world.rebuild(timeout=timedelta(seconds=4), bootstrap=bootstrap))
    states = {group.state for group in releasable_groups()}
    Channel.connect = connect  # type: ignore[method-assign]
    world.rebuild()
    result = torch.ones(1)
    dist.all_reduce(result)
    return error, states, result.item()


@pytest.mark.parametrize("where", ["connect", "bootstrap"])
def test_a_rank_that_fails_in_a_rebuild_fails_all_and_the_next_rebuild_succeeds(address, where) -> None:
    for (kind, message, took_s), states, result in values(run_ranks(_fail_once, SIZE, address, where)):
        assert kind is CommunicatorError
        assert message.startswith("rebuild: training rank 2: ")
        assert "RuntimeError: out of memory" in message or "connected again: out of memory" in message
        assert took_s < (2 if where == "bootstrap" else 6)
        assert states == {GroupState.RELEASED}
        assert result == SIZE


def _die(rank: int, address: StoreAddress) -> Any:
    world = Ranks(rank, address)
    world.release()
    return error_of(lambda: world.rebuild(timeout=SHORT, bootstrap=lambda patience: os._exit(1) if rank == 2 else None))


def test_a_rank_that_dies_in_a_rebuild_is_named(address) -> None:
    outcomes = run_ranks(_die, SIZE, address)
    for kind, message, took_s in values([o for o in outcomes if o.rank != 2]):
        assert kind is PhaseTimeoutError
        assert "rank 2 of training world did not arrive" in message
        assert took_s < SHORT.total_seconds() + 2


def _bring_other_groups(rank: int, address: StoreAddress) -> str:
    world = Ranks(rank, address)
    pairs = [dist.new_group(ranks, group_desc="PAIR") for ranks in ([0, 1], [2, 3])]
    chosen = [dist.group.WORLD] if rank == 1 else [dist.group.WORLD, pairs[rank // 2]]
    return error_of(lambda: world.release(chosen))[1]


def test_a_group_that_only_some_of_its_members_release_is_refused_on_every_rank(address) -> None:
    for message in values(run_ranks(_bring_other_groups, SIZE, address)):
        assert message == "release: group PAIR [0, 1] has 2 members, but only training ranks [0] release it"


def _bring_a_plain_group(rank: int, address: StoreAddress) -> str:
    world = Ranks(rank, address)
    plain = dist.new_group(backend="gloo", group_desc="PLAIN")
    return error_of(lambda: world.release([plain] if rank == 3 else None))[1]


def test_a_plain_group_is_refused_on_every_rank(address) -> None:
    for message in values(run_ranks(_bring_a_plain_group, SIZE, address)):
        assert "training rank 3: group PLAIN cannot be released: create the training world with" in message


# Megatron.


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe"
    create_seeded_model(path, SeededModelConfig(num_hidden_layers=4, hidden_size=64, head_dim=16))
    return path


def _sizes(store: Any) -> dict[str, int]:
    """Returns the sizes of everything that a cycle could leave behind."""
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "keys": store.num_keys(),
        "groups": len(c10d._world.pg_map),
        "inner groups": len(c10d._world.pg_group_ranks),
        "resident MiB": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20,
    }


def _send_first(group: dist.ProcessGroup) -> float:
    """A batch between the first two members of a group, before anything else was sent on it."""
    received = torch.zeros(1)
    if group.rank() == 0:
        batch(group, (dist.isend, torch.ones(1), 1))
    elif group.rank() == 1:
        batch(group, (dist.irecv, received, 0))
    return received.item() + (group.rank() != 1)


def _train(rank: int, address: StoreAddress, config: RunConfig, releases: bool) -> dict[str, Any]:
    random.seed(0)  # part of the digest, as numpy's and torch's
    np.random.seed(0)
    torch.manual_seed(0)
    worker = Worker(config, rank=rank, size=SIZE)
    worker.init_world(address, backend=register_backend("gloo") if releases else "gloo")
    worker.init_groups(seed=0)
    worker.bootstrap()
    worker.convert()
    batch, seen = reference.random_batch(rows=4, length=24), {"losses": [], "sizes": [], "times": [], "received": set()}
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    for cycle in range(CYCLES):
        if releases:
            ranks = {"control": worker.safe.control, "timeout": PATIENCE}
            seen["times"].append((release(**ranks).seconds, rebuild(**ranks).seconds))
            seen["received"].add(_send_first(pipeline))
            for group in releasable_groups():
                if group.size() > 1:
                    dist.all_reduce(torch.zeros(1), group=group)
        if cycle % STEP_EVERY == 0:
            seen["losses"].append(worker.step(batch))
        if cycle in (WARM, CYCLES - 1):
            worker.safe.control.barrier(Phase.TRAIN, Deadline.after(PATIENCE))
            seen["sizes"].append(_sizes(worker.safe.store))
    seen["digest"] = worker.digest()
    seen["members"] = {tuple(g.members) for g in releasable_groups()}
    worker.teardown()
    return seen


@pytest.fixture(
    scope="module",
    params=[pytest.param({"pp": 4}, marks=pytest.mark.every_case), {"pp": 2, "ep": 2}],
    ids=["pp4", "pp2_ep2"],
)
def trained(request, four_layers) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    config = run_config(four_layers, **request.param)
    runs = []
    for releases in (True, False):
        with served_store() as address:
            runs.append(values(run_ranks(_train, SIZE, address, config, releases)))
    return runs[0], runs[1]


def test_releases_change_no_bit_of_the_training(trained) -> None:
    for released, never in zip(*trained, strict=True):
        assert len(released["losses"]) == CYCLES // STEP_EVERY
        assert released["losses"] == never["losses"]
        assert released["digest"] == never["digest"]
    assert len({str(loss) for loss in trained[0][-1]["losses"]}) > 1


def test_a_batch_between_two_stages_may_be_the_first_thing_after_a_rebuild(trained) -> None:
    # slime primes every pipeline group by a barrier, because the first batch needed all ranks.
    assert [r["received"] for r in trained[0]] == [{1.0}] * SIZE


def test_releases_leave_nothing_behind(trained) -> None:
    for released, never in zip(*trained, strict=True):
        (warm, end), (warm_plain, end_plain) = released["sizes"], never["sizes"]
        for name in ("descriptors", "threads", "keys", "groups", "inner groups"):
            assert end[name] <= warm[name] + 4, (name, warm, end)
        training = max(0, end_plain["resident MiB"] - warm_plain["resident MiB"])
        assert end["resident MiB"] <= warm["resident MiB"] + training + 8


def test_members_of_groups_that_overlap_in_part_release_in_one_order(trained) -> None:
    # At four stages slime deadlocked destroying groups one by one: the stages hold different subsets of them.
    members = [r["members"] for r in trained[0]]
    assert len({frozenset(m) for m in members}) > 1
    for r in trained[0]:
        assert len(r["times"]) == CYCLES
        assert max(map(sum, r["times"])) < PATIENCE.total_seconds() / 2
