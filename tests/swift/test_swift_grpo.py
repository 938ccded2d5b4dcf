"""GRPO in ms-swift's own trainer, with the engine double in each rank: numbers, phases, groups, failures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_safe_workers.ports import port_to_listen_on
from tests.swift import real_engine
from tests.swift.jobs import BREAK, Forge, Job, environment

pytestmark = pytest.mark.timeout(600)

LAYOUTS = {
    "ep2": (2, ("--expert_model_parallel_size", "2")),
    "pp2-ep2": (4, ("--pipeline_model_parallel_size", "2", "--expert_model_parallel_size", "2")),
}
MORE = {"pp2-ep2": pytest.mark.every_case}
TIMEOUT_S = 15.0
AMPLE_S = 120.0
SHORT = {
    "generation": ("rollout",),
    "export_weights": ("sync",),
    "step": ("train", "rollout"),
    "save": ("save",),
}
"""The phases in which the ranks wait for one that fails at a place. All others have ample time: machines are busy."""


def settings_of(place: str) -> dict[str, object]:
    every = ("world", "bootstrap", "outside", "start", "convert", "train", "logprob", "save", "rollout", "sync")
    return {"timeouts": {"teardown": 5, **dict.fromkeys(every, AMPLE_S), **dict.fromkeys(SHORT[place], TIMEOUT_S)}}


PLACES, WAYS = ("generation", "export_weights", "step", "save"), ("raise", "kill", "hang")
SAMPLE = {("generation", "hang")}
CASES = [
    pytest.param(place, way, marks=() if (place, way) in SAMPLE else pytest.mark.every_case, id=f"{place}-{way}")
    for place in PLACES
    for way in WAYS
]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MORE.get(name, ())) for name in LAYOUTS])
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def jobs(layout: str, forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Stock's job, ours that gives communicators' memory away, and ours with a real engine and proved weight syncs."""
    ranks, sizes = LAYOUTS[layout]
    root = tmp_path_factory.mktemp(layout)
    settings = {"release_comms": True}
    stock = forge.grpo(root / "stock", inputs, *sizes, ranks=ranks, ours=False).check()
    own = forge.grpo(root / "own", inputs, *sizes, ranks=ranks, settings=settings).check()
    found = {"stock": stock, "own": own}
    if real_engine.HAS_VLLM:
        more = (*sizes, *real_engine.ARGUMENTS)
        proving = {"settings": {"prove_sync_freq": 1}, "env": {real_engine.FAULTS: "{}"}}
        found["proved"] = forge.grpo(root / "proved", inputs, *more, ranks=ranks, **proving).check()
    return found


def test_the_losses_are_those_of_stock_to_the_last_bit(jobs: dict[str, Job]) -> None:
    assert len(jobs["own"].losses) == 4
    assert len(set(jobs["own"].losses)) == 4
    assert jobs["own"].losses == jobs["stock"].losses


@real_engine.needed
def test_every_weight_sync_is_proved_and_changes_no_loss(jobs: dict[str, Job]) -> None:
    job = jobs["proved"]
    weights = job.proofs[0][0]
    assert weights > 0
    assert job.proofs == [(weights, 0, 0)] * 4
    assert job.losses == jobs["stock"].losses
    assert "redone" not in job.log(0)


def test_each_part_of_a_step_is_a_phase(jobs: dict[str, Job]) -> None:
    for rank in range(len(jobs["own"].statuses)):
        phases = jobs["own"].record(rank)["phases"]
        # A step is entered, left for the generation, and entered again; the generation is left for the weights.
        assert phases == {
            "world": 1,
            "groups": 1,
            "bootstrap": 1,
            "convert": 1,
            "start": 1,
            "train": 8,
            "rollout": 8,
            "sync": 4,
            "logprob": 4,
            "save": 2,
            "teardown": 1,
        }


def test_communicators_are_away_in_each_generation_and_back_after_it(jobs: dict[str, Job]) -> None:
    for rank in range(len(jobs["own"].statuses)):
        assert jobs["own"].record(rank)["released"] == {"generation": [True] * 4, "step": [False] * 4}


def test_what_steps_issue_was_connected_before(jobs: dict[str, Job]) -> None:
    for rank in range(len(jobs["own"].statuses)):
        record = jobs["own"].record(rank)
        assert record["unknown"] == []
        issued = {one for one in record["issued"] if len(json.loads(one)[1]) > 1}
        # The engine's own group, which no bootstrap connects.
        engines = {one for one in issued if json.loads(one)[0] == "of the engine"}
        assert len(engines) == 1
        assert not issued - engines - set(record["connected"])


def test_rollout_groups_are_those_of_ms_swift() -> None:
    # The stand-in for Transformer Engine has no parallel context, so no job here has these groups.
    script = [sys.executable, "-m", "tests.swift.rollout_groups"]
    output = subprocess.run(script, env=environment(), capture_output=True, text=True, check=True).stdout
    for layout in json.loads(output.splitlines()[-1]):
        assert layout["ours"] == layout["stock"]
        assert layout["same"]
        assert not layout["creates_again"]
        assert bool(layout["ours"]) == (layout["context"] > 1)


def test_a_save_issues_no_collective(jobs: dict[str, Job]) -> None:
    assert jobs["own"].collectives_of_saves(0) == [(0, 0)] * 2


@pytest.mark.parametrize(("place", "way"), CASES)
def test_a_rank_that_fails_is_named_in_time(place: str, way: str, forge: Forge, inputs: Path, tmp_path: Path) -> None:
    job = forge.grpo(
        tmp_path,
        inputs,
        *LAYOUTS["ep2"][1],
        settings=settings_of(place),
        plugins=[BREAK],
        env={"BREAK": f"{place}:{way}"},
        rest_s=TIMEOUT_S + 10,
    )
    struck = float((tmp_path / "struck").read_text())
    assert job.ended[0] - struck < TIMEOUT_S + 10
    assert job.statuses[0] == 1
    assert re.search(r"failed on training rank 1|rank 1 of training world did not arrive", job.log(0)), job.log(0)[
        -3000:
    ]


@contextmanager
def server(folder: Path, breaks: str = "") -> Iterator[tuple[str, ...]]:
    """A server double in a process; yields ms-swift's arguments for it."""
    folder.mkdir()
    port, listens = port_to_listen_on("127.0.0.1"), folder / "listens"
    env = environment(BREAK_ENGINE=breaks, STRUCK=str(folder / "struck"))
    with subprocess.Popen([sys.executable, "-m", "tests.swift.server_double", str(port), str(listens)], env=env) as one:
        try:
            while not listens.exists():
                assert one.poll() is None
                time.sleep(0.05)
            yield ("--vllm_mode", "server", "--vllm_server_host", "127.0.0.1", "--vllm_server_port", str(port))
        finally:
            one.kill()


@pytest.mark.every_case
def test_a_server_generates_as_with_stock(forge: Forge, inputs: Path, tmp_path: Path) -> None:
    jobs = []
    for ours in (True, False):
        with server(tmp_path / f"server-{ours}") as address:
            jobs.append(forge.grpo(tmp_path / f"job-{ours}", inputs, *LAYOUTS["ep2"][1], *address, ours=ours).check())
    assert len(set(jobs[0].losses)) == 4
    assert jobs[0].losses == jobs[1].losses
    assert jobs[0].record(1)["phases"]["sync"] == 4


@pytest.mark.parametrize(
    "breaks",
    [
        "generate:hang",
        *(pytest.param(one, marks=pytest.mark.every_case) for one in ("generate:kill", "load:hang", "load:kill")),
    ],
)
def test_a_server_that_is_silent_or_dead_is_named(breaks: str, forge: Forge, inputs: Path, tmp_path: Path) -> None:
    settings = settings_of("generation" if breaks.startswith("generate") else "export_weights")
    with server(tmp_path / "server", breaks) as address:
        job = forge.grpo(tmp_path / "job", inputs, *LAYOUTS["ep2"][1], *address, settings=settings)
    struck = float((tmp_path / "server" / "struck").read_text())
    # The last rank is the one that asks the server.
    assert job.statuses == [1, 1]
    assert max(job.ended) - struck < TIMEOUT_S + 10
    assert "failed on training rank 1" in job.log(0), job.log(0)[-3000:]
    if breaks.endswith("hang"):
        assert re.search(r"the vLLM server http://127\.0\.0\.1:\d+ \(\w+\) did not answer within", job.log(0))


def test_an_engine_that_hangs_in_a_rank_ends_it_and_is_named(forge: Forge, inputs: Path, tmp_path: Path) -> None:
    struck = tmp_path / "struck"
    env = {"BREAK_ENGINE": "generate:hang", "STRUCK": str(struck)}
    job = forge.grpo(tmp_path / "job", inputs, *LAYOUTS["ep2"][1], settings=settings_of("generation"), env=env)
    assert job.statuses == [1, 1]
    assert max(job.ended) - float(struck.read_text()) < TIMEOUT_S + 10
    assert re.search(r"the vLLM engine of training rank [01] \(generation\) did not answer within", job.log(0))
