"""The groups of the plan against those of whichever megatron-core is imported: ... megatron_groups small|random

One process plays every rank of every layout: Megatron computes all of its groups on each rank, and only torch's
``new_group``, which would wait for the other ranks, is replaced by one that remembers what it was asked for.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import megatron.core
import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.plan.families import megatron_families
from rl_safe_workers.topology.layout import ParallelLayout, divisors

SEED, RANDOM_LAYOUTS = 20260801, 200
LARGEST_SMALL, LARGEST_RANDOM = 8, 64
Groups = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Case:
    """A layout, and over how many optimizer instances it is split."""

    layout: ParallelLayout
    instances: int


def cases_of(world_size: int) -> Iterator[Case]:
    """Yields every layout of a world that factors it."""
    sizes = divisors(world_size)
    for tp, cp, pp, etp, ep, instances in product(sizes, sizes, sizes, sizes, sizes, (1, 2)):
        layout = ParallelLayout(world_size=world_size, tensor=tp, pipeline=pp, expert=ep, expert_tensor=etp, context=cp)
        fits = world_size % (tp * cp * pp) == 0 and world_size % (etp * ep * pp) == 0
        if fits and layout.data * cp % instances == 0 and layout.expert_data % instances == 0:
            yield Case(layout, instances)


def small_cases() -> list[Case]:
    """Every layout of up to eight ranks."""
    return [case for size in range(1, LARGEST_SMALL + 1) for case in cases_of(size)]


def random_cases() -> list[Case]:
    """Layouts of up to 64 ranks from a seed, each size as likely as any other."""
    chance = random.Random(SEED)
    return [chance.choice(list(cases_of(chance.randint(2, LARGEST_RANDOM)))) for _ in range(RANDOM_LAYOUTS)]


class _Group:
    def __init__(self, description: str, ranks: list[int]) -> None:
        self.description, self.ranks = description, ranks


def built(case: Case, rank: int) -> Groups:
    """The groups that Megatron makes and this rank is in, in the order in which it makes them."""
    layout = case.layout

    def new_group(ranks: list[int], *, group_desc: str, **_: Any) -> _Group:
        return _Group(group_desc, ranks)

    fakes = {
        "new_group": new_group,
        "is_initialized": lambda: True,
        "get_world_size": lambda *_: layout.world_size,
        "get_rank": lambda *_: rank,
    }
    with mock.patch.multiple(dist, **fakes):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            num_distributed_optimizer_instances=case.instances,
        )
        listed = parallel_state._global_process_group_list
        found = [(group.description, tuple(sorted(group.ranks))) for group in listed if group is not None]
        with mock.patch.object(dist, "destroy_process_group"):
            parallel_state.destroy_model_parallel()
    return found


@contextmanager
def _computed_once() -> Iterator[None]:
    """Lets Megatron compute the ranks of a kind once for a layout; it gives each rank the same ones."""
    compute, known = parallel_state.RankGenerator.get_ranks, {}

    def get_ranks(self: Any, token: str) -> list[list[int]]:
        key = (self.order, tuple(self.ordered_size), token)
        if key not in known:
            known[key] = compute(self, token)
        return [list(ranks) for ranks in known[key]]

    def is_torch_min_version(version: str) -> bool:
        return True  # of any that this repository supports; Megatron parses it once for each group

    with (
        mock.patch.object(parallel_state.RankGenerator, "get_ranks", get_ranks),
        mock.patch.object(parallel_state, "is_torch_min_version", is_torch_min_version),
    ):
        yield


def planned(case: Case, rank: int, rules: str) -> Groups:
    """The same of the plan."""
    families = megatron_families(case.layout, instances=case.instances, rules=rules)
    found = [(family.description, family.ranks_with(rank)) for family in families]
    return [(description, ranks) for description, ranks in found if ranks is not None]


def compare(cases: list[Case]) -> dict[str, Any]:
    """Compares every rank of every case; names at most three that differ."""
    rules = ".".join(megatron.core.__version__.split(".")[:2])
    ranks = groups = 0
    differences: list[str] = []
    with _computed_once():
        for case, rank in ((each, rank) for each in cases for rank in range(each.layout.world_size)):
            real, plan = built(case, rank), planned(case, rank, rules)
            ranks, groups = ranks + 1, groups + len(real)
            differences += [] if real == plan else [f"{case} rank {rank}: {real} against {plan}"]
    return {
        "version": megatron.core.__version__,
        "layouts": len(cases),
        "ranks": ranks,
        "groups": groups,
        "differ": len(differences),
        "differences": differences[:3],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compare({"small": small_cases, "random": random_cases}[sys.argv[1]]())))
