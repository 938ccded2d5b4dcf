"""Every hostile input ends with one line of ours in bounded time and memory, and touches nothing of others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.hostile import table
from tests.hostile.case import Case, Command, Site
from tests.hostile.checkpoints import remove_template
from tests.hostile.client import Warm
from tests.hostile.conftest import RESULT
from tests.hostile.corpus import QUICK, all_cases, quick_cases
from tests.hostile.good import GOOD
from tests.hostile.judge import extra_bytes, is_refused, refusal, verdict
from tests.hostile.snapshot import changes, snapshot
from tests.hostile.warm import Outcome

KINDS = {"checkpoint", "folder", "recipe", "setting", "override", "prompts", "model"}
LEAST = 1000
"""Inputs that the corpus has at least."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        chosen = all_cases() if metafunc.config.getoption("--hostile", default=False) else quick_cases()
        metafunc.parametrize("case", chosen.values(), ids=list(chosen))


class Bench:
    """Runs commands, and remembers how each ends on a good input."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        self.warm = warm
        self._folder = folder
        self.good = cache(self._run_good)

    def _run_good(self, entry: str) -> Outcome:
        site = Site(self._folder / entry)
        site.make()
        command = GOOD[entry](site)
        outcome = self.warm.run(command, site)
        assert outcome.code == 0, f"{command} fails on a good input: {outcome}"
        return outcome


@pytest.fixture(scope="session")
def bench(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(warm, tmp_path_factory.mktemp("good"))
    remove_template()


def test_no_command_is_harmed_by(case: Case, bench: Bench, folder: Path, record_property: object) -> None:
    site = Site(folder)
    site.make()
    case.make(site)
    before, failures = _seen(site), []
    for command in case.commands:
        outcome = bench.warm.run(command, site)
        found = verdict(case, command, outcome, good=bench.good(command.entry))
        after = _seen(site)
        found += [f"files of others: {text}" for text in changes(before, after, ours=case.ours, theirs=case.theirs)[:8]]
        before = after
        _record(record_property, case, command, outcome, found, bench)
        failures += [f"{command}: {text}" for text in found]
    assert not failures, "\n".join([case.name, *failures])


def _seen(site: Site) -> dict[str, str]:
    return {path: what for path, what in snapshot(site.root).items() if not path.startswith("temp/")}


def _record(
    record_property: object, case: Case, command: Command, outcome: Outcome, found: list[str], bench: Bench
) -> None:
    refused = refusal(outcome) if is_refused(outcome) and outcome.died is None else None
    extra = extra_bytes(outcome, bench.good(command.entry))
    fields = table.result(
        case.name, str(command), refusal=refused, seconds=outcome.seconds, extra_bytes=extra, failures=found
    )
    record_property(RESULT, fields)  # type: ignore[operator]


def test_the_corpus_holds_a_thousand_inputs_of_every_kind() -> None:
    cases, quick = all_cases(), quick_cases()
    assert len(cases) >= LEAST
    assert {case.kind for case in cases.values()} == KINDS == {case.kind for case in quick.values()}
    assert len(quick) == QUICK
    assert list(quick) == list(quick_cases())
