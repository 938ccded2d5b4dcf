"""The page of a plan in a real browser: nothing overlaps, it can be read, and keys choose what a pointer would."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.plan.hazards import find
from rl_safe_workers.plan.picture import choices, write_html, write_svg
from rl_safe_workers.plan.plan import Plan, make_plan
from rl_safe_workers.plan.request import Source, make_request

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), "")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium")
SIZES: dict[str, dict[str, Any]] = {
    "8": {"world": 8, "trainers": 6, "ep": 2, "vllm_tp": 2},
    "64": {"world": 64, "trainers": 32, "tp": 4, "ep": 8, "etp": 1, "vllm_tp": 4},
    "512": {"world": 512, "trainers": 256, "tp": 4, "pp": 2, "ep": 8, "etp": 1, "vllm_tp": 4},
    "64 shared": {"trainers": 64, "colocated": True, "ep": 8},
}
PROBE = """
<pre id="found"></pre><script>
const box = one => one.getBoundingClientRect();
const beside = (a, b) => a.right <= b.left + .5 || b.right <= a.left + .5;
const apart = (a, b) => beside(a, b) || a.bottom <= b.top + .5 || b.bottom <= a.top + .5;
const pairs = boxes => boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => !apart(a, b)));
const inside = (a, b) => a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;
const all = query => [...document.querySelectorAll(query)];
const lit = () => all(".rank.lit").map(cell => Number(cell.dataset.rank));
const press = (one, key) => one.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const found = {
  overlapping: pairs(all(".rank rect").map(box)).length + pairs(all(".node").map(box)).length
    + pairs(all("fieldset label, .kind").map(box)).length,
  labelsOnCells: all(".node").filter(label => all(".rank rect").some(cell => !apart(box(label), box(cell)))).length,
  spilling: all(".rank text").filter(text => !inside(box(text), box(text.parentNode.querySelector("rect")))).length,
  smallest: Math.min(...all(".rank text").map(text => parseFloat(getComputedStyle(text).fontSize))),
  tooWide: document.documentElement.scrollWidth > innerWidth,
};
const pick = index => {
  const one = document.querySelector(`[data-kind="${index}"]`);
  if (one.matches("input")) one.click(); else { one.focus(); press(one, "Enter"); }
};
found.groups = CHOSEN.map(([kind, rank]) => {
  press(document.activeElement.matches(".rank") ? document.activeElement : document.querySelector(".rank"), "Home");
  cells.get(rank).dispatchEvent(new MouseEvent("click"));
  pick(kind);
  return lit();
});
pick(0);
press(cells.get(0), "Home");
press(document.activeElement, "ArrowRight");
press(document.activeElement, "ArrowRight");
press(document.activeElement, "ArrowLeft");
found.focused = Number(document.activeElement.dataset.rank);
found.said = document.getElementById("said").textContent;
found.chosen = all(".rank.chosen").length;
document.getElementById("found").textContent = JSON.stringify(found);
</script>
"""


def plan_of(facts: dict[str, Any]) -> Plan:
    return make_plan(make_request(Source(name="test", values=facts)))


def questions(plan: Plan) -> list[tuple[int, int, list[int]]]:
    """Kinds of group and ranks, with the members that should light up."""
    asked = []
    for index, choice in enumerate(choices(plan)):
        communicator = plan.communicator(choice["name"])
        assert communicator is not None
        rank = list(communicator.family.firsts())[-1] + communicator.family.offsets[-1]
        asked.append((index, rank, list(communicator.family.ranks_with(rank) or ())))
    return asked


def browse(page: Path, probe: str, tmp_path: Path) -> dict[str, Any]:
    page.write_text(page.read_text().replace("</body>", f"{probe}</body>", 1))
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1600,1200",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answer = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert answer is not None, done.stderr
    found: dict[str, Any] = json.loads(html.unescape(answer.group(1)))
    return found


@pytest.mark.parametrize("facts", SIZES.values(), ids=SIZES)
def test_a_page_is_legible_without_overlap_and_lights_up_the_members(facts: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_of(facts)
    asked = questions(plan)
    write_html(plan, find(plan), tmp_path / "plan.html")
    probe = PROBE.replace("CHOSEN", json.dumps([[kind, rank] for kind, rank, _ in asked]))
    found = browse(tmp_path / "plan.html", probe, tmp_path)
    assert found["groups"] == [members for *_, members in asked]
    assert (found["overlapping"], found["labelsOnCells"], found["spilling"], found["tooWide"]) == (0, 0, 0, False)
    assert found["smallest"] >= 8
    assert (found["focused"], found["chosen"]) == (1, 1)
    assert found["said"].startswith(f"{choices(plan)[0]['name']} of rank 1: ")


@pytest.mark.parametrize("facts", SIZES.values(), ids=SIZES)
def test_a_picture_alone_does_the_same(facts: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_of(facts)
    asked = questions(plan)
    write_svg(plan, tmp_path / "plan.svg")
    drawing = (tmp_path / "plan.svg").read_text()
    (tmp_path / "plan.html").write_text(f"<!doctype html><body style='margin:0'>{drawing}</body>")
    probe = PROBE.replace("CHOSEN", json.dumps([[kind, rank] for kind, rank, _ in asked]))
    found = browse(tmp_path / "plan.html", probe, tmp_path)
    assert found["groups"] == [members for *_, members in asked]
    assert (found["overlapping"], found["labelsOnCells"], found["spilling"], found["tooWide"]) == (0, 0, 0, False)
    assert found["smallest"] >= 8
    assert (found["focused"], found["chosen"]) == (1, 1)
