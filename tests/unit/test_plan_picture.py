"""The picture: every process once, nothing over anything else, numbers that fit, a script that knows the members."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.errors import ConfigError
from rl_safe_workers.plan.hazards import find
from rl_safe_workers.plan.picture import Cell, choices, lay_out, write_html, write_svg
from rl_safe_workers.plan.plan import Plan, make_plan
from rl_safe_workers.plan.request import Source, make_request

SVG = "{http://www.w3.org/2000/svg}"
DIGIT_WIDTH, LEAST_FONT = 0.65, 8.0


def plan_of(**values: Any) -> Plan:
    return make_plan(make_request(Source(name="test", values=values)))


SMALL = {"world": 8, "trainers": 6, "ep": 2, "vllm_tp": 2}
MIDDLE = {"world": 64, "trainers": 32, "tp": 4, "ep": 8, "etp": 1, "vllm_tp": 4}
LARGE = {"world": 512, "trainers": 256, "tp": 4, "pp": 2, "ep": 8, "etp": 1, "vllm_tp": 4}
SHARED = {"trainers": 256, "colocated": True, "ep": 8}
PLANS = pytest.mark.parametrize("facts", [SMALL, MIDDLE, LARGE, SHARED], ids=["8", "64", "512", "256 shared"])


def overlaps(one: Cell, other: Cell) -> bool:
    return (
        one.x < other.x + other.width
        and other.x < one.x + one.width
        and one.y < other.y + other.height
        and other.y < one.y + one.height
    )


@PLANS
def test_every_process_has_a_cell_inside_the_picture_and_no_two_overlap(facts: dict[str, Any]) -> None:
    plan = plan_of(**facts)
    grid = lay_out(plan)
    assert [cell.rank for cell in grid.cells] == list(range(plan.request.trainers + plan.request.rollouts))
    assert all(cell.x >= 0 and cell.x + cell.width <= grid.width for cell in grid.cells)
    assert all(cell.y >= 0 and cell.y + cell.height <= grid.height for cell in grid.cells)
    assert not any(overlaps(one, other) for one in grid.cells for other in grid.cells if one.rank < other.rank)


@PLANS
def test_numbers_fit_into_their_cells_and_can_be_read(facts: dict[str, Any]) -> None:
    grid = lay_out(plan_of(**facts))
    assert grid.font >= LEAST_FONT
    assert all(len(str(cell.rank)) * DIGIT_WIDTH * grid.font <= cell.width for cell in grid.cells)
    assert all(grid.font <= cell.height for cell in grid.cells)


@PLANS
def test_nodes_are_named_above_their_cells(facts: dict[str, Any]) -> None:
    grid = lay_out(plan_of(**facts))
    for block in grid.blocks:
        assert block.y < min(cell.y for cell in grid.cells if cell.node == block.node)
        assert block.x <= min(cell.x for cell in grid.cells if cell.node == block.node)


def test_a_gpu_of_both_shows_both() -> None:
    cells = lay_out(plan_of(trainers=8, colocated=True)).cells
    trainer, rollout = cells[3], cells[11]
    assert (trainer.x, trainer.node) == (rollout.x, rollout.node)
    assert trainer.y + trainer.height == rollout.y


@PLANS
def test_the_svg_is_well_formed_and_asks_nobody(facts: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_of(**facts)
    write_svg(plan, tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert re.findall(r"https?://[^\"\s]+", text) == ["http://www.w3.org/2000/svg"]
    root = ElementTree.fromstring(text)
    ranks = [group for group in root.iter(f"{SVG}g") if "data-rank" in group.attrib]
    assert len(ranks) == plan.request.trainers + plan.request.rollouts
    kinds = [entry for entry in root.iter(f"{SVG}text") if "data-kind" in entry.attrib]
    assert len(kinds) == len(plan.communicators)
    assert all(float(b.attrib["y"]) - float(a.attrib["y"]) > float(a.attrib["font-size"]) for a, b in pairwise(kinds))
    assert float(kinds[-1].attrib["y"]) < float(root.attrib["height"])


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@PLANS
def test_the_page_has_picture_and_choices_and_the_same_tables_as_text(facts: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_of(**facts)
    findings = find(plan)
    write_html(plan, findings, tmp_path / "plan.html")
    page = _Page()
    page.feed((tmp_path / "plan.html").read_text())
    radios = [attrs for tag, attrs in page.found if tag == "input"]
    assert [radio["data-kind"] for radio in radios] == [str(i) for i in range(len(plan.communicators))]
    assert sum(tag == "g" and "data-rank" in attrs for tag, attrs in page.found) == len(lay_out(plan).cells)
    assert not [attrs for tag, attrs in page.found if {"src", "srcset"} & attrs.keys()]
    assert [attrs["href"] for tag, attrs in page.found if tag == "link"] == ["data:,"]
    text = " ".join(page.text)
    for communicator in plan.communicators:
        assert text.count(communicator.family.description) >= 2
    for finding in findings:
        assert finding.code in text
        assert finding.avoid in text


def test_one_rank_can_be_reached_by_key_and_the_others_from_it(tmp_path: Path) -> None:
    write_html(plan_of(**SMALL), [], tmp_path / "plan.html")
    page = _Page()
    page.feed((tmp_path / "plan.html").read_text())
    stops = [attrs["tabindex"] for tag, attrs in page.found if tag == "g" and "data-rank" in attrs]
    assert stops == ["0", *["-1"] * 7]


def test_the_script_is_given_the_axes_of_every_kind_used_ones_first() -> None:
    plan = plan_of(**LARGE)
    given = choices(plan)
    assert [choice["spare"] for choice in given] == sorted(choice["spare"] for choice in given)
    assert {choice["name"] for choice in given} == {c.family.description for c in plan.communicators}
    for choice in given:
        communicator = plan.communicator(choice["name"])
        assert communicator is not None
        assert choice["members"] == [[axis.size, axis.stride] for axis in communicator.family.members]
        assert choice["groups"] == [[axis.size, axis.stride] for axis in communicator.family.groups]


def test_names_are_escaped(tmp_path: Path) -> None:
    request = make_request(Source(name="<b>", values={"trainers": 2}))
    write_html(make_plan(request), find(make_plan(request)), tmp_path / "plan.html")
    assert "<b>" not in (tmp_path / "plan.html").read_text()


def test_a_picture_that_nobody_could_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 16384; use --json"):
        lay_out(plan_of(trainers=20000))
