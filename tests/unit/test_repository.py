"""Rules of the repository that no linter checks: what importing costs, what is public, what pickles."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rl_safe_workers
from rl_safe_workers import errors
from rl_safe_workers.recipe import load_recipe

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rl_safe_workers"
HEAVY = {"mbridge", "megatron", "pyarrow", "ray", "torch", "transformers", "vllm"}
SHELL_SCRIPTS = [path for path in sorted((ROOT / "scripts").iterdir()) if not path.suffix]
LIGHT_MODULES = (
    "rl_safe_workers",
    "rl_safe_workers.checkpoint.archives",
    "rl_safe_workers.checkpoint.audit",
    "rl_safe_workers.checkpoint.audit_report",
    "rl_safe_workers.checkpoint.balance",
    "rl_safe_workers.checkpoint.collector",
    "rl_safe_workers.checkpoint.convert",
    "rl_safe_workers.checkpoint.durable",
    "rl_safe_workers.checkpoint.flat_ranges",
    "rl_safe_workers.checkpoint.format_names",
    "rl_safe_workers.checkpoint.index",
    "rl_safe_workers.checkpoint.lock",
    "rl_safe_workers.checkpoint.manifest",
    "rl_safe_workers.checkpoint.manifest_facts",
    "rl_safe_workers.checkpoint.manifest_schema",
    "rl_safe_workers.checkpoint.ownership",
    "rl_safe_workers.checkpoint.publish",
    "rl_safe_workers.checkpoint.ranges",
    "rl_safe_workers.checkpoint.rectangles",
    "rl_safe_workers.checkpoint.retention",
    "rl_safe_workers.checkpoint.shard_folder",
    "rl_safe_workers.checkpoint.step_tracker",
    "rl_safe_workers.checkpoint.unpickle",
    "rl_safe_workers.cli.main",
    "rl_safe_workers.config",
    "rl_safe_workers.control.deadline",
    "rl_safe_workers.driver.rewards",
    "rl_safe_workers.env",
    "rl_safe_workers.errors",
    "rl_safe_workers.lifecycle",
    "rl_safe_workers.plan.plan",
    "rl_safe_workers.recipe",
    "rl_safe_workers.topology.layout",
)

EXAMPLES: dict[str, errors.RlSafeError] = {
    "DivergedError": errors.DivergedError(step=3, loss=float("inf"), grad_norm=2.0),
    "Interrupted": errors.Interrupted(signum=2),
    "NodeLostError": errors.NodeLostError(
        nodes=["10.0.0.4"], phase="train", ranks="trainer rank 2-3", detail="it died"
    ),
    "LogprobGapError": errors.LogprobGapError(step=3, gap=0.1, bound=1e-5),
    "PhaseTimeoutError": errors.PhaseTimeoutError(
        phase="save", group="training world", missing=[1, 2], waited_s=3.0, setting="rl_safe.timeouts.save"
    ),
    "RunError": errors.RunError("training rank 1 failed", culprit=1),
    "RankError": errors.RankError(
        role="trainer", rank=1, phase="train", cause="ValueError: x", trace="Traceback", raised_at=12.5
    ),
}
"""One of each error that takes more than a message."""


def error_classes() -> list[type[errors.RlSafeError]]:
    found = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.RlSafeError)]
    return sorted(found, key=lambda cls: cls.__name__)


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & sys.modules.keys()))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_public_names_are_sorted_and_each_can_be_had() -> None:
    assert rl_safe_workers.__all__ == sorted(set(rl_safe_workers.__all__))
    for name in rl_safe_workers.__all__:
        assert getattr(rl_safe_workers, name) is not None
    assert set(rl_safe_workers.__all__) <= set(dir(rl_safe_workers))


def test_type_checkers_see_exactly_the_public_names() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    names = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names | {"__version__"} == set(rl_safe_workers.__all__)


def test_every_error_class_is_public() -> None:
    assert {cls.__name__ for cls in error_classes()} <= set(rl_safe_workers.__all__)


def test_a_name_that_is_not_public_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = rl_safe_workers.nonsense


def test_the_version_is_the_projects() -> None:
    assert f'\nversion = "{rl_safe_workers.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_an_error_survives_pickling_with_its_fields(cls: type[errors.RlSafeError]) -> None:
    error = EXAMPLES.get(cls.__name__) or cls("what is wrong; what to do")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) is cls
    assert str(copy) == str(error) != ""
    assert vars(copy) == vars(error)
    assert copy.exit_code == error.exit_code


def test_every_error_with_fields_has_an_example() -> None:
    with_fields = {cls.__name__ for cls in error_classes() if "__init__" in vars(cls)}
    assert with_fields == EXAMPLES.keys()


def test_every_error_appears_in_the_drawing_of_the_hierarchy() -> None:
    drawn = (errors.__doc__ or "").split()
    assert [cls.__name__ for cls in error_classes() if cls.__name__ not in drawn] == []


def test_init_files_of_sub_packages_are_empty() -> None:
    inits = [path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    assert inits
    assert [str(path) for path in inits if path.read_text()] == []


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_loads(recipe: Path) -> None:
    config = load_recipe(recipe)
    assert all((ROOT / file).is_file() for file in config.data.train_files)


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_stop_at_the_first_failure_and_can_be_executed(script: Path) -> None:
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in script.read_text()
    assert script.stat().st_mode & 0o111


def _modules_where(is_wanted: Callable[[ast.AST], bool]) -> set[str]:
    """Modules of the package with a node of a kind; benchmarks stand beside it."""
    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "bench" and any(map(is_wanted, ast.walk(ast.parse(path.read_text()))))
    }


def _calls(*names: str) -> Callable[[ast.AST], bool]:
    return lambda node: isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names


def _names(*names: str) -> Callable[[ast.AST], bool]:
    return lambda node: isinstance(node, ast.Name) and node.id in names


def test_one_module_numbers_and_forgets_keys_of_the_store() -> None:
    assert _modules_where(_calls("delete_key", "compare_set", "list_keys", "multi_get")) == {
        "control/board.py",
        "control/shared_secret.py",  # before there is a secret to sign with
    }
    counters = _modules_where(
        lambda node: _calls("add")(node) and isinstance(node, ast.Call) and "store" in ast.unparse(node.func)
    )
    assert counters == set()


def test_one_module_turns_a_lost_store_into_an_error() -> None:
    # worlds/store.py tells of a store that never was there.
    assert _modules_where(_names("DistNetworkError")) == {"control/board.py", "worlds/store.py"}
    assert _modules_where(_names("DistStoreError")) == {"control/board.py"}
    assert _modules_where(lambda n: isinstance(n, ast.Raise) and "StoreLostError(" in ast.unparse(n)) == {
        "control/board.py"
    }


def test_one_module_makes_threads_for_bounded_work() -> None:
    assert _modules_where(_calls("Thread")) == {
        "control/deadline.py",
        "checkpoint/writer.py",  # syncs a file beside its writing, and ends with it
        "driver/actors.py",  # answers the driver's requests as long as the process lives
        "driver/memory.py",  # samples memory as long as the run lives
    }
