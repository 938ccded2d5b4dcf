"""Our recipes through NeMo RL's own loader, and what they say of nodes and GPUs."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NODE, NemoRlSettings
from rl_safe_workers.topology.layout import ParallelLayout
from tests.nemo_rl.source import SOURCE, needs_source

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "nemo_rl"
RECIPES = sorted(FOLDER.glob("*-rl-safe.yaml"))
TINY = sorted(FOLDER.glob("tiny-*.yaml"))
HYDRA = {
    "hydra._internal.config_loader_impl": "ConfigLoaderImpl",
    "hydra.core.override_parser.overrides_parser": "OverridesParser",
}


def _loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """NeMo RL's loader, from its file: the package asks for more than a test environment has.

    Hydra is for overrides on the command line alone; where it is not installed its two names stand empty.
    """
    if importlib.util.find_spec("hydra") is None:
        for module, name in HYDRA.items():
            for part in (module[:i] for i in range(len(module) + 1) if i == len(module) or module[i] == "."):
                monkeypatch.setitem(sys.modules, part, sys.modules.get(part) or types.ModuleType(part))
            setattr(sys.modules[module], name, None)
    spec = importlib.util.spec_from_file_location("nemo_rl_config", Path(SOURCE) / "nemo_rl" / "utils" / "config.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.register_omegaconf_resolvers()
    return module


@pytest.fixture
def loaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("NEMO_RL_SRC", SOURCE)
    monkeypatch.setenv("RL_SAFE_TINY", "/tiny")
    monkeypatch.setenv("RL_SAFE_RESULTS", "/shared/results")
    config = _loader(monkeypatch).load_config(str(request.param))
    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    return found


def by_name(path: Path) -> str:
    return path.stem


def test_there_are_recipes() -> None:
    assert len(RECIPES) == 3
    assert len(TINY) == 3


@pytest.mark.parametrize("path", RECIPES, ids=by_name)
def test_a_recipe_is_thin_and_its_settings_are_known(path: Path) -> None:
    own = yaml.safe_load(path.read_text())
    assert own["defaults"].startswith("${oc.env:NEMO_RL_SRC}/examples/configs/")
    NemoRlSettings.read(own[NODE], source=NODE)
    folders = (own["checkpointing"]["checkpoint_dir"], own["logger"]["log_dir"])
    for place in (*folders, own["logger"]["wandb"]["name"]):
        assert place.endswith(path.stem)
    # A relative folder may be each node's own.
    assert all(folder.startswith("${oc.env:RL_SAFE_RESULTS}/") for folder in folders)


@needs_source
@pytest.mark.parametrize("loaded", RECIPES, ids=by_name, indirect=True)
def test_a_recipe_loads_as_nemo_rl_loads_it(loaded: dict[str, Any], request: pytest.FixtureRequest) -> None:
    policy, cluster = loaded["policy"], loaded["cluster"]
    megatron, colocated = policy["megatron_cfg"], policy["generation"]["colocated"]
    assert megatron["enabled"]
    assert not policy["dtensor_cfg"]["enabled"]
    assert not colocated["enabled"]
    assert not megatron["checkpoint"]["async_save"]
    assert Path(loaded["checkpointing"]["checkpoint_dir"]).parent == Path("/shared/results")
    assert NemoRlSettings.read(loaded[NODE], source=NODE).enabled
    resources = colocated["resources"]
    assert resources["gpus_per_node"] == cluster["gpus_per_node"]
    nodes = cluster["num_nodes"] - resources["num_nodes"]
    assert nodes > 0
    # Raises where the sizes do not factor the training world.
    layout = ParallelLayout(
        world_size=nodes * cluster["gpus_per_node"],
        tensor=megatron["tensor_model_parallel_size"],
        pipeline=megatron["pipeline_model_parallel_size"],
        expert=megatron["expert_model_parallel_size"],
        expert_tensor=megatron["expert_tensor_parallel_size"],
        context=megatron["context_parallel_size"],
    )
    assert layout.expert_data >= 1
    name = request.node.callspec.id
    assert f"-{cluster['num_nodes']}n{cluster['gpus_per_node']}g-" in name


@needs_source
@pytest.mark.parametrize("loaded", TINY, ids=by_name, indirect=True)
def test_a_tiny_recipe_is_for_one_machine_with_two_gpus(loaded: dict[str, Any], request: pytest.FixtureRequest) -> None:
    policy, name = loaded["policy"], request.node.callspec.id
    resources = policy["generation"]["colocated"]
    trainers = 2 if resources["enabled"] else 2 - resources["resources"]["gpus_per_node"]
    assert f"-{trainers}train-" in name
    assert trainers % policy["megatron_cfg"]["expert_model_parallel_size"] == 0
    grpo = loaded["grpo"]
    assert grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"] == policy["train_global_batch_size"]
    assert grpo["async_grpo"]["enabled"] == policy["generation"]["vllm_cfg"]["async_engine"] == ("async" in name)
    assert loaded["data"]["train"]["data_path"].endswith("/train.jsonl")
    assert NemoRlSettings.read(loaded[NODE], source=NODE).enabled
    for place in (loaded["checkpointing"]["checkpoint_dir"], loaded["logger"]["log_dir"]):
        assert place.endswith(name)
