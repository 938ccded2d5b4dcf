"""The groups of a plan are those that a real megatron-core makes, rank for rank and in the same order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.plan.families import host_families, megatron_families
from rl_safe_workers.topology.layout import ParallelLayout
from tests.distributed.megatron_groups import Case, Groups, compare, planned, small_cases
from tests.distributed.ranks import run_ranks, values

REPOSITORY = Path(__file__).parents[2]
UNPACKED = {path.name: str(path) for path in (REPOSITORY / ".matrix").glob("*") if (path / "megatron").is_dir()}
INSTALLED = "installed"


def layout(world_size: int, **sizes: int) -> ParallelLayout:
    ones = {"tensor": 1, "pipeline": 1, "expert": 1, "expert_tensor": 1, "context": 1}
    return ParallelLayout(world_size=world_size, **{**ones, **sizes})


@pytest.mark.timeout(600)  # every rank of 200 layouts takes half a minute of a core
@pytest.mark.parametrize(
    ("cases", "layouts"), [("small", 443), pytest.param("random", 200, marks=pytest.mark.every_case)]
)
@pytest.mark.parametrize("version", [INSTALLED, *sorted(UNPACKED)])
def test_every_rank_of_every_layout_has_the_groups_that_megatron_makes(version: str, cases: str, layouts: int) -> None:
    """``small``: every layout of up to 8 ranks that factors; ``random``: 200 of up to 64 ranks, from a seed."""
    path = ":".join([*([UNPACKED[version]] if version in UNPACKED else []), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.distributed.megatron_groups", cases],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert version in (INSTALLED, found["version"].partition("+")[0])
    assert found["layouts"] == layouts
    assert found["groups"] > 20 * found["ranks"]
    assert found["differences"] == []


def test_a_rule_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.distributed.megatron_groups.megatron_families", _with_tensor_and_data_swapped)
    assert compare(small_cases()[-40:])["differ"] > 0


def _with_tensor_and_data_swapped(of: ParallelLayout, **how: object) -> list[object]:
    found: list[object] = list(megatron_families(of, **how))  # type: ignore[arg-type]
    found[2], found[6] = found[6], found[2]
    return found


@pytest.mark.parametrize(
    "of",
    [
        layout(16, pipeline=2, expert=4, expert_tensor=2),
        layout(8, tensor=2, pipeline=2, expert=2),
        layout(8, context=2),
    ],
)
def test_ms_swifts_groups_are_those_that_mcore_bridge_asks_for(of: ParallelLayout) -> None:
    """As mcore_bridge/bridge/gpt_bridge.py does, and `create_ep_pp_groups` in its place."""
    sizes = {"tp": of.expert_tensor, "ep": of.expert, "dp": of.expert_data, "pp": of.pipeline, "cp": 1}
    generator = parallel_state.RankGenerator(**sizes, order="tp-cp-ep-dp-pp", rank_offset=0)
    [family] = host_families(of, "ms-swift")
    assert list(map(list, family.all_ranks())) == generator.get_ranks("ep-pp")


REAL = (
    Case(layout(4, tensor=2, expert=2), 1),
    Case(layout(4, pipeline=2, expert=2), 1),
    Case(layout(8, context=2, expert=4), 2),
    Case(layout(8, tensor=2, pipeline=4, expert_tensor=2), 1),
)


@pytest.mark.parametrize("case", REAL, ids=lambda case: f"{case.layout.world_size} ranks, {case.instances} instances")
def test_real_processes_hold_the_groups_of_the_plan(case: Case, tmp_path: Path) -> None:
    found = values(run_ranks(_held, case.layout.world_size, case, str(tmp_path / "store")))
    version = ".".join(_version().split(".")[:2])
    assert found == [planned(case, rank, version) for rank in range(case.layout.world_size)]


def _version() -> str:
    import megatron.core

    return str(megatron.core.__version__)


def _held(rank: int, case: Case, store: str) -> Groups:
    of = case.layout
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=of.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=of.tensor,
        pipeline_model_parallel_size=of.pipeline,
        context_parallel_size=of.context,
        expert_model_parallel_size=of.expert,
        expert_tensor_parallel_size=of.expert_tensor,
        num_distributed_optimizer_instances=case.instances,
    )
    dist.barrier()  # who ends while others still connect takes their connections down
    listed = [group for group in parallel_state._global_process_group_list if group is not None]
    return [(group.group_desc, tuple(dist.get_process_group_ranks(group))) for group in listed]
