"""The end of a worker group: ranks that do not come are named, soon after another one has waited for them in vain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from rl_safe_workers.adapters.group_ends import GroupEnd, end_of, error_of
from rl_safe_workers.control.plane import NO_OUTCOME
from rl_safe_workers.errors import PhaseTimeoutError, RunError
from rl_safe_workers.ranks import trainer_id
from tests.verl.waiting_actors import answer, hang

LONG_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_group_that_ends_together_has_no_error() -> None:
    end = end_of([answer.remote({}), answer.remote({})], LONG_S)
    assert (end.late, end.text) == (frozenset(), "")
    assert error_of([end]) is None


def test_a_rank_that_others_wait_for_in_vain_is_not_waited_for_much_longer() -> None:
    # The third one is well, and takes long to abort its groups.
    end = end_of([answer.remote({1: NO_OUTCOME}), hang.remote(), hang.remote()], LONG_S)
    assert end.waited_s < LONG_S / 2
    error = error_of([end])
    assert isinstance(error, PhaseTimeoutError)
    assert (error.phase, error.missing) == ("teardown", {trainer_id(1)})
    assert error.awaited.members == {trainer_id(0), trainer_id(1), trainer_id(2)}


def test_a_rank_that_never_answers_is_named_after_the_patience() -> None:
    end = end_of([answer.remote({}), hang.remote()], 3.0)
    assert end.late == {1}


def test_what_ranks_say_is_told_once() -> None:
    end = end_of([answer.remote({1: "ValueError: no"}), answer.remote({1: "ValueError: no"})], LONG_S)
    assert str(error_of([end])) == "teardown: rank 1: ValueError: no"
    assert isinstance(error_of([GroupEnd(2, frozenset(), 1.0, "no")]), RunError)
