"""A rollout engine is lost: it is replaced, and the run goes on to the rewards that it would have had."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from rl_safe_workers.env import actor_of
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role
from tests.chaos.cases import CONFIG
from tests.chaos.counting_command import COUNTS
from tests.chaos.plan import Fault, Kind, Point
from tests.chaos.test_matrix import REWARD, Record, assert_completed, run_with
from tests.integration.runs import RECIPES, SHARED_MEMORY, SMALL, Outcome, Running, rl_safe, running

LAST_ENGINE = 1
DEADLINE_S, START_S = 8.0, 150.0
"""Timeouts of the phases in which a test waits for an engine that does not answer; a start takes a minute on a
busy machine."""
STOPPED_S = 2.0


class When(NamedTuple):
    """A place in a run at which an engine is lost.

    Example: ``When(Phase.ROLLOUT, Point.INSIDE)``
    """

    phase: Phase
    point: Point
    occurrence: int = 1


IN_ROLLOUT = When(Phase.ROLLOUT, Point.INSIDE)
BETWEEN = When(Phase.OFFLOAD, Point.BOUNDARY)
BETWEEN_WEDGED = When(Phase.ROLLOUT, Point.BOUNDARY)
"""An engine that waits to be called can be killed and stopped. It can be wedged only once it is called."""
IN_FIRST_SYNC = When(Phase.SYNC, Point.INSIDE)
"""Through vLLM's loaders, which leave layers half-loaded; later ones go straight into the model."""
IN_SYNC = When(Phase.SYNC, Point.INSIDE, occurrence=2)
AT_START = When(Phase.START, Point.BOUNDARY)

CASES = [
    (Kind.KILL, IN_ROLLOUT),
    (Kind.KILL, BETWEEN),
    (Kind.KILL, IN_FIRST_SYNC),
    (Kind.KILL, IN_SYNC),
    (Kind.KILL, AT_START),
    (Kind.STOP, IN_ROLLOUT),
    (Kind.STOP, BETWEEN),
    (Kind.STOP, IN_SYNC),
    (Kind.STOP, AT_START),
    (Kind.STALL, IN_ROLLOUT),
    (Kind.STALL, BETWEEN_WEDGED),
    (Kind.STALL, IN_SYNC),
    (Kind.STALL, AT_START),
]


def fault_at(when: When, *, kind: Kind, rank: int, folder: Path) -> Fault:
    """The loss of a rollout rank at a place in a run."""
    return Fault(
        kind=kind,
        role=Role.ROLLOUT,
        rank=rank,
        phase=when.phase,
        point=when.point,
        occurrence=when.occurrence,
        folder=str(folder),
    )


def go_on(
    engines: int,
    faults: Sequence[Fault],
    undisturbed: Outcome,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ranks: int = 1,
) -> Outcome:
    """Runs with engines of which some are lost. Asserts that it ends as without, and that each loss is told.

    Args:
        engines: Number of engines.
        faults: That strike their ranks.
        undisturbed: The run that it goes on from.
        folder: Its working directory.
        monkeypatch: The test's.
        ranks: Number of ranks of each engine.
    """
    overrides = [
        *(*CONFIG, "trainer.resume_mode=auto", f"cluster.num_rollouts={engines * ranks}"),
        *(f"rollout.tensor_model_parallel_size={ranks}", f"cluster.cpus_per_rollout={0.8 / (engines * ranks)}"),
        *("rollout.replace_lost_engines=3", "rl_safe.bootstrap.watch_steps=2"),
        *(f"rl_safe.timeouts.{phase}={DEADLINE_S}" for phase in (Phase.ROLLOUT, Phase.SYNC)),
        *(f"rl_safe.timeouts.start={START_S}", f"rl_safe.timeouts.stopped={STOPPED_S}"),
    ]
    outcome, _ = run_with(faults, overrides, undisturbed, folder, monkeypatch)
    assert all(fault.struck.exists() for fault in faults), f"a fault never struck:\n{outcome.err}"
    assert_completed(outcome, undisturbed)
    assert sum(record["engines/lost"] for record in outcome.records) == len(faults)
    assert outcome.records[-1]["rl_safe/comms_late"] == 0
    assert "engines lost and replaced" in (outcome.run_dir / "report.html").read_text()
    assert outcome.left == []
    return outcome


@pytest.mark.chaos
@pytest.mark.timeout(400)  # the first one waits for the undisturbed run
@pytest.mark.parametrize(
    ("kind", "when"),
    [pytest.param(kind, when, id=f"{kind}-{when.phase}-{when.point}-{when.occurrence}") for kind, when in CASES],
)
def test_a_run_goes_on_with_the_other_engine(
    kind: Kind, when: When, undisturbed: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = fault_at(when, kind=kind, rank=LAST_ENGINE, folder=tmp_path)
    go_on(LAST_ENGINE + 1, [fault], undisturbed, tmp_path, monkeypatch)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_run_waits_for_the_new_engine_when_none_is_left(
    undisturbed: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(kind=Kind.KILL, role=Role.ROLLOUT, rank=0, phase=Phase.ROLLOUT, folder=str(tmp_path))
    outcome = go_on(1, [fault], undisturbed, tmp_path, monkeypatch)
    first, second = outcome.records
    assert first["engines/serving"] == second["engines/serving"] == 1
    assert first["timing_s/engine_back"] > 0
    # The new engine's weights were compared with what was sent before it got a prompt.
    assert first["sync/proved"] > 0


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "when", "rank"),
    [
        pytest.param(kind, when, rank, id=f"{kind}-{when.phase}-{when.point}-{rank}")
        for kind, when, rank in [
            (Kind.KILL, IN_ROLLOUT, 2),
            (Kind.STOP, IN_ROLLOUT, 2),
            (Kind.KILL, BETWEEN_WEDGED, 3),
            (Kind.KILL, IN_SYNC, 3),
            (Kind.STALL, IN_SYNC, 2),
            (Kind.KILL, AT_START, 3),
        ]
    ],
)
def test_an_engine_of_two_ranks_is_replaced_as_a_whole(
    kind: Kind, when: When, rank: int, undisturbed: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = fault_at(when, kind=kind, rank=rank, folder=tmp_path)
    go_on(LAST_ENGINE + 1, [fault], undisturbed, tmp_path, monkeypatch, ranks=2)


STEPS, KILLS, EVERY = 60, 20, 3
"""An engine is killed after every third step."""


def engine_processes(run: Running) -> list[psutil.Process]:
    """The processes of engines, also of those that start."""
    found = []
    for process in run.processes():
        with suppress(psutil.Error):
            is_actor = process.cmdline()[:1] and process.cmdline()[0].startswith("ray::")
            if is_actor and actor_of(process.environ()) in {RankId(Role.ROLLOUT, rank) for rank in range(2)}:
                found.append(process)
    return found


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_many_losses_leave_nothing_behind(
    undisturbed: Outcome, record_property: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = tmp_path / "counts.jsonl"
    monkeypatch.setenv(COUNTS, str(counted))
    command = [
        *(sys.executable, "-m", "tests.chaos.counting_command", "run", str(RECIPES / "quickstart.yaml")),
        *(f"model.path={undisturbed.folder / 'model'}", *SMALL, "trainer.save_freq=-1", "cluster.num_rollouts=2"),
        *(f"trainer.total_training_steps={STEPS}", f"rollout.replace_lost_engines={KILLS}"),
        "rl_safe.timeouts.sync=60",
    ]
    shared, processes, chance = list[int](), list[int](), random.Random(0)
    with running(command, tmp_path) as run:
        for kill in range(KILLS):
            after = EVERY * kill + 1
            run.wait_until(lambda after=after: has_finished(run, after), timeout_s=600)
            processes.append(len(run.processes()))
            shared.append(len([*SHARED_MEMORY.iterdir()]))
            time.sleep(chance.uniform(0.0, 0.3))
            run.wait_until(lambda: bool(engine_processes(run)))
            chance.choice(engine_processes(run)).kill()
        outcome = run.finish(timeout_s=900)
    assert outcome.code == 0, outcome.err
    assert outcome.left == []
    assert len(outcome.records) == STEPS
    assert sum(record["engines/lost"] for record in outcome.records) == KILLS
    assert max(record["rl_safe/memory_growth_mib"] for record in outcome.records) == 0
    counts = [json.loads(line) for line in counted.read_text().splitlines()]
    record_property("figures", {"before": counts[1], "after": counts[-1], "processes": processes, "shared": shared})
    before, after = counts[: EVERY + 1], counts[-EVERY:]
    for name in ("keys", "groups", "files", "threads"):
        assert max(one[name] for one in after) <= max(one[name] for one in before), name
    assert processes[-1] <= max(processes[:2])


SEEDS, SEED_STEPS, SEED_KILLS = range(1, 6), 12, (2, 5, 8)
"""Seeds that set the band of rewards; steps of each run; steps after which an engine is killed."""


@pytest.mark.chaos
@pytest.mark.timeout(3000)
def test_rewards_stay_in_the_band_that_five_seeds_set_before(
    undisturbed: Outcome, record_property: Record, tmp_path: Path
) -> None:
    chance = random.Random(0)

    def rewards(seed: int, kills: Sequence[int]) -> list[float]:
        folder = tmp_path / f"{seed}_{len(kills)}"
        command = rl_safe(
            *("quickstart.yaml", f"model.path={undisturbed.folder / 'model'}", *SMALL, "trainer.save_freq=-1"),
            *("cluster.num_rollouts=2", f"trainer.total_training_steps={SEED_STEPS}", f"trainer.seed={seed}"),
            *(f"rollout.replace_lost_engines={len(kills)}", "rl_safe.timeouts.sync=60"),
        )
        with running(command, folder) as run:
            for step in kills:
                run.wait_until(lambda step=step: has_finished(run, step), timeout_s=300)
                time.sleep(chance.uniform(0.0, 0.3))
                chance.choice(engine_processes(run)).kill()
            outcome = run.finish(timeout_s=600)
        assert outcome.code == 0, outcome.err
        assert sum(record.get("engines/lost", 0) for record in outcome.records) == len(kills)
        return [record[REWARD] for record in outcome.records]

    clean = {seed: rewards(seed, ()) for seed in SEEDS}
    # The band is wider than a point: otherwise to stay in it would say nothing.
    band = [(min(at), max(at)) for at in zip(*clean.values(), strict=True)]
    assert any(least < most for least, most in band)
    disturbed = {seed: rewards(seed, SEED_KILLS) for seed in SEEDS}
    record_property("figures", {"band": band, "disturbed": disturbed})
    for seed, got in disturbed.items():
        assert all(least <= reward <= most for reward, (least, most) in zip(got, band, strict=True)), (seed, got)


def has_finished(run: Running, steps: int) -> bool:
    """Returns True if so many lines of metrics are written."""
    return any(len(file.read_text().splitlines()) >= steps for file in run.folder.glob("outputs/*/metrics.jsonl"))
