from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rl_safe_workers.driver.outputs.run_report import phase_rows, write_report
from rl_safe_workers.lifecycle import Phase, PhaseEvent
from rl_safe_workers.ranks import Role

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and collects the text and what the page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source, self.open = text, list[str]()
        self.text, self.references, self.tags = "", list[str](), list[str]()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in {"src", "href", "xlink:href", "data", "action"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def table(self, heading):
        """The texts of the cells of the table under a heading, row by row; None if there is no such heading."""
        section = re.search(rf"<h2>{heading}</h2>.*?</section>", self.source, re.DOTALL)
        if section is None:
            return None
        return [
            [re.sub(r"<.*?>", "", cell).strip() for cell in re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
            for row in re.findall(r"<tr>(.*?)</tr>", section[0], re.DOTALL)
        ]


def event(phase=Phase.TRAIN, *, role=Role.TRAINER, rank=0, start_s=0.0, seconds=1.0, ok=True, gib=None):
    start_s += 1_763_000_000.0
    held = {owner: round(size * 2**30) for owner, size in (gib or {}).items()}
    return PhaseEvent(
        phase=phase, role=role, rank=rank, start_s=start_s, end_s=start_s + seconds, ok=ok, device_bytes=held
    )


def step(number, reward=0.5, gap=2e-6, **others):
    return {"step": number, "reward/mean": reward, "rollout/logprob_gap_max": gap, **others}


@pytest.fixture
def page(tmp_path):
    def make(metrics=(), events=(), title="run", config_yaml="a: 1", summary=None):
        path = tmp_path / "made" / "report.html"
        write_report(
            path,
            title=title,
            config_yaml=config_yaml,
            metrics=metrics,
            events=events,
            summary=summary or {},
            logprob_bound=1e-5,
        )
        return Page(path.read_text(encoding="utf-8"))

    return make


STEPS, PHASES, MEMORY = "Numbers of each step", "Seconds per phase", "Device memory"


@pytest.mark.parametrize("steps", [0, 1, 2, 300])
def test_a_run_of_any_length_is_well_formed(page, steps) -> None:
    made = page(metrics=[step(n) for n in range(1, steps + 1)], events=[event()])
    assert ("No training step was completed." in made.text) is (steps == 0)
    assert len(made.table(STEPS)) == (steps + 1 if steps else 0)


def test_a_run_without_anything_is_well_formed(page) -> None:
    assert "No phase was recorded." in page().text


def test_the_page_refers_to_nothing_outside_and_runs_nothing(page) -> None:
    made = page(metrics=[step(1)], events=[event()])
    assert set(made.references) == {"data:,"}
    assert not {"script", "iframe", "object"} & set(made.tags)
    assert not re.search(r"[a-z]://(?!tracing)|@import|url\(", made.source)


def test_every_phase_has_a_row_with_its_ranks_and_seconds(page) -> None:
    events = [event(phase, rank=rank, start_s=5.0 * index) for index, phase in enumerate(Phase) for rank in range(3)]
    _, *rows = page(events=events).table(PHASES)
    assert [row[0] for row in rows] == [str(phase) for phase in Phase]
    assert {tuple(row[1:3]) for row in rows} == {("trainer 0-2", "1.00")}


def test_a_failed_phase_is_marked_and_stated_with_its_ranks(page) -> None:
    events = [event(Phase.BOOTSTRAP, rank=r, seconds=12.0, ok=r not in (1, 2)) for r in range(4)]
    made = page(events=events)
    assert "bootstrap failed on training rank 1-2 after 12.00 s" in made.text
    headings, row = made.table(PHASES)
    assert row[headings.index("failed")] == "2"
    assert '<td class="number bad">2</td>' in made.source


def test_a_run_without_failures_does_not_say_failed(page) -> None:
    made = page(events=[event()])
    assert "This run failed" not in made.text
    assert "number bad" not in made.source


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_marked_and_said(page, value) -> None:
    made = page(metrics=[step(1), step(2, reward=value), step(3)])
    assert [row[1] for row in made.table(STEPS)] == ["mean reward", "0.5", "not finite", "0.5"]
    assert "The mean reward is not a finite number at step 2." in made.text
    assert not re.search(r"\b(nan|inf)\b", made.source, re.IGNORECASE)


def test_all_values_not_finite_still_make_a_page(page) -> None:
    made = page(metrics=[step(n, reward=None, gap=None) for n in (1, 2)])
    assert "The max logprob gap is not a finite number at 2 steps (1-2)." in made.text
    assert "bound" not in made.text


def test_text_from_outside_is_escaped(page) -> None:
    evil = "</td></script><script>alert(1)</script>&'\""
    made = page(title=evil, config_yaml=evil, summary={evil: evil}, events=[event()], metrics=[step(1)])
    assert "script" not in made.tags
    assert made.text.count(evil) == 4 + 1  # title twice, config, summary label and text


def test_the_bound_and_the_steps_above_it_are_said(page) -> None:
    good = page(metrics=[step(1), step(2, gap=4e-6)])
    assert "The log-probability gap stays within its bound." in good.text
    assert "The largest gap is 4e-06 nats, at step 2; the bound is 1e-05 nats." in good.text
    assert "number bad" not in good.source
    bad = page(metrics=[step(1, gap=2e-6), step(2, gap=4e-5), step(3, gap=2e-5)])
    assert "The log-probability gap is above its bound at 2 steps (2-3)." in bad.text
    assert re.findall(r'class="number bad">([^<]*)<', bad.source) == ["4e-05", "2e-05"]


def test_the_seconds_of_a_phase_are_those_of_its_slowest_rank() -> None:
    events = [event(rank=0, seconds=1.0), event(rank=0, start_s=2.0, seconds=1.0), event(rank=1, seconds=3.0)]
    (row,) = phase_rows(events)
    assert (row.stays, row.total_s, row.longest_s, row.longest_rank, row.ranks) == (2, 3.0, 3.0, 1, "0-1")
    assert row.mean_s == pytest.approx(5 / 3)
    assert row.share == pytest.approx(1.0)


def test_steps_are_shown_in_order_whatever_the_order_of_the_log(page) -> None:
    assert [row[0] for row in page(metrics=[step(2), step(1)]).table(STEPS)] == ["step", "1", "2"]


def test_a_run_without_device_memory_does_not_speak_of_it(page) -> None:
    assert page(events=[event()]).table(MEMORY) is None
    assert page(events=[event(gib={"weights": 1})]).table(MEMORY) is not None


def test_device_memory_has_a_row_for_each_role_and_phase_and_a_column_for_each_owner(page) -> None:
    events = [
        event(Phase.ROLLOUT, role=Role.ROLLOUT, start_s=1, gib={"weights": 2, "kv_cache": 20, "thing": 0.5}),
        event(Phase.TRAIN, start_s=3, gib={"other": 0.25, "weights": 1, "optimizer": 3.007}),
        event(Phase.OFFLOAD, start_s=2, gib={"other": 0.25, "weights": 0, "optimizer": 0}),
        event(Phase.TRAIN, start_s=0),
    ]
    assert page(events=events).table(MEMORY) == [
        ["phase", "rank", "weights", "optimizer", "KV cache", "other", "thing", "total"],
        ["offload", "trainer 0", "0.00", "0.00", "", "0.25", "", "0.25"],
        ["train", "trainer 0", "1.00", "3.01", "", "0.25", "", "4.26"],
        ["rollout", "rollout 0", "2.00", "", "20.00", "", "0.50", "22.50"],
    ]


def test_device_memory_is_that_of_the_fullest_rank_after_its_last_stay(page) -> None:
    events = [
        event(rank=1, start_s=5, gib={"weights": 3, "other": 1}),
        event(rank=0, start_s=0, gib={"weights": 9, "other": 9}),
        event(rank=0, start_s=4, gib={"weights": 2, "other": 1.5}),
        event(rank=2, start_s=4, gib={"weights": 3.5, "other": 0}),
    ]
    assert page(events=events).table(MEMORY)[1:] == [["train", "trainer 1", "3.00", "1.00", "4.00"]]


def test_only_one_file_is_written(page, tmp_path) -> None:
    page(metrics=[step(1)], events=[event()])
    assert [p.name for p in Path(tmp_path).rglob("*") if p.is_file()] == ["report.html"]
