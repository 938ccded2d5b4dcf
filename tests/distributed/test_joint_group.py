"""The joint group: weights reach rollout ranks beside the training world, and a death is everyone's failure."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from rl_safe_workers.config import RunConfig
from rl_safe_workers.control.failure import Failure
from rl_safe_workers.errors import PhaseTimeoutError, WeightSyncError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.rollout.protocol import plan_buckets
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.joint_group import JointGroup, joint_world
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.ranks import Outcome, run_ranks, values
from tests.distributed.worker import Worker, control_plane, run_config, served_store

TRAINERS, JOINT_SIZE, BUCKET_BYTES = 4, 5, 200_000
PATIENCE, SHORT = timedelta(seconds=10), timedelta(seconds=2)
SYNC_S = 8.0


def _join(
    joint_rank: int, address: StoreAddress, *, size: int = 3, generation: int = 0, timeout=PATIENCE, parts: int = 1
) -> JointGroup:
    trainers, world = size - parts, joint_world(generation)
    control = control_plane(address, rank=joint_rank, size=size, trainers=trainers, world=world)
    return JointGroup(control, generation=generation, timeout=timeout, device=torch.device("cpu"), parts=parts)


def _broadcast(joint_rank: int, address: StoreAddress) -> list[Any]:
    group = _join(joint_rank, address)
    tensors = [torch.full((3,), float(joint_rank)), torch.tensor([joint_rank, 9])]
    waits = [group.broadcast(tensor, source=1) for tensor in tensors]
    waits[-1]()
    return [tensor.tolist() for tensor in tensors] + [torch.distributed.is_initialized()]


def test_everyone_gets_what_the_source_holds_without_a_default_group(address: StoreAddress) -> None:
    assert values(run_ranks(_broadcast, 3, address)) == [[[1.0, 1.0, 1.0], [1, 9], False]] * 3


def _broadcast_parts(joint_rank: int, address: StoreAddress) -> list[list[int]]:
    """Two trainers, of which the second sends, and an engine of two ranks."""
    group = _join(joint_rank, address, size=4, parts=2)
    tensors = [torch.tensor([10 * joint_rank + part]) for part in range(2)]
    group.broadcast(*tensors, source=1)()
    return [tensor.tolist() for tensor in tensors]


def test_each_rank_of_an_engine_gets_its_part_and_trainers_get_all(address: StoreAddress) -> None:
    first, second, part_0, part_1 = values(run_ranks(_broadcast_parts, 4, address))
    assert first == second == [[10], [11]]
    assert part_0 == [[10], [21]], "nothing is sent for the other part"
    assert part_1 == [[30], [11]]


def _wait_for_the_last(joint_rank: int, address: StoreAddress) -> list[Any]:
    """Joint rank 0 sends first and comes last; the others have both broadcasts in flight by then."""
    store, group = connect_store(address, timeout=PATIENCE), _join(joint_rank, address)
    tensors = [torch.tensor([joint_rank, number]) for number in range(2)]
    if joint_rank == 0:
        store.wait(["started/1", "started/2"])
        # What rank 1 sends reaches rank 2 now. gloo works on two broadcasts at a time, so a third would show nothing.
        time.sleep(0.5)
    waits = [group.broadcast(tensor, source=source) for source, tensor in enumerate(tensors)]
    store.set(f"started/{joint_rank}", "")
    waits[-1]()
    arrived = [tensor.tolist() for tensor in tensors]
    for wait in waits:
        wait()
    return [*arrived, group.is_open]


def test_several_broadcasts_are_in_flight_and_to_wait_for_the_last_is_to_wait_for_all(address: StoreAddress) -> None:
    assert values(run_ranks(_wait_for_the_last, 3, address)) == [[[0, 0], [1, 1], True]] * 3


def _message(call: Callable[[], object]) -> str:
    with pytest.raises(WeightSyncError) as caught:
        call()
    return str(caught.value)


def _lose_the_source(joint_rank: int, address: StoreAddress) -> dict[str, Any]:
    """Joint rank 2 dies once the others wait for three broadcasts of its own."""
    store, group = connect_store(address, timeout=PATIENCE), _join(joint_rank, address)
    if joint_rank == 2:
        store.wait(["started/0", "started/1"])
        os._exit(1)
    waits = [group.broadcast(torch.zeros(2), source=2) for _ in range(3)]
    store.set(f"started/{joint_rank}", "")
    return {"second": _message(waits[1]), "others": [_message(waits[0]), _message(waits[2])], "open": group.is_open}


def test_after_a_failure_all_that_was_started_before_is_refused(address: StoreAddress) -> None:
    for outcome in run_ranks(_lose_the_source, 3, address)[:2]:
        (seen,) = values([outcome])
        name = f"joint rank {outcome.rank}"
        assert seen["second"].startswith(f"{name}: broadcast over the joint group failed: ")
        assert seen["others"] == [f"{name}: the joint group is closed"] * 2
        assert not seen["open"]


def _lose_the_source_of_one(joint_rank: int, address: StoreAddress) -> float:
    """Joint rank 2 dies in its broadcast, while each of the others waits in another one for a third to send."""
    store, group = connect_store(address, timeout=PATIENCE), _join(joint_rank, address)
    lost, other = torch.zeros(1000), torch.zeros(1000)
    if joint_rank == 2:
        store.wait(["started/0", "started/1"])
        os._exit(1)
    first = group.broadcast(lost, source=2)
    if joint_rank == 1:
        group.broadcast(other, source=0)
    store.set(f"started/{joint_rank}", "")
    start_s = time.monotonic()
    _message(first)
    seconds = time.monotonic() - start_s
    store.set(f"gave up/{joint_rank}", "")
    # The source of the other broadcast neither sends nor leaves before the test has ended.
    store.wait([f"gave up/{1 - joint_rank}"])
    return seconds


def test_a_broadcast_under_way_holds_nobody_that_gives_the_group_up(address: StoreAddress) -> None:
    """Rank 0 closes its own connections; what is asked is that rank 1 does not need that."""
    waited = values(run_ranks(_lose_the_source_of_one, 3, address)[:2])
    assert max(waited) < SYNC_S / 2


def _close_and_rejoin(joint_rank: int, address: StoreAddress) -> list[Any]:
    first = _join(joint_rank, address)
    was_open = first.is_open
    first.close()
    first.close()
    with pytest.raises(WeightSyncError, match="the joint group is closed"):
        first.broadcast(torch.zeros(1), source=0)
    second, tensor = _join(joint_rank, address, generation=1), torch.tensor([joint_rank])
    second.broadcast(tensor, source=2)()
    return [was_open, first.is_open, second.is_open, tensor.item()]


def test_close_is_idempotent_and_the_next_generation_works(address: StoreAddress) -> None:
    assert values(run_ranks(_close_and_rejoin, 3, address)) == [[True, False, True, 2]] * 3


def _leave_at_once(joint_rank: int, address: StoreAddress) -> tuple[float, float]:
    """Returns when this rank had connected, and when it had left. Joint rank 1 takes longer to connect."""
    connected_s = 0.0
    connect = JointGroup._connect

    def slowly(group: JointGroup, *arguments: Any) -> Failure | None:
        nonlocal connected_s
        failure = connect(group, *arguments)
        time.sleep(1.0 if joint_rank == 1 else 0.0)
        connected_s = time.monotonic()
        return failure

    JointGroup._connect = slowly  # type: ignore[method-assign]
    _join(joint_rank, address).close()
    return connected_s, time.monotonic()


def test_nobody_leaves_before_all_have_connected(address: StoreAddress) -> None:
    times = values(run_ranks(_leave_at_once, 3, address))
    assert min(left_s for _, left_s in times) > max(connected_s for connected_s, _ in times)


def _fail_to_connect(joint_rank: int, address: StoreAddress) -> None:
    connect = JointGroup._connect
    if joint_rank == 1:
        JointGroup._connect = lambda *arguments: connect(*arguments) or Failure("no route")  # type: ignore[method-assign]
    _join(joint_rank, address)


def test_every_rank_names_the_rank_that_cannot_connect_and_why(address: StoreAddress) -> None:
    for outcome in run_ranks(_fail_to_connect, 3, address):
        assert isinstance(outcome.error, WeightSyncError)
        assert str(outcome.error) == "joint rank 1 could not join the joint group: no route"
        assert outcome.error.culprit == (None if outcome.rank == 1 else RankId(Role.TRAINER, 1))


def _tell_too_late(joint_rank: int, address: StoreAddress) -> None:
    connect = JointGroup._connect
    if joint_rank == 1:
        JointGroup._connect = lambda *arguments: (connect(*arguments), time.sleep(8))[0]  # type: ignore[method-assign]
    _join(joint_rank, address, timeout=timedelta(seconds=5))


def test_a_rank_that_does_not_say_in_time_that_it_has_connected_is_named(address: StoreAddress) -> None:
    for outcome in run_ranks(_tell_too_late, 3, address)[::2]:
        assert isinstance(outcome.error, PhaseTimeoutError)
        assert outcome.error.missing == {RankId(Role.TRAINER, 1)}


def _vanish_before_connecting(joint_rank: int, address: StoreAddress) -> float:
    if joint_rank == 1:
        JointGroup._connect = lambda *_: os._exit(1)  # type: ignore[method-assign]
    control = control_plane(address, rank=joint_rank, size=3, trainers=2, world=joint_world(0))
    began_s = time.monotonic()
    with pytest.raises(PhaseTimeoutError) as caught:
        JointGroup(control, generation=0, timeout=SHORT, device=torch.device("cpu"), sync_timeout=PATIENCE)
    assert caught.value.missing == {RankId(Role.TRAINER, 1)}
    return time.monotonic() - began_s


def test_a_rank_that_dies_before_it_connects_is_named_in_time(address: StoreAddress) -> None:
    waited = values(run_ranks(_vanish_before_connecting, 3, address)[::2])
    assert max(waited) < PATIENCE.total_seconds() / 2


def _flush(joint_rank: int, address: StoreAddress) -> list[Any]:
    group, tensor = _join(joint_rank, address), torch.tensor([joint_rank])
    group.flush()
    group.broadcast(tensor, source=1)()
    group.flush()
    was_open = group.is_open
    group.close()
    with pytest.raises(WeightSyncError, match=f"joint rank {joint_rank}: the joint group is closed"):
        group.flush()
    return [tensor.item(), was_open, group.is_open]


def test_flush_returns_on_gloo_and_refuses_a_closed_group(address: StoreAddress) -> None:
    assert values(run_ranks(_flush, 3, address)) == [[1, True, False]] * 3


def _join_impatiently(joint_rank: int, address: StoreAddress) -> None:
    _join(joint_rank, address, generation=4, timeout=timedelta(seconds=1))


def test_a_rank_that_does_not_join_is_named(address: StoreAddress) -> None:
    for outcome in run_ranks(_join_impatiently, 3, address, ranks=[0, 2]):
        assert isinstance(outcome.error, PhaseTimeoutError)
        assert outcome.error.missing == {RankId(Role.TRAINER, 1)}
        assert "joint group 4" in str(outcome.error)
        assert "rl_safe.timeouts.joint" in str(outcome.error)


def _train_and_send(worker: Worker, address: StoreAddress) -> dict[str, Any]:
    """Sends to a rollout rank that has died, then to the one that takes its place."""
    worker.start(address)
    worker.convert()
    specs = worker.weight_specs()
    worker.safe.store.set("specs", pickle.dumps(specs))
    worker.join(JOINT_SIZE, generation=0)
    worker.safe.store.wait(["dying"])
    time.sleep(0.5)
    start_s = time.monotonic()
    try:
        worker.send_weights(bucket_bytes=BUCKET_BYTES)
    except WeightSyncError as error:
        failure, failed_after_s = str(error), time.monotonic() - start_s
    worker.join(JOINT_SIZE, generation=1)
    sent = worker.send_weights(bucket_bytes=BUCKET_BYTES)
    weights = {name: tensor.numpy().copy() for name, tensor in worker.export_hf_weights()}
    worker.teardown()
    return {"failure": failure, "failed_after_s": failed_after_s, "sent": sent, "weights": weights}


def _roll_out(address: StoreAddress, *, generation: int) -> dict[str, Any]:
    store = connect_store(address, timeout=timedelta(seconds=60))
    store.wait(["specs"])
    group = _join(TRAINERS, address, size=JOINT_SIZE, generation=generation, timeout=timedelta(seconds=60))
    if generation == 0:
        store.add("dying", 1)
        os._exit(1)
    received = {}
    for bucket in plan_buckets(pickle.loads(store.get("specs")), bucket_bytes=BUCKET_BYTES):
        buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8)
        group.broadcast(buffer, source=bucket.source)()
        for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
            flat = buffer[offset : offset + spec.size_bytes].view(getattr(torch, spec.dtype))
            received[spec.name] = flat.view(spec.shape).numpy().copy()
    return received


def _joint_rank(rank: int, address: StoreAddress, config: RunConfig) -> dict[str, Any]:
    if rank >= TRAINERS:
        return _roll_out(address, generation=rank - TRAINERS)
    return _train_and_send(Worker(config, rank=rank, size=TRAINERS), address)


LAYOUTS = {"tp1_ep2": {"ep": 2}, "pp2_ep2": {"pp": 2, "ep": 2}, "tp2_ep2": {"tp": 2, "ep": 2}}


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def outcomes(request, seeded_models) -> list[Outcome]:
    """Four trainers, a rollout rank that dies before the first broadcast, and one that receives the second."""
    config = run_config(seeded_models["moe"], **request.param)
    config.rl_safe.timeouts.sync = SYNC_S
    with served_store() as address:
        return run_ranks(_joint_rank, JOINT_SIZE + 1, address, config, timeout_s=40)


def test_a_death_before_the_broadcast_fails_the_sync_on_every_trainer(outcomes: list[Outcome]) -> None:
    for rank in values(outcomes[:TRAINERS]):
        assert rank["failure"].startswith("weight sync failed on training rank ")


def test_the_failure_is_known_long_before_the_timeout(outcomes: list[Outcome]) -> None:
    assert max(rank["failed_after_s"] for rank in values(outcomes[:TRAINERS])) < SYNC_S / 2


def test_the_next_generation_receives_every_weight_bit_for_bit(outcomes: list[Outcome]) -> None:
    *trainers, _, received = (outcome.value for outcome in outcomes)
    values([*outcomes[:TRAINERS], outcomes[-1]])
    for rank in trainers:
        assert rank["weights"].keys() == received.keys()
        assert all(np.array_equal(rank["weights"][name], weight) for name, weight in received.items())
        assert rank["sent"] >= sum(weight.nbytes for weight in received.values())


def test_it_takes_several_buckets(seeded_models) -> None:
    """So that the failures above happen in the middle of an export, which goes on for the others' sake."""
    size = (seeded_models["moe"] / "model.safetensors").stat().st_size
    assert size > 5 * BUCKET_BYTES


def _send_unjoined(rank: int, address: StoreAddress, config: RunConfig) -> None:
    worker = Worker(config, rank=rank, size=2)
    worker.start(address)
    worker.convert()
    if rank == 0:
        worker.join(2, generation=0)
    else:
        _join(1, address, size=2)
        with worker.safe.lifecycle.enter(Phase.JOINT):
            pass
    worker.weight_specs()
    worker.send_weights(bucket_bytes=BUCKET_BYTES)


def test_a_trainer_that_has_not_joined_fails_the_sync_for_all(address: StoreAddress, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    config.rl_safe.timeouts.sync = 8.0
    for outcome in run_ranks(_send_unjoined, 2, address, config):
        assert isinstance(outcome.error, WeightSyncError)
