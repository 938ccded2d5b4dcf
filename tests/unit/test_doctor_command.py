"""``rl-safe doctor``: what it prints, what it exits with, what bad input costs, and what a live bootstrap becomes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.cli.main import main
from rl_safe_workers.comms.report import BootstrapReport, LedgerEntry
from rl_safe_workers.doctor import examine
from rl_safe_workers.doctor.check import Check, Fact, Report, Subject
from rl_safe_workers.doctor.live import CODE, Live, facts, failed, try_live
from rl_safe_workers.doctor.ray_cluster import RAY_CLUSTER
from rl_safe_workers.doctor.ray_here import RAY_HERE
from rl_safe_workers.driver import live_bootstrap
from rl_safe_workers.driver.outputs.console import RunConsole
from rl_safe_workers.errors import Awaited, ClusterError, Interrupted, PhaseTimeoutError, Raised, RankError
from rl_safe_workers.findings import Finding, Severity
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "quickstart.yaml")
HEAVY = ("mbridge", "megatron", "numpy", "pyarrow", "ray", "torch", "transformers", "vllm")


def finding(code: str, severity: Severity) -> Finding:
    return Finding(
        code=code, severity=severity, text="what happens [1]", since="always", evidence=("nccl 1",), avoid="it"
    )


def check(*severities: Severity) -> Check[None]:
    found = tuple(finding(f"found-{severity}", severity) for severity in severities)
    report = Report(facts=(Fact(name="looked", value="[bold] at all"),), findings=found)
    return Check(name="looked", deadline_s=5, gather=lambda subject: None, judge=lambda facts, subject: report)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    def replace(*severities: Severity) -> None:
        monkeypatch.setattr(examine, "checks_for", lambda subject: [check(*severities)])

    return replace


@pytest.mark.parametrize(
    ("severities", "code"),
    [((), 0), ((Severity.COSTS, Severity.RISKS), 0), ((Severity.COSTS, Severity.STOPS), 1)],
)
def test_the_exit_code_says_whether_something_stops_the_run(
    only: Any, capsys: pytest.CaptureFixture[str], severities: tuple[Severity, ...], code: int
) -> None:
    only(*severities)
    assert main(["doctor", "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert said["stops"] == bool(code)
    assert [item["code"] for item in said["findings"]] == [f"found-{severity}" for severity in reversed(severities)]
    assert said["facts"] == [{"name": "looked", "value": "[bold] at all"}]


def test_text_has_facts_first_and_findings_in_the_form_of_a_plans(only: Any, capsys: Any) -> None:
    only(Severity.STOPS)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    parts = [
        "looked",
        "[bold] at all",
        "stops found-stops",
        "  what happens [1].",
        "  Since: always. Evidence: nccl 1.",
        "  Avoid: it.",
        "1 hazard: 1 stop the run",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([RECIPE, "cluster.num_trainer=2"], "num_trainer"),
        (["no/such.yaml"], "no/such.yaml cannot be read"),
        ([RECIPE, "megatron.expert_model_parallel_size=3"], "expert_model_parallel_size"),
        (["--live"], "--live takes a recipe"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["doctor", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("rl-safe: error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert captured.out == ""


def test_help_is_there_without_importing_anything_heavy() -> None:
    code = (
        "import sys\nfrom rl_safe_workers.cli.main import main\ntry:\n    main(['doctor', '--help'])\nfinally:\n"
        f"    print(sorted(set({HEAVY!r}) & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.strip() == "[]"
    assert "--checkpoint-path" in done.stdout


def test_the_doctor_itself_imports_nothing_heavy() -> None:
    code = (
        "import sys, rl_safe_workers.doctor.examine, rl_safe_workers.doctor.output; "
        f"print(*set({HEAVY!r}) & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def of(*overrides: str) -> Subject:
    return Subject(recipe=RECIPE, overrides=overrides, config=load_recipe(RECIPE, overrides))


def test_who_joins_a_cluster_has_it_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert [*examine.checks_for(of())][-1] is RAY_HERE
    assert [*examine.checks_for(of("cluster.ray_address=auto"))][-1] is RAY_CLUSTER
    assert [*examine.checks_for(Subject())][-1] is RAY_HERE
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert [*examine.checks_for(Subject())][-1] is RAY_CLUSTER
    assert [*examine.checks_for(of())][-1] is RAY_CLUSTER
    assert of().ray == "10.0.0.1:6379"
    assert [*examine.checks_for(of("cluster.ray_address=local"))][-1] is RAY_HERE


def test_a_live_bootstrap_is_not_tried_where_something_stops_it(only: Any) -> None:
    def live(subject: Subject) -> Live:
        raise AssertionError("it was tried")

    only(Severity.RISKS, Severity.STOPS)
    diagnosis = examine.examine(of(), live)
    assert diagnosis.facts[-1] == Fact(name="live bootstrap", value="not checked: found-stops would stop it")


def ledger(seconds: float, size: int | None) -> BootstrapReport:
    entry = LedgerEntry(
        group="EXPERT_DATA_PARALLEL_GROUP",
        ranks=(0, 2),
        op_class="reduce",
        seconds=seconds,
        bytes=size,
        predicted_bytes=2**20,
    )  # type: ignore[arg-type]
    return BootstrapReport(entries=(entry,), skipped=0, unknown=(), seconds=seconds)


def test_a_live_bootstrap_that_is_tried_ends_the_report(only: Any, capsys: Any, monkeypatch: Any) -> None:
    only(Severity.RISKS)
    done = live_bootstrap.LiveBootstrap(ledgers=(ledger(0.1, None), ledger(0.3, None)), seconds={"bootstrap": 0.31})
    monkeypatch.setattr(live_bootstrap, "bootstrap_live", lambda config, console: done)
    monkeypatch.chdir(ROOT)
    assert main(["doctor", RECIPE, "--live"]) == 0
    text = capsys.readouterr().out
    assert "2 ranks, 1 groups each, rank 1 last in 0.300 s" in text
    assert "EXPERT_DATA_PARALLEL_GROUP │ 0,2" in text
    assert "bootstrap 0.31 s" in text
    assert main(["doctor", RECIPE, "--live", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [rank["seconds"] for rank in said["live"]] == [0.1, 0.3]


def test_the_rank_that_takes_most_memory_is_named() -> None:
    found = facts([ledger(0.1, 2**20), ledger(0.2, 3 * 2**20)], {})
    assert found[-1] == Fact(name="memory", value="rank 1 3 MiB, 1 predicted")


LATE = PhaseTimeoutError(
    phase="bootstrap",
    awaited=Awaited("training world", frozenset(trainer_ids(range(3)))),
    missing=trainer_ids([1, 2]),
    waited_s=3.0,
    setting="rl_safe.timeouts.bootstrap",
)
RAISED = RankError(
    rank_id=trainer_id(3), phase="groups", cause=Raised(), text="OSError: x", trace="Traceback", raised_at=1.0
)


@pytest.mark.parametrize(
    ("error", "groups", "ranks", "said"),
    [
        (LATE, ("training world",), "1-2", "rank 1-2 of training world did not arrive within 3.0 s"),
        (RAISED, ("the trainers",), "3", "training rank 3 failed in phase groups: OSError: x"),
        (ClusterError("Ray is gone", culprit=trainer_id(1)), (), "1", "Ray is gone"),
        (MemoryError("all of it"), (), "", "MemoryError: all of it"),
    ],
)
def test_a_live_bootstrap_that_fails_names_who_did_not_answer(
    monkeypatch: pytest.MonkeyPatch, error: Exception, groups: tuple[str, ...], ranks: str, said: str
) -> None:
    def fail(config: Any, console: Any) -> None:
        raise error

    monkeypatch.setattr(live_bootstrap, "bootstrap_live", fail)
    (found,) = try_live(of(), RunConsole()).report.findings
    assert found == failed(error)
    assert (found.code, found.severity, found.groups, found.ranks) == (CODE, Severity.STOPS, groups, ranks)
    assert said in found.text


def test_a_live_bootstrap_that_is_interrupted_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(config: Any, console: Any) -> None:
        raise Interrupted(signum=2)

    monkeypatch.setattr(live_bootstrap, "bootstrap_live", interrupt)
    with pytest.raises(Interrupted):
        try_live(of(), RunConsole())


@pytest.mark.parametrize("fails", [False, True])
def test_a_live_bootstrap_has_trainers_only_and_always_closes_its_cluster(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    events: list[str] = []

    class Cluster:
        def __init__(self, config: Any, **others: Any) -> None:
            events.append(f"{config.cluster.num_trainers} trainers, {config.cluster.num_rollouts} rollouts")

        def close(self, *, kill_after_s: float) -> None:
            events.append(f"close {kill_after_s:g}")

    class Session:
        def __init__(self, *others: Any) -> None:
            self.ledgers, self.totals = [ledger(0.1, None)], {}

        def connect(self) -> None:
            events.append("connect")
            if fails:
                raise LATE

        def teardown(self) -> dict[int, str]:
            events.append("teardown")
            return {}

    monkeypatch.setattr(live_bootstrap, "Cluster", Cluster)
    monkeypatch.setattr(live_bootstrap, "Session", Session)
    config = load_recipe(RECIPE)
    if fails:
        with pytest.raises(PhaseTimeoutError):
            live_bootstrap.bootstrap_live(config, RunConsole())
    else:
        assert len(live_bootstrap.bootstrap_live(config, RunConsole()).ledgers) == 1
    assert events == ["4 trainers, 0 rollouts", "connect", *([] if fails else ["teardown"]), "close 10"]
    assert config.cluster.num_rollouts == 1


def test_what_ray_prints_meanwhile_is_not_among_the_json(only: Any, capsys: Any, monkeypatch: Any) -> None:
    def chatter(config: Any, console: RunConsole) -> live_bootstrap.LiveBootstrap:
        sys.stdout.write("(raylet) A worker died\n")
        console.console.print("phase")
        return live_bootstrap.LiveBootstrap(ledgers=(ledger(0.1, None),), seconds={})

    only()
    monkeypatch.setattr(live_bootstrap, "bootstrap_live", chatter)
    monkeypatch.chdir(ROOT)
    assert main(["doctor", RECIPE, "--live", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["stops"] is False
    assert "(raylet) A worker died" in captured.err
