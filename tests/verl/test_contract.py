"""verl's names that the adapter relies on, read from the source of each version: nothing of it is imported."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync
from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager
from verl.workers.engine.megatron import MegatronEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from rl_safe_workers.adapters.host_contract import HostName, HostText, lacks_name, lacks_text
from rl_safe_workers.adapters.verl.checkpoint import SafeCheckpointManager
from rl_safe_workers.adapters.verl.compatibility import check_verl
from rl_safe_workers.adapters.verl.engine import SafeEngineMixin
from rl_safe_workers.adapters.verl.trainers import SafeTrainerMixin
from rl_safe_workers.adapters.verl.verl_contract import ENGINE_NAMES, ENGINE_TEXTS, NAMES, TEXTS
from rl_safe_workers.adapters.verl.workers import (
    SafeActorRolloutRefWorker,
    SafeDetachActorWorker,
    SafeTrainingWorker,
)
from rl_safe_workers.errors import ConfigError
from tests.nemo_rl.source import write_source

INSTALLED = str(Path(find_spec("verl").submodule_search_locations[0]).parent)
SOURCES = [INSTALLED, *filter(None, os.environ.get("VERL_SOURCES", "").split(os.pathsep))]
each_source = pytest.mark.parametrize("root", SOURCES, ids=lambda path: Path(path).name)


@each_source
@pytest.mark.parametrize("expected", NAMES + ENGINE_NAMES, ids=lambda e: e.name)
def test_a_name_has_the_signature_that_we_rely_on(expected: HostName, root: str) -> None:
    assert lacks_name(Path(root), expected) is None


@each_source
@pytest.mark.parametrize("expected", TEXTS + ENGINE_TEXTS, ids=lambda e: f"{e.within or e.file}: {e.text}")
def test_verl_does_what_we_rely_on(expected: HostText, root: str) -> None:
    assert lacks_text(Path(root), expected) is None


@each_source
def test_a_source_that_has_all_is_taken(root: str) -> None:
    check_verl(Path(root))


@pytest.mark.parametrize("expected", NAMES, ids=lambda e: e.name)
def test_a_source_without_a_name_is_refused_by_it(expected: HostName, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"lacks {expected.name}\b"):
        check_verl(write_source(tmp_path, names=NAMES, without=expected.name))


def test_a_parameter_that_is_lacking_is_named_with_its_function(tmp_path: Path) -> None:
    source = write_source(tmp_path, names=NAMES)
    file = source / "verl/workers/engine_workers.py"
    file.write_text(file.read_text().replace("global_steps, mode", "global_steps"))
    with pytest.raises(ConfigError, match=r"lacks ActorRolloutRefWorker.update_weights\(self, global_steps, mode\)"):
        check_verl(source)


def test_a_source_with_all_names_that_does_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks 'VERL_USE_EXTERNAL_MODULES' in the module .* and 23 others"):
        check_verl(write_source(tmp_path, names=NAMES))


STOCK = {
    SafeEngineMixin: MegatronEngineWithLMHead,
    SafeCheckpointManager: MegatronCheckpointManager,
    SafeTrainerMixin: PPOTrainerSeparateAsync,
    SafeActorRolloutRefWorker: ActorRolloutRefWorker,
    SafeDetachActorWorker: DetachActorWorker,
    SafeTrainingWorker: TrainingWorker,
}


@pytest.mark.parametrize("ours", STOCK)
def test_every_method_of_verls_that_we_override_is_in_the_contract(ours: type) -> None:
    listed = {expected.name.rpartition(".")[2] for expected in NAMES}
    classes = [cls for cls in ours.__mro__ if cls.__module__.startswith("rl_safe_workers")]
    defined = {name for cls in classes for name, value in vars(cls).items() if callable(value)}
    overridden = {name for name in defined if hasattr(STOCK[ours], name) and not name.startswith("__")}
    # Attributes that hold a class are in the contract as texts.
    assert overridden - {"actor_worker_cls", "ref_worker_cls"} <= listed
