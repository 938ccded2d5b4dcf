"""NeMo RL's refits over our joint group, from each trainer straight into a real vLLM engine, and proved."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.ports import port_to_listen_on
from tests.distributed.ranks import run_ranks, values
from tests.nemo_rl.joint_refits import NORM, TRAINERS, Refit, take_part
from tests.nemo_rl.source import needs_source
from tests.nemo_rl.test_life import config_of

pytestmark = [needs_source, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not there")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("joint")
    create_seeded_model(folder / "model", SeededModelConfig())
    return _ranks(folder, {})


def _ranks(folder: Path, options: dict[str, Any]) -> list[Any]:
    own = folder / str(len(options))  # a short name, for sockets
    own.mkdir()
    config, port = config_of(folder / "model", own), port_to_listen_on("127.0.0.1")
    return values(run_ranks(take_part, TRAINERS + 1, port, config, own, options, timeout_s=180.0))


@pytest.fixture(scope="module")
def refits(ranks: list[Any]) -> dict[str, Refit]:
    found: dict[str, Refit] = ranks[-1]
    return found


def test_each_trainer_sends_weights_that_it_holds(ranks: list[Any]) -> None:
    assert {spec["source"] for spec in ranks[0].specs} == set(range(TRAINERS))
    assert ranks[1].specs == [], "rank 0 tells the driver the plan"
    assert [rank.share for rank in ranks[:TRAINERS]] == [1] * TRAINERS


@pytest.mark.parametrize("name", ["first", "not proved", "third", "wrong once"])
def test_the_engine_holds_what_the_trainers_hold_after_a_step(name: str, refits: dict[str, Refit]) -> None:
    refit = refits[name]
    assert refit.error == ""
    assert all(torch.equal(refit.held[name], weight) for name, weight in refit.sent.items())


def test_steps_change_the_weights(refits: dict[str, Refit]) -> None:
    """Else the test before would not notice an engine that keeps old weights."""
    first, second = refits["first"].sent, refits["not proved"].sent
    assert not any(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["first", "third", "wrong once"])
def test_every_weight_is_proved(name: str, ranks: list[Any], refits: dict[str, Refit]) -> None:
    metrics = refits[name].metrics
    assert metrics["rl_safe/sync_proved"] == len(ranks[0].specs) > 10
    assert metrics["rl_safe/sync_not_proved"] == 0
    assert metrics["rl_safe/sync_redone"] == (name == "wrong once")


def test_only_refits_that_are_due_are_proved(refits: dict[str, Refit]) -> None:
    assert refits["not proved"].metrics == {}


@pytest.mark.parametrize(
    "options",
    [{}, {"enable_expert_parallel": True}],
    ids=["tensor parallel", "expert parallel"],
)
def test_workers_of_an_engine_get_their_parts(
    options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    create_seeded_model(folder / "model", SeededModelConfig())
    *trainers, refits = _ranks(folder, {"tensor_parallel_size": 2, **options})
    # Each worker gets half of the weights, and the whole of those that they do not cut.
    assert all(1 < trainer.share < 1.3 for trainer in trainers)
    for name in ("first", "third"):
        metrics = refits[name].metrics
        assert (metrics["rl_safe/sync_not_proved"], metrics["rl_safe/sync_redone"], refits[name].error) == (0, 0, "")
        assert metrics["rl_safe/sync_proved"] == len(trainers[0].specs)


def test_a_refit_that_is_wrong_twice_ends_with_the_weight(refits: dict[str, Refit]) -> None:
    assert re.match(
        f"WeightSyncError: the refit has put wrong weights into an engine, twice: .*{re.escape(NORM)}: ",
        (refits["wrong twice"].error),
    )
