"""The mixin puts its methods and one attribute on its host."""

from __future__ import annotations

import inspect

import pytest
import torch

from rl_safe_workers import MegatronActorMixin
from rl_safe_workers.config import MegatronConfig, RlSafeConfig
from rl_safe_workers.errors import LifecycleError
from rl_safe_workers.workers.safe_trainer import SafeTrainer


class Host:
    """A Megatron actor that has made nothing yet."""

    def __init__(self) -> None:
        self.model = "mine"


class Actor(MegatronActorMixin, Host):
    """Both."""


def _set_up() -> Actor:
    actor = Actor()
    actor.setup_worker(
        training_rank=1, training_size=4, rl_safe=RlSafeConfig(), megatron=MegatronConfig(), device=torch.device("cpu")
    )
    return actor


def _public(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]


def test_a_host_gets_one_attribute() -> None:
    actor = _set_up()
    assert vars(actor).keys() == {"model", "safe"}
    assert isinstance(actor.safe, SafeTrainer)
    assert (actor.safe.training_rank, actor.safe.host) == (1, actor)


def test_everything_else_of_the_mixin_is_a_method_with_the_parts_signature_and_docstring() -> None:
    names = _public(list(vars(MegatronActorMixin)))
    methods = {name for name in names if inspect.isfunction(getattr(MegatronActorMixin, name))}
    assert set(names) - methods == {"safe"}
    for name in methods:
        method = getattr(MegatronActorMixin, name)
        assert method.__doc__, name
        assert next(iter(inspect.signature(method).parameters)) == "self", name
    assert "overwrite" in inspect.signature(MegatronActorMixin.export_hf).parameters


@pytest.mark.parametrize("method", ["offload", "bootstrap", "teardown", "poll_checkpoint"])
def test_a_method_before_the_set_up_says_what_to_call(method) -> None:
    with pytest.raises(LifecycleError, match="Actor has not been set up: call setup_worker"):
        getattr(Actor(), method)()


@pytest.mark.parametrize("name", ["store", "control", "world"])
def test_what_comes_with_the_world_is_refused_before_it(name) -> None:
    with pytest.raises(LifecycleError, match="training rank 1 has not joined the training world"):
        getattr(_set_up().safe, name)
