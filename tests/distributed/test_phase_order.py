"""The order in which a trainer's parts are asked before a phase begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.checkpoint.save.saver import Saver
from rl_safe_workers.comms.bootstrap import Bootstrap
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import LifecycleError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config


def _listen(asked: list[str], owner: type, method: str) -> None:
    """Notes each call of a method in ``asked``, and lets it go on."""
    original = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        asked.append(f"{owner.__name__}.{method}")
        return original(*args, **kwargs)

    setattr(owner, method, call)


def _begin_save(worker: Worker, root: Path, step: int) -> None:
    worker.save_checkpoint(root, step=step, fingerprint="f", layout={}, driver_state={}, background=True)


def _orders(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[str, list[str]]:
    asked: list[str] = []
    for owner, method in ((Bootstrap, "run"), (Saver, "finish"), (Saver, "advance")):
        _listen(asked, owner, method)
    worker = Worker(config, rank=rank, size=1)
    worker.init_world(address, backend="gloo")
    worker.init_groups(seed=0)
    orders: dict[str, list[str]] = {}

    def note(name: str) -> None:
        orders[name], asked[:] = list(asked), []

    worker.convert()
    note("a phase that needs the bootstrap")
    _begin_save(worker, root, 1)
    with worker.phase(Phase.GROUPS):
        worker.safe.lifecycle.invalidate(Phase.BOOTSTRAP)  # as new groups do
    note("new groups beside a save")
    worker.offload()
    note("an offload after new groups, beside a save")
    worker.onload()
    _begin_save(worker, root, 2)
    asked.clear()
    worker.safe.offloader.is_offloaded = True
    try:
        _begin_save(worker, root, 3)
    except LifecycleError as error:
        asked.append(str(error))
    note("a save of an offloaded state, beside a save")
    worker.safe.offloader.is_offloaded = False
    worker.teardown()
    return orders


def test_connections_come_first_then_the_save_in_the_background_then_the_offloaded_state(
    address, seeded_models, tmp_path
) -> None:
    config = run_config(seeded_models["dense"])
    bootstrap = config.rl_safe.bootstrap.model_copy(update={"on_missing": "bootstrap"})
    config = config.model_copy(update={"rl_safe": config.rl_safe.model_copy(update={"bootstrap": bootstrap})})
    (orders,) = values(run_ranks(_orders, 1, address, config, tmp_path))
    assert orders["a phase that needs the bootstrap"] == ["Bootstrap.run"]
    assert orders["new groups beside a save"] == ["Saver.advance"]
    # The bootstrap is a phase of its own, and moves the save on.
    assert orders["an offload after new groups, beside a save"] == ["Saver.advance", "Bootstrap.run", "Saver.finish"]
    finish, refusal = orders["a save of an offloaded state, beside a save"]
    assert finish == "Saver.finish"
    assert "its state is in host memory; call onload() first" in refusal


def test_every_part_is_asked_before_the_lifecycle_refuses_the_phase(address, seeded_models) -> None:
    values(run_ranks(_refusals, 1, address, run_config(seeded_models["dense"])))


def _refusals(rank: int, address: StoreAddress, config: RunConfig) -> None:
    worker = Worker(config, rank=rank, size=1)
    worker.init_world(address, backend="gloo")
    worker.init_groups(seed=0)
    with pytest.raises(LifecycleError, match="the bootstrap has not run"), worker.phase(Phase.SYNC):
        pass
    worker.bootstrap()
    with pytest.raises(LifecycleError, match="before phase offload"), worker.phase(Phase.ONLOAD):
        pass
    worker.teardown()
