"""The host's names that the adapter relies on, read from its source: nothing of it is imported."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from rl_safe_workers.adapters.nemo_rl.contract import (
    BRIDGE_NAMES,
    BRIDGE_TEXTS,
    NAMES,
    TEXTS,
    HostName,
    HostText,
)
from rl_safe_workers.adapters.nemo_rl.launch import HOST_WORKER, KEY
from rl_safe_workers.adapters.nemo_rl.mixin import SafePolicyMixin
from rl_safe_workers.adapters.nemo_rl.settings import HOST_SHUTDOWN_S
from tests.nemo_rl.source import SOURCE, needs_source

BRIDGE = os.environ.get("MEGATRON_BRIDGE_SRC", f"{SOURCE}/3rdparty/Megatron-Bridge-workspace/Megatron-Bridge")
needs_bridge = pytest.mark.skipif(
    not SOURCE or not (Path(BRIDGE) / "src").is_dir(),
    reason="no Megatron-Bridge: neither NEMO_RL_SRC has the submodule, nor MEGATRON_BRIDGE_SRC names a checkout",
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _module(root: str, file: str) -> ast.Module:
    path = Path(root) / file
    assert path.is_file(), f"there is no {file}"
    return ast.parse(path.read_text())


def _find(module: ast.Module, name: str) -> ast.Module | Definition:
    found: ast.Module | Definition = module
    for part in filter(None, name.split(".")):
        inside = [node for node in found.body if isinstance(node, Definition) and node.name == part]
        assert inside, f"there is no {name}"
        found = inside[-1]
    return found


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = node.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _check_name(root: str, expected: HostName) -> None:
    node = _find(_module(root, expected.file), expected.name)
    if isinstance(node, ast.ClassDef):
        return
    assert not isinstance(node, ast.Module)
    given = iter(_parameters(node))
    # In this order, whatever stands between them.
    assert all(name in given for name in expected.parameters), f"{_parameters(node)} lacks {expected.parameters}"


def _check_text(root: str, expected: HostText) -> None:
    code = ast.unparse(_find(_module(root, expected.file), expected.within))
    assert expected.text in code


@needs_source
@pytest.mark.parametrize("expected", NAMES, ids=lambda e: e.name)
def test_a_name_has_the_signature_that_we_rely_on(expected: HostName) -> None:
    _check_name(SOURCE, expected)


@needs_source
@pytest.mark.parametrize("expected", TEXTS, ids=lambda e: f"{e.within or e.file}: {e.text}")
def test_the_host_does_what_we_rely_on(expected: HostText) -> None:
    _check_text(SOURCE, expected)


@needs_bridge
@pytest.mark.parametrize("expected", BRIDGE_NAMES, ids=lambda e: e.name)
def test_a_name_of_bridge_has_the_signature_that_we_rely_on(expected: HostName) -> None:
    _check_name(BRIDGE, expected)


@needs_bridge
@pytest.mark.parametrize("expected", BRIDGE_TEXTS, ids=lambda e: f"{e.within or e.file}: {e.text}")
def test_bridge_does_what_we_rely_on(expected: HostText) -> None:
    _check_text(BRIDGE, expected)


@needs_source
def test_every_method_that_we_override_is_one_of_the_hosts_and_in_the_contract() -> None:
    own = {"rl_safe_report"}
    overridden = {
        name for name, value in vars(SafePolicyMixin).items() if callable(value) and name not in own
    }  # fmt: skip
    listed = {expected.name.rpartition(".")[2] for expected in NAMES if "Worker" in expected.name}
    assert overridden <= listed


@needs_source
def test_the_host_waits_for_a_shutdown_as_long_as_we_think() -> None:
    node = _find(_module(SOURCE, "nemo_rl/distributed/worker_groups.py"), "RayWorkerGroup.shutdown")
    assert isinstance(node, ast.FunctionDef)
    defaults = dict(zip([a.arg for a in node.args.args][-len(node.args.defaults) :], node.args.defaults, strict=True))
    assert ast.literal_eval(defaults["timeout"]) == HOST_SHUTDOWN_S


@needs_source
def test_the_way_in_is_an_argument_or_a_key() -> None:
    module = _module(SOURCE, "nemo_rl/models/policy/lm_policy.py")
    init = _find(module, "Policy.__init__")
    assert isinstance(init, ast.FunctionDef)
    config = (Path(SOURCE) / "nemo_rl/models/policy/__init__.py").read_text()
    assert KEY in _parameters(init) or KEY in config


@needs_source
def test_the_hosts_worker_is_registered_under_the_name_whose_python_we_take() -> None:
    registry = _module(SOURCE, "nemo_rl/distributed/ray_actor_environment_registry.py")
    assert HOST_WORKER in {node.value for node in ast.walk(registry) if isinstance(node, ast.Constant)}
