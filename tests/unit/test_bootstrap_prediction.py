"""The bootstrap's prediction for each entry of its ledger, where a host has habits of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from rl_safe_workers.comms.bootstrap import Bootstrap, BootstrapStep
from rl_safe_workers.comms.live_groups import LiveGroup
from rl_safe_workers.topology.groups import PIPELINE, Features, OpClass
from rl_safe_workers.topology.layout import ParallelLayout

MIB = 2**20
LAYOUT = ParallelLayout(world_size=2, tensor=1, pipeline=2, expert=1, expert_tensor=1, context=1)


def predicted(*classes: OpClass, had: frozenset[OpClass] = frozenset(), **features: bool) -> list[int]:
    """MiB of each class on the group of two pipeline stages, with 12 channels as in jobs of ms-swift's."""

    class Alone:
        """Issues nothing."""

        def part(self, what: str, ranks: Any, issue: Callable[[], Any]) -> tuple[float, int]:
            return 0.0, 0

    control: Any = SimpleNamespace(rank=0)
    work = Bootstrap(
        control,
        layout=LAYOUT,
        features=Features(batched_p2p=True, **features),
        limits={"pp": 12},
        device=torch.device("cpu"),
        probe=lambda: 0,
    )
    group = SimpleNamespace(group_name="7")
    work.connected = {"7": had}
    live = LiveGroup(description=PIPELINE, ranks=(0, 1), backend="nccl", group=group, is_megatrons=True)
    alone: Any = Alone()
    entries = work._connect(BootstrapStep(group=live, classes=classes, max_ctas=12), alone)
    return [entry.predicted_bytes // MIB for entry in entries]


def test_sends_over_the_default_group_are_predicted_with_the_pipelines() -> None:
    classes = (OpClass.REDUCE, OpClass.BATCHED_P2P)
    assert predicted(*classes) == [244, 192]
    assert predicted(*classes, p2p_over_world=True) == [244, 576]  # 246 and 576 on 2 GPUs


def test_what_is_connected_already_is_predicted_to_take_nothing() -> None:
    assert predicted(OpClass.REDUCE, had=frozenset({OpClass.REDUCE})) == [0]
