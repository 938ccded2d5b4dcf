"""The host's names that the adapter relies on, read from its source: nothing of it is imported."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from rl_safe_workers.adapters.host_contract import HostName, HostText, find, lacks_name, lacks_text, parameters
from rl_safe_workers.adapters.nemo_rl.contract import (
    BRIDGE_NAMES,
    BRIDGE_TEXTS,
    JOINT_NAMES,
    JOINT_TEXTS,
    NAMES,
    PROOF_NAMES,
    PROOF_TEXTS,
    TEXTS,
    check_host,
)
from rl_safe_workers.adapters.nemo_rl.launch import FACTORY, HOST_WORKER, KEY
from rl_safe_workers.adapters.nemo_rl.mixin import SafePolicyMixin
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import HOST_SHUTDOWN_S
from rl_safe_workers.errors import ConfigError
from tests.nemo_rl.source import SOURCES, each_source, needs_source, write_source

SUBMODULE = "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge"
BRIDGES = [path for path in os.environ.get("MEGATRON_BRIDGE_SRC", "").split(os.pathsep) if path] or [
    path for source in SOURCES if (Path(path := f"{source}/{SUBMODULE}") / "src").is_dir()
]
needs_bridge = pytest.mark.skipif(
    not BRIDGES,
    reason="no Megatron-Bridge: neither NEMO_RL_SRC has the submodule, nor MEGATRON_BRIDGE_SRC names a checkout",
)
each_bridge = pytest.mark.parametrize("root", BRIDGES or [""], ids=lambda path: Path(path).name)


@needs_source
@each_source
@pytest.mark.parametrize("expected", NAMES, ids=lambda e: e.name)
def test_a_name_has_the_signature_that_we_rely_on(expected: HostName, root: str) -> None:
    assert lacks_name(Path(root), expected) is None


@needs_source
@each_source
@pytest.mark.parametrize("expected", TEXTS, ids=lambda e: f"{e.within or e.file}: {e.text}")
def test_the_host_does_what_we_rely_on(expected: HostText, root: str) -> None:
    assert lacks_text(Path(root), expected) is None


@needs_source
@each_source
def test_the_host_has_what_a_proof_of_refits_relies_on(root: str) -> None:
    if find(Path(root), PROOF_NAMES[0].file, PROOF_NAMES[0].name.partition(".")[0]) is None:
        pytest.skip("a version before v0.7.0, which is refused")
    check_host(Path(root), PROOF_NAMES, PROOF_TEXTS)


@needs_source
def test_the_newest_host_has_what_a_refit_over_our_joint_group_relies_on() -> None:
    check_host(Path(SOURCES[0]), JOINT_NAMES, JOINT_TEXTS)


@needs_bridge
@each_bridge
@pytest.mark.parametrize("expected", BRIDGE_NAMES, ids=lambda e: e.name)
def test_a_name_of_bridge_has_the_signature_that_we_rely_on(expected: HostName, root: str) -> None:
    assert lacks_name(Path(root), expected) is None


@needs_bridge
@each_bridge
@pytest.mark.parametrize("expected", BRIDGE_TEXTS, ids=lambda e: f"{e.within or e.file}: {e.text}")
def test_bridge_does_what_we_rely_on(expected: HostText, root: str) -> None:
    assert lacks_text(Path(root), expected) is None


def test_every_method_that_we_override_is_in_the_contract() -> None:
    own = {"rl_safe_report", "rl_safe_end_groups", "rl_safe_prove", "rl_safe_sent", "rl_safe_plan_refits"}
    own |= {"rl_safe_join"}
    overridden = {name for name, value in vars(SafePolicyMixin).items() if callable(value) and name not in own}
    listed = {
        expected.name.rpartition(".")[2]
        for expected in NAMES
        if "/workers/" in expected.file or "Refit" in expected.name
    }
    assert overridden <= listed


@needs_source
@each_source
def test_the_host_waits_for_a_shutdown_as_long_as_we_think(root: str) -> None:
    node = find(Path(root), "nemo_rl/distributed/worker_groups.py", "RayWorkerGroup.shutdown")
    assert isinstance(node, ast.FunctionDef)
    defaults = dict(zip([a.arg for a in node.args.args][-len(node.args.defaults) :], node.args.defaults, strict=True))
    assert ast.literal_eval(defaults["timeout"]) == HOST_SHUTDOWN_S


@needs_source
@each_source
def test_the_way_in_is_an_argument_or_a_key(root: str) -> None:
    init = find(Path(root), "nemo_rl/models/policy/lm_policy.py", "Policy.__init__")
    config = (Path(root) / "nemo_rl/models/policy/__init__.py").read_text()
    assert KEY in parameters(init) or KEY in config


@needs_source
@each_source
def test_the_policys_class_is_given_to_setup_or_looked_up_in_its_module(root: str) -> None:
    setup = find(Path(root), "nemo_rl/algorithms/grpo.py", "setup")
    assert setup is not None
    assert FACTORY in parameters(setup) or " = Policy(cluster=" in ast.unparse(setup)


@needs_source
@each_source
def test_the_hosts_worker_is_registered_under_the_name_whose_python_we_take(root: str) -> None:
    registry = find(Path(root), "nemo_rl/distributed/ray_actor_environment_registry.py", "")
    assert registry is not None
    assert HOST_WORKER in {node.value for node in ast.walk(registry) if isinstance(node, ast.Constant)}


def test_a_host_with_all_names_is_taken(tmp_path: Path) -> None:
    check_host(write_source(tmp_path))


@pytest.mark.parametrize("expected", NAMES, ids=lambda e: e.name)
def test_a_host_that_lacks_a_name_is_refused_unless_nobody_calls_it_then(expected: HostName, tmp_path: Path) -> None:
    source = write_source(tmp_path, without=expected.name)
    if expected.optional:
        check_host(source)
        return
    with pytest.raises(ConfigError, match=rf"lacks {expected.name}\b.* use one from commit f00e1006b"):
        check_host(source)


def test_the_page_lists_every_name_with_its_parameters() -> None:
    page = (Path(__file__).parents[2] / "docs" / "nemo_rl_internals.md").read_text()
    for expected in (*NAMES, *PROOF_NAMES, *JOINT_NAMES, *BRIDGE_NAMES):
        signature = f"({', '.join(expected.parameters)})" if expected.parameters else ""
        assert f"| {expected.file} | `{expected.name}{signature}` |" in page
