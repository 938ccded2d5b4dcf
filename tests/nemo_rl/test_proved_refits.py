"""Proved refits under NeMo RL with a real vLLM engine: a wrong one is redone once, then ends the job with the names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from tests.distributed.ranks import run_ranks, values
from tests.nemo_rl.proved_refits import CLEAN, FAULTS, TWICE, Refit, refits
from tests.nemo_rl.source import needs_source

TRANSPORTS = ("collective", "ipc")
AWAKE = ["wake up weights", "wake up kv_cache"]

pytestmark = [needs_source, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not there")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("proof") / "model"
    create_seeded_model(path, SeededModelConfig())
    (result,) = values(run_ranks(refits, 1, path, TRANSPORTS, timeout_s=120.0))
    return result


def _told(names: Sequence[str]) -> str:
    return "; ".join(rf"rollout rank 0: {re.escape(name)}: sent [0-9a-f]{{16}}, held [0-9a-f]{{16}}" for name in names)


def _calls(transport: str, *, redone: bool) -> list[str]:
    """Returns what an engine on the trainer's GPU is told; another one is told nothing."""
    if transport == "collective":
        return []
    return [*AWAKE, "sleep", *AWAKE] if redone else AWAKE


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_refit_that_is_right_is_done_once_and_returns_what_is_proved(transport: str, found: Any) -> None:
    refit: Refit = found[transport, CLEAN]
    assert (refit.redone, refit.not_proved) == (0, 0)
    assert refit.proved == refit.weights > 0
    assert (refit.told, refit.error) == ([], "")
    assert refit.calls == _calls(transport, redone=False)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_refit_that_is_wrong_once_is_redone_and_its_weights_are_named(fault: str, transport: str, found: Any) -> None:
    refit: Refit = found[transport, fault]
    (line,) = refit.told
    assert re.fullmatch(f"the refit is redone: {_told(FAULTS[fault])}", line)
    assert (refit.redone, refit.proved, refit.error) == (1, refit.weights, "")
    assert refit.calls == _calls(transport, redone=True)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_refit_that_is_wrong_twice_ends_with_the_names(transport: str, found: Any) -> None:
    told = _told(FAULTS[TWICE[0]])
    error = found[transport, ", ".join(TWICE)].error
    assert re.fullmatch(f"the refit has put wrong weights into an engine, twice: {told}", error)
