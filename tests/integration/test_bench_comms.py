"""The communicators' benchmark runs its jobs in turn, and its rows say what the issue promises."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import comms, comms_limits, exits
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import ResourceError, RunError
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.topology.memory import KERNEL_BYTES, Links, costs

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
MIB = comms.MIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    create_seeded_model(path, SeededModelConfig())
    return path


WAYS = (comms.OURS, comms.RELEASES)


@pytest.mark.every_case
def test_every_kind_of_job_trains(model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    overrides = [f"model.path={model}", "actor.ppo_micro_batch_size_per_gpu=2"]
    found = comms.run_layouts(
        tmp_path,
        comms.SMALL_LAYOUTS[:1],
        overrides,
        rows=2,
        tokens=16,
        report=lines.append,
        warmups=WAYS,
        recipe=RECIPE,
    )
    (figures,) = found.values()
    assert tuple(figures) == WAYS
    assert all(of_way["step_s"] > 0 and of_way["warmup_s"] > 0 for of_way in figures.values())
    assert figures[comms.RELEASES]["cycle_s"] > 0
    assert figures[comms.RELEASES]["differing_steps"] == 0
    assert len(lines) == 1


def test_a_rank_that_fails_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "0_2.error").write_text("Traceback (most recent call last):\nValueError: no such layout\n")
    with pytest.raises(RunError, match="EP3 failed: ValueError: no such layout"):
        comms.run_processes("a_module_that_is_not_there", [], tmp_path, ranks=1, what="EP3", timeout_s=30)


def _figures(warm_mib: float, late_mib: float, *, seconds: float = 1.0, step_s: float = 0.5) -> dict[str, float]:
    return {
        "warm_bytes": warm_mib * MIB,
        "late_bytes": late_mib * MIB,
        "growth_bytes": 0.0,
        "predicted_bytes": 990 * MIB,
        "warmup_s": seconds,
        "step_s": step_s,
        "freed_bytes": 960 * MIB,
        "cycle_s": 2.0,
        "cycles_growth_bytes": 0.0,
        "kernel_bytes": 20 * MIB,
        "differing_steps": 0,
    }


def _rows(**changed: dict[str, float]) -> dict[str, bool]:
    found = {
        "ours": _figures(1000, 0, seconds=2),
        "nothing": _figures(0, 4000, seconds=0),
        "a barrier": _figures(22, 3900),
        "every group": _figures(8000, 500, seconds=6),
        "ours, releasing": _figures(1000, 0),
        **changed,
    }
    return {row.name.partition(": ")[2]: row.met for row in comms.rows("TP1", found)}


def test_what_keeps_every_promise_is_met_in_every_row() -> None:
    rows = _rows()
    assert all(rows.values())
    assert len(rows) == 13


@pytest.mark.parametrize(
    ("ours", "row"),
    [
        (_figures(1000, 3), "NCCL's growth in the first 3 steps"),
        (_figures(2200, 0), "memory after 3 steps, against every group"),
        (_figures(3300, 0), "the same, against nothing"),
        (_figures(1000, 0, seconds=4), "seconds, against every group"),
        (_figures(1000, 0, step_s=0.52), "step, against Megatron's defaults"),
        (_figures(700, 0), "prediction off by"),
    ],
)
def test_a_promise_that_is_not_kept_is_missed_in_its_row(ours: dict[str, float], row: str) -> None:
    assert not _rows(ours=ours)[row]


def _limits() -> list[dict[str, Any]]:
    """Records in which 12 CTAs are as fast as no limit, and bytes are those of the memory model."""
    neighbour = Links(pairs=1, exchanges=1)
    records: list[dict[str, Any]] = [{"size": 1, "max_ctas": 1, "bytes": {"kernels": KERNEL_BYTES}, "seconds": {}}]
    for size in comms_limits.SIZES:
        for limit in comms_limits.LIMITS:
            slower = 1.0 if limit is None or limit >= 12 else 4.0
            seconds = {
                f"{name} {mib} MiB": slower * mib / 1e5
                for name in comms_limits.COLLECTIVES
                for mib in comms_limits.MESSAGES_MIB
            }
            taken = costs(comms_limits.CLASSES, size=size, max_ctas=limit, links=neighbour)
            records.append(
                {
                    "size": size,
                    "max_ctas": limit,
                    "bytes": {"all": sum(taken)},
                    "seconds": {**seconds, comms_limits.SCALAR: 2e-5},
                }
            )
    return records


def test_limits_that_cost_nothing_and_a_model_that_is_right_meet_their_goals() -> None:
    assert all(row.met for row in comms_limits.rows(_limits()))


def test_a_limit_of_the_budget_that_costs_bandwidth_or_a_model_that_is_wrong_is_missed() -> None:
    records = _limits()
    for record in records:
        if record["max_ctas"] == 12:
            record["seconds"]["unbatched_p2p 32 MiB"] *= 2
    records[1]["bytes"]["all"] //= 2
    missed = [row.name for row in comms_limits.rows(records) if not row.met]
    assert missed == ["2 ranks, 12 CTAs: unbatched_p2p of 32 MiB", "memory model, worst group: off by"]


@pytest.mark.parametrize(("gpus", "ranks"), [(2, 2), (3, 2), (4, 4), (8, 4)])
def test_the_layouts_fit_the_gpus(gpus: int, ranks: int) -> None:
    assert {layout.ranks for layout in comms.layouts_for(gpus)} == {ranks}


@pytest.mark.parametrize("bench", [comms, comms_limits])
def test_without_two_gpus_it_says_so(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "count_gpus", lambda: 1)
    with pytest.raises(ResourceError, match="needs 4 GPUs, or 2 for .*; there are 1"):
        bench.measure(print)


@pytest.mark.every_case
def test_ranks_end_in_every_way_that_is_compared(model: Path, tmp_path: Path) -> None:
    times = dict.fromkeys(exits.TIMES, 1)
    overrides = [f"model.path={model}"]
    found = exits.run_ways(tmp_path, comms.SMALL_LAYOUTS[0], overrides, times, recipe=RECIPE)
    assert set(found) == set(times)
    assert all(0 < seconds < 20 for (seconds,) in found.values())


def test_an_end_that_takes_too_long_is_missed_and_so_is_one_slower_than_torch() -> None:
    found = {exits.EVERY: [2.0, 9.0, 2.0], exits.OURS: [1.0], exits.EVERY_TORCH: [5.0]}
    assert [row.met for row in exits.rows("TP2", found)] == [False, False, True, True]
    assert not exits.rows("TP2", found | {exits.EVERY_TORCH: [1.0]})[2].met
