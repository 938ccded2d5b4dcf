"""How verl finds our engines: its registry, in fresh processes with a job's environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rl_safe_workers.adapters.verl.environment import LOG_LEVELS
from rl_safe_workers.adapters.verl.verl_contract import NAMES
from tests.nemo_rl.source import write_source

PLUGIN = "rl_safe_workers.adapters.verl.plugin"
RESOLVE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import verl
light = sorted({"megatron", "verl.workers.engine", "rl_safe_workers.adapters.verl.engine"} & sys.modules.keys())
from verl.workers.engine import EngineRegistry
names = ["language_model megatron", "value_model megatron", "language_model fsdp", "value_model fsdp2"]
kinds = [name.split() for name in names]
found = [EngineRegistry.get_engine_cls(*kind).__name__ for kind in kinds]
print(json.dumps([light, found]))
"""
OURS = ["SafeMegatronEngine", "SafeMegatronValueEngine", "FSDPEngineWithLMHead", "FSDPEngineWithValueHead"]
STOCK = ["MegatronEngineWithLMHead", "MegatronEngineWithValueHead", *OURS[2:]]


def run_python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process whose environment names nothing of ours but what is given."""
    ours = ("VERL_", "RL_SAFE", *LOG_LEVELS)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment = {**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def resolved(**variables: str) -> Any:
    result = run_python(RESOLVE, **variables)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "loaded_by",
    [{"VERL_USE_EXTERNAL_MODULES": PLUGIN, "VERL_USE_EXTERNAL_PLUGINS": "none"}, {}],
    ids=["module", "entry_point"],
)
def test_megatron_engines_are_ours_and_others_verls_where_the_vendor_is_ours(loaded_by) -> None:
    light, found = resolved(VERL_ENGINE_VENDOR="rl_safe", **loaded_by)
    assert found == OURS
    assert light == [], "import verl itself stays as light as it was"


@pytest.mark.parametrize("variables", [{}, {"VERL_ENGINE_VENDOR": "metax"}], ids=["unset", "other"])
def test_without_our_vendor_every_engine_is_verls(variables) -> None:
    _, found = resolved(VERL_USE_EXTERNAL_MODULES=PLUGIN, **variables)
    assert found == STOCK


@pytest.mark.parametrize("how", [{"VERL_USE_EXTERNAL_MODULES": PLUGIN}, {}], ids=["module", "entry_point"])
def test_a_plugin_that_cannot_load_ends_the_process_and_says_why(how) -> None:
    result = run_python("import verl; print('went on')", VERL_ENGINE_VENDOR="rl_safe", RL_SAFE_VERL="{oops", **how)
    assert result.returncode != 0
    assert "went on" not in result.stdout
    assert "rl_safe: VERL_ENGINE_VENDOR=rl_safe is set, but RL_SAFE_VERL is not JSON" in result.stderr


def test_a_verl_whose_registry_knows_no_vendor_ends_the_process_and_names_what_is_lacking(tmp_path) -> None:
    source = write_source(tmp_path, names=NAMES, without="EngineRegistry.register")
    code = f"""
from pathlib import Path
from rl_safe_workers.adapters.verl import compatibility
compatibility._installed = lambda: Path({str(source)!r})
import verl
"""
    result = run_python(code, VERL_ENGINE_VENDOR="rl_safe", VERL_USE_EXTERNAL_MODULES=PLUGIN)
    assert result.returncode != 0
    assert "lacks EngineRegistry.register (verl/workers/engine/base.py)" in result.stderr


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"VERL_ENGINE_VENDOR": "rl_safe"}, 2),
        ({"VERL_ENGINE_VENDOR": "rl_safe", "VERL_USE_EXTERNAL_MODULES": PLUGIN}, 0),
        ({"VERL_ENGINE_VENDOR": "nvidia"}, 0),
    ],
    ids=["nothing_loads_it", "module", "other_vendor"],
)
def test_under_verls_own_entry_hydra_finds_that_nothing_would_load_our_engines(variables, code) -> None:
    result = run_python(
        "import sys; sys.argv[1:] = ['--cfg', 'job', 'model_engine=megatron', '+rl_safe=enabled']\n"
        "from verl.trainer.main_ppo import main\nmain()",
        VERL_USE_EXTERNAL_PLUGINS="none",
        **variables,
    )
    assert result.returncode == code, result.stderr
    refused = "rl_safe: VERL_ENGINE_VENDOR=rl_safe is set, and nothing loads the plugin" in result.stderr
    assert refused == bool(code)
    assert ("on_missing: raise" in result.stdout) == (not code)


WARN = f"""
import logging
logging.basicConfig()
import {PLUGIN}
import model_hosting_container_standards.logging_config
logging.getLogger("rl_safe_workers.adapters.verl").warning("is shown")
"""


@pytest.mark.parametrize(
    ("variables", "is_shown"),
    [
        ({"VERL_ENGINE_VENDOR": "rl_safe"}, True),
        ({"VERL_ENGINE_VENDOR": "rl_safe", "LOG_LEVEL": ""}, True),
        ({"VERL_ENGINE_VENDOR": "rl_safe", "LOG_LEVEL": "ERROR"}, False),
        ({}, False),
    ],
    ids=["our engines", "an empty level", "a level of the user's", "verl alone"],
)
def test_our_warnings_stay_visible_when_vllm_imports_the_standards_of_model_hosting(variables, is_shown) -> None:
    result = run_python(WARN, **variables)
    assert result.returncode == 0, result.stderr
    assert ("is shown" in result.stderr) == is_shown


FAILS_ONCE = f"""
import importlib, sys
import {PLUGIN} as plugin
sys.path.insert(0, sys.argv[1])
changed = []
sys.meta_path.insert(0, plugin._AfterImport("fails_once", changed.append))
try:
    import fails_once
except ZeroDivisionError:
    print("failed")
import fails_once
importlib.reload(fails_once)
print(changed == [fails_once] * 2)
"""


def test_a_module_whose_import_fails_at_first_is_changed_when_it_succeeds_and_when_it_is_reloaded(tmp_path) -> None:
    source = "import sys\ntried = sys.__dict__.setdefault('tried', [])\ntried.append(1)\n1 / (len(tried) - 1)\n"
    (tmp_path / "fails_once.py").write_text(source)
    result = run_python(FAILS_ONCE, str(tmp_path))
    assert result.stdout.split() == ["failed", "True"], result.stderr
