"""Benchmarks: goals, rows, the table and the exit code."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from benchmarks import host_jobs, quickstart
from benchmarks.table import Goal, Relation, Row, exit_code, machine_in_words, print_table, write_json
from rl_safe_workers.cli.main import main
from rl_safe_workers.driver.outputs import metrics as names

AT_MOST_75 = Goal(relation=Relation.AT_MOST, bound=75)
ROW = Row(name="wall", unit="s", ours=60.0, goal=AT_MOST_75, runs=3, machine="2 cores", versions={"torch": "2.13.0"})
SLOW = replace(ROW, ours=76.0)


@pytest.mark.parametrize(
    ("relation", "value", "met"),
    [
        (Relation.AT_MOST, 75.0, True),
        (Relation.AT_MOST, 75.1, False),
        (Relation.AT_LEAST, 75.0, True),
        (Relation.AT_LEAST, 74.9, False),
        (Relation.AT_MOST, float("nan"), False),
        (Relation.AT_LEAST, float("nan"), False),
    ],
)
def test_a_goal_is_a_bound_from_one_side(relation: Relation, value: float, met: bool) -> None:
    assert Goal(relation=relation, bound=75).is_met_by(value) is met


def test_a_row_without_a_peer_is_judged_by_our_figure() -> None:
    assert (ROW.ratio, ROW.met, SLOW.met) == (None, True, False)


def test_a_row_with_a_peer_is_judged_by_the_ratio() -> None:
    half = Goal(relation=Relation.AT_MOST, bound=0.5)
    assert (replace(ROW, peer=120.0, goal=half).ratio, replace(ROW, peer=120.0, goal=half).met) == (0.5, True)
    assert not replace(ROW, peer=119.0, goal=half).met


def test_the_exit_code_is_3_as_soon_as_one_goal_is_missed() -> None:
    assert exit_code([ROW, ROW]) == 0
    assert exit_code([ROW, SLOW]) == 3


def test_json_has_every_field_of_a_row(tmp_path: Path) -> None:
    write_json([ROW], tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == [
        {
            "name": "wall",
            "unit": "s",
            "ours": 60.0,
            "peer": None,
            "ratio": None,
            "goal": "<= 75",
            "met": True,
            "runs": 3,
            "machine": "2 cores",
            "versions": {"torch": "2.13.0"},
        }
    ]


def test_the_table_shows_figures_and_names_the_machine_once() -> None:
    console = Console(file=io.StringIO(), width=120)
    print_table([ROW, replace(SLOW, peer=152.0)], console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.replace("│", " ").split() for line in shown.splitlines() if "wall" in line]
    assert lines == [
        ["wall", "s", "60", "-", "-", "<=", "75", "yes", "3"],
        ["wall", "s", "76", "152", "0.5", "<=", "75", "yes", "3"],
    ]
    assert shown.count("2 cores; torch 2.13.0") == 1


def test_the_machine_is_told_in_cores_memory_system_and_python() -> None:
    cores, memory, *_, python = machine_in_words().split(", ")
    assert cores.endswith(("core", "cores"))
    assert memory.endswith(" GiB")
    assert python == f"Python {sys.version.split()[0]}"


def record(reward: float, gap: float) -> dict[str, float]:
    return {names.REWARD_MEAN: reward, names.LOGPROB_GAP_MAX: gap}


def test_figures_of_a_run_are_its_gain_and_its_worst_gap() -> None:
    records = [record(0.2, 1e-7), *[record(9.0, 3e-7)] * 4, *[record(0.5, 2e-7)] * 5]
    figures = quickstart.to_figures(1, records, wall_s=40.0, peak_bytes=3 * 2**30)
    assert figures == quickstart.Figures(seed=1, learning=2.5, gap=3e-7, wall_s=40.0, peak_gib=3.0)


def test_the_quickstart_is_judged_by_each_seed_and_by_the_worst_run() -> None:
    good = quickstart.Figures(seed=0, learning=2.5, gap=1e-6, wall_s=50.0, peak_gib=3.0)
    rows = quickstart.to_rows([good, replace(good, seed=1, learning=1.9, wall_s=80.0)], machine="m", versions={})
    assert [(row.ours, row.met, row.runs) for row in rows] == [
        (2.5, True, 1),
        (1.9, False, 1),
        (1e-6, True, 2),
        (80.0, False, 2),
        (3.0, True, 2),
    ]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Row]], None]:
    """Puts rows in the place of what the quickstart benchmark would measure."""

    def _install(rows: list[Row]) -> None:
        module = ModuleType("benchmarks.quickstart")
        module.measure = lambda report: report("seed 0") or rows  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return _install


@pytest.mark.parametrize(("rows", "code"), [([ROW], 0), ([ROW, SLOW], 3)])
def test_the_command_prints_writes_and_tells_whether_goals_are_met(
    measured: Callable[[list[Row]], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[Row],
    code: int,
) -> None:
    measured(rows)
    assert main(["bench", "quickstart", "--json", str(tmp_path / "rows.json")]) == code
    out, err = capsys.readouterr()
    assert out.count("wall") == len(rows)
    assert err == "seed 0\n"
    assert len(json.loads((tmp_path / "rows.json").read_text())) == len(rows)


def test_a_json_file_in_no_folder_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "quickstart", "--json", str(tmp_path / "no" / "rows.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "nope"], ["bench", "quickstart", "trainer.seed=1"]])
def test_arguments_that_are_not_understood_are_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set())])
def test_a_list_of_cpus_is_read(text: str, cpus: set[int]) -> None:
    assert host_jobs.cpus_in(text) == cpus


@pytest.mark.parametrize(
    ("node", "nodes", "chosen"),
    [
        (1, {0: "0-1", 1: "2"}, {2}),
        (-1, {0: "0", 1: "1-99"}, {1, 2}),
        (-1, {}, {0, 1, 2}),
        (7, {7: "64-99"}, {0, 1, 2}),
    ],
    ids=["of the GPU", "the largest", "no nodes", "no CPU of it may be used"],
)
def test_jobs_to_compare_run_on_one_numa_node(
    node: int, nodes: dict[int, str], chosen: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, cpus in nodes.items():
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus)
    set_now = [{0, 1, 2}]
    monkeypatch.setattr(host_jobs, "_NODES", tmp_path)
    monkeypatch.setattr(host_jobs, "_node_of_first_gpu", lambda: node)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set_now[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: set_now.append(set(cpus)))
    with host_jobs.on_one_numa_node() as count:
        assert (set_now[-1], count) == (chosen, len(chosen))
    assert set_now[-1] == {0, 1, 2}
