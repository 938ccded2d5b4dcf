"""Rules of the repository that no linter checks: what importing costs, what is public, what pickles."""

from __future__ import annotations

import ast
import builtins
import pickle
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rl_safe_workers
from rl_safe_workers import errors
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.recipe import load_recipe
from rl_safe_workers.topology.groups import OpClass

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rl_safe_workers"
MODULES = sorted(PACKAGE.rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
HEAVY = {"mbridge", "megatron", "pyarrow", "ray", "torch", "transformers", "vllm"}
SHELL_SCRIPTS = [path for path in sorted((ROOT / "scripts").rglob("*")) if path.is_file() and not path.suffix]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CONTRACTS = PYPROJECT["tool"]["importlinter"]["contracts"]
PURE_MODULES = next(contract["source_modules"] for contract in CONTRACTS if contract["id"] == "pure")

EXAMPLES: dict[str, errors.RlSafeError] = {
    "DivergedError": errors.DivergedError(step=3, loss=float("inf"), grad_norm=2.0),
    "Interrupted": errors.Interrupted(signum=2),
    "NodeLostError": errors.NodeLostError(
        nodes=["10.0.0.4"], phase="train", ranks=trainer_ids([2, 3]), detail="it died"
    ),
    "JobError": errors.JobError(
        verdict="training rank 1 died in phase train",
        advice="look at its log",
        culprits=trainer_ids([1]),
        phase="train",
        cause=errors.Died(),
        evidence="/runs/1/failure",
    ),
    "LogprobGapError": errors.LogprobGapError(step=3, gap=0.1, bound=1e-5),
    "PhaseTimeoutError": errors.PhaseTimeoutError(
        phase="save",
        awaited=errors.Awaited("training world", frozenset(trainer_ids(range(4)))),
        missing=trainer_ids([1, 2]),
        waited_s=3.0,
        setting="rl_safe.timeouts.save",
        detail="it rained",
    ),
    "RunError": errors.RunError("training rank 1 failed", culprit=trainer_id(1), foreign=ForeignCause.OUT_OF_MEMORY),
    "RankError": errors.RankError(
        rank_id=trainer_id(1),
        phase="train",
        cause=errors.Repeats(trainer_id(0)),
        text="ValueError: x",
        trace="Traceback",
        raised_at=12.5,
    ),
}
"""One of each error that takes more than a message."""


@cache
def _tree(path: Path) -> ast.Module:
    """A file's syntax tree, which many rules go through."""
    return ast.parse(path.read_text())


def error_classes() -> list[type[errors.RlSafeError]]:
    found = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.RlSafeError)]
    return sorted(found, key=lambda cls: cls.__name__)


def modules_below(name: str) -> list[str]:
    """A module, or a package with every module in it."""
    folder = ROOT / name.replace(".", "/")
    return [name, *(f"{name}.{path.stem}" for path in sorted(folder.glob("[!_]*.py")))]


@pytest.mark.parametrize("name", ["rl_safe_workers.__init__", *PURE_MODULES])
def test_importing_it_loads_nothing_heavy(name: str) -> None:
    code = f"import sys, {', '.join(modules_below(name))}; print(*sorted({HEAVY!r} & sys.modules.keys()))"
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


def test_no_docstring_opens_with_what_or_whether() -> None:
    opening = re.compile(r'"""(What|Whatever|Whether|Who|Whoever|Whose|Whom|Those|Of)\b')
    files = [*MODULES, *TEST_FILES, *sorted((ROOT / "benchmarks").glob("*.py"))]
    found = [
        f"{p.relative_to(ROOT)}: {line}" for p in files for line in p.read_text().splitlines() if opening.search(line)
    ]
    assert [line for line in found if "opening = " not in line] == []


def test_every_error_class_is_public() -> None:
    assert {cls.__name__ for cls in error_classes()} <= set(rl_safe_workers.__all__)


def test_a_name_that_is_not_public_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = rl_safe_workers.nonsense


FOREIGN_PACKAGES = ("megatron", "ray", "torch", "vllm")


def private_names(path: Path) -> set[str]:
    """The private names of a foreign package that a module touches, such as ``torch.distributed: _world``."""
    tree, packages = _tree(path), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            packages |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    packages = {name: full for name, full in packages.items() if full.partition(".")[0] in FOREIGN_PACKAGES}
    found = {full for full in packages.values() if re.search(r"\._[a-z]", full)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
            owner = ast.unparse(node.value).partition(".")[0]
            if owner in packages:
                found.add(f"{packages[owner]}: {node.attr}")
    return found


def test_a_private_name_of_another_package_is_touched_in_one_module() -> None:
    touched: dict[str, list[str]] = {}
    for path in MODULES:
        for name in private_names(path):
            touched.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in touched.items() if len(paths) > 1} == {}
    assert len(touched) > 15, "the rule sees nothing"


def test_the_version_is_the_projects() -> None:
    assert f'\nversion = "{rl_safe_workers.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


REQUIRED = [Requirement(line) for line in PROJECT["dependencies"]]
OF_HOSTS = {
    "jinja2": ("3.1.6",),
    "numpy": ("1.26.4", "2.3.5", "2.4.6", "2.5.1"),
    "omegaconf": ("2.3.1", "2.4.0"),
    "psutil": ("7.2.2",),
    "pydantic": ("2.13.4", "2.14.3"),
    "pyyaml": ("6.0.3",),
    "rich": ("15.0.0",),
    "safetensors": ("0.8.0",),
}
"""Versions that hosts hold: verl 1dda039b9 and NeMo RL 7ea279abf (uv.lock, 2026-08-22),
ms-swift 4.6.0 (resolved on 2026-11-23; numpy 1 for its extra eval), and the omegaconf that pip adds to ms-swift."""


def test_an_installation_beside_a_host_brings_and_bounds_nothing_heavy() -> None:
    assert {one.name for one in REQUIRED} & {*HEAVY, "megatron-core"} == set()


@pytest.mark.parametrize("required", REQUIRED, ids=lambda required: required.name)
def test_a_requirement_takes_what_hosts_pin_and_all_that_is_newer(required: Requirement) -> None:
    """A bound above omegaconf 2.3 would move ms-swift's antlr4-python3-runtime: math_verify brings 4.13.2."""
    assert [bound.operator for bound in required.specifier] == [">="]
    assert [version for version in OF_HOSTS[required.name] if version not in required.specifier] == []


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


def test_the_init_file_of_each_package_says_what_the_package_is_for_and_no_more() -> None:
    inits = [path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    assert len(inits) > 20
    assert [str(path) for path in inits if not ast.get_docstring(_tree(path)) or len(_tree(path).body) > 1] == []


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def _definitions(path: Path) -> set[str]:
    """Functions, classes and methods of a module, methods with their class."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return found


def test_the_architecture_page_names_every_package() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `(\w+)` \|", ARCHITECTURE, re.MULTILINE))


def test_the_glossary_names_every_op_class() -> None:
    entry = next(line for line in ARCHITECTURE.splitlines() if line.startswith("| op class |"))
    assert set(re.findall(r"`(\w+)`", entry)) == set(OpClass)


def test_the_architecture_page_names_code_that_exists() -> None:
    walked = re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", ARCHITECTURE)
    assert len(walked) > 30
    assert [f"{file} {name}" for file, name in walked if name not in _definitions(PACKAGE / file)] == []


def test_the_architecture_page_names_no_class_that_the_code_does_not() -> None:
    named = set(re.findall(r"`((?:[A-Z][a-z0-9]+){2,})`", ARCHITECTURE))
    assert len(named) > 20
    words = {word for path in PACKAGE.rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    assert named - words == set()  # some are torch's


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WIDEST = 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_a_page_fit_into_120_columns(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), start=1)
    assert [number for number, line in lines if len(line) > WIDEST and not line.startswith("|")] == []


def _anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in _anchors(target))):
            lost.append(link)
    assert lost == []


def test_every_page_is_on_the_readmes_list() -> None:
    listed = set(re.findall(r"\(docs/(\w+\.md)\)", (ROOT / "README.md").read_text().partition("## Documentation")[2]))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= listed


def test_a_files_name_is_unique_in_the_package() -> None:
    names = Counter(path.name for path in MODULES if path.name not in ("__init__.py", "__main__.py"))
    assert [name for name, count in names.items() if count > 1] == []


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


def test_the_map_of_the_tests_names_every_folder_and_every_shared_fixture() -> None:
    rows = [
        line.split("|")[1:3] for line in (ROOT / "tests/README.md").read_text().splitlines() if line.startswith("| ")
    ]
    named = {name.strip(" `") for cell, _ in rows for name in cell.split(",")}
    folders = {path.parent.name for path in TEST_FILES if path.name.startswith("test_")}
    fixtures = {
        node.name
        for path in TEST_FILES
        if path.name == "conftest.py"
        for node in _tree(path).body
        if isinstance(node, ast.FunctionDef) and any("fixture" in ast.unparse(d) for d in node.decorator_list)
    }
    assert len(fixtures) > 5
    assert (folders | fixtures) - named == set()


FOREIGN = PACKAGE / "foreign_errors.py"
ERRORS = {cls.__name__ for cls in error_classes()} | {
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
}
SAID = {"args", "detail", "text", "trace"}
"""Attributes of errors that hold what they say."""
TEXT_OF = ("str", "repr", "first_line", "in_one_line")
LOOKS = {
    *("search", "match", "fullmatch", "findall", "finditer", "split", "sub", "partition", "rpartition"),
    *("startswith", "endswith", "find", "index", "removeprefix", "count"),
}
"""Methods of patterns and texts that look for something."""


class TextReader(ast.NodeVisitor):
    """Finds where a function decides by what an error says, within the function: names are followed, calls are not."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._errors: set[str] = set()
        self._texts: set[str] = set()

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before = self._errors, self._texts
        of_errors = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg) and self._is_error(arg)}
        self._errors, self._texts = self._errors | of_errors, set(self._texts)
        self.generic_visit(node)
        self._errors, self._texts = before

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function  # noqa: N815  (names that ast calls)

    def _is_error(self, arg: ast.arg) -> bool:
        named = () if arg.annotation is None else ast.walk(arg.annotation)
        return any(getattr(node, "id", getattr(node, "attr", "")) in ERRORS for node in named)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._errors.add(node.name)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if self._says(node.value):
            self._texts |= {
                name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }

    def visit_Call(self, node: ast.Call) -> None:
        # Without arguments split only joins lines.
        looks = isinstance(node.func, ast.Attribute) and node.func.attr in LOOKS and node.args
        if looks and any(map(self._says, [node.func.value, *node.args])):
            self.found.append(node.lineno)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(map(self._says, [node.left, *node.comparators])):
            self.found.append(node.lineno)
        self.generic_visit(node)

    def _says(self, node: ast.expr) -> bool:
        """Returns True if an expression is, or contains, what an error says."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in self._texts:
                return True
            if isinstance(part, ast.Attribute) and part.attr in SAID and self._names_error(part.value):
                return True
            if isinstance(part, ast.FormattedValue) and self._names_error(part.value):
                return True
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in TEXT_OF:
                return any(map(self._names_error, part.args))
        return False

    def _names_error(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._errors


def reads_text(tree: ast.AST) -> list[int]:
    """Lines of a module at which it decides by what an error says."""
    reader = TextReader()
    reader.visit(tree)
    return reader.found


def test_only_one_module_decides_by_what_an_error_says() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in MODULES if path != FOREIGN for line in reads_text(_tree(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    "lines",
    [
        "try: f()\nexcept OSError as e: re.search('x', str(e))",
        "try: f()\nexcept OSError as e: PATTERN.match(f'{e}')",
        "try: f()\nexcept OSError as e: found = 'timed out' in str(e)",
        "try: f()\nexcept OSError as e: str(e).startswith('x')",
        "try: f()\nexcept OSError as e:\n text = str(e).lower()\n if text == 'x': f()",
        "def f(error: PhaseTimeoutError): return error.detail.partition('; ')",
        "def f(error: RankError | None): return PATTERN.findall(first_line(error))",
        "def f(e: BaseException):\n def g(): return 'x' in e.args[0]\n return g",
    ],
)
def test_a_decision_by_what_an_error_says_is_noticed(lines: str) -> None:
    assert reads_text(ast.parse(lines)) != []


@pytest.mark.parametrize(
    "lines",
    [
        "try: f()\nexcept OSError as e: raise RuntimeError(f'no: {e}') from e",
        "try: f()\nexcept OSError as e: log(str(e), e.errno == 28, isinstance(e, OSError))",
        "def f(error: RankError): return error.rank_id in missing",
        "re.search('x', line) or 'x' in text",
    ],
)
def test_telling_what_an_error_says_is_no_decision(lines: str) -> None:
    assert reads_text(ast.parse(lines)) == []


TAKES_FIRST = re.compile(r"\bstr\(.*\)\.(splitlines\(\)|(partition|split)\('\\n'\))\[0\]$")


def _is_subscript_of_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call)


def first_lines(tree: ast.AST) -> list[int]:
    """Lines of a module at which it takes the first line of an error by itself."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (_is_subscript_of_call(node) and TAKES_FIRST.search(ast.unparse(node)))
        or (isinstance(node, ast.FunctionDef) and node.name == "_first_line")
    ]


def test_the_first_line_of_an_error_is_taken_in_one_place() -> None:
    """``splitlines()[0]`` fails for an error without a message."""
    assert [path for path in [*MODULES, *TEST_FILES] if first_lines(_tree(path))] == []


@pytest.mark.parametrize(
    "line",
    [
        "text = str(error).splitlines()[0]",
        "f'{str(error.value).splitlines()[0]}'",
        r"str(e).partition('\n')[0]",
        r"str(e).split('\n')[0]",
        "def _first_line(error): ...",
    ],
)
def test_a_first_line_taken_by_hand_is_noticed(line: str) -> None:
    assert first_lines(ast.parse(line)) == [1]


def _modules_where(is_wanted: Callable[[ast.AST], bool]) -> set[str]:
    """Modules of the package with a node of a kind."""
    return {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if any(map(is_wanted, ast.walk(_tree(path))))
    }


def _calls(*names: str) -> Callable[[ast.AST], bool]:
    return lambda node: isinstance(node, ast.Call) and _called(node.func) in names


def _called(function: ast.expr) -> str:
    """The last part of a function's name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


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
        "checkpoint/save/writer.py",  # syncs a file beside its writing, and ends with it
        "diagnostics/answering.py",  # answers as long as the process lives
        "driver/outputs/process_memory.py",  # samples memory as long as the run lives
    }


_OTHERS_CLASS = {"adapters/verl/trainers.py"}
"""There ``self`` is verl's trainer, whose attributes are verl's to make."""


def _asks_what_it_has(node: ast.AST) -> bool:
    """Returns True if a call asks an object for an attribute of itself that may not be there."""
    match node:
        case ast.Call(func=ast.Name(id="hasattr"), args=[ast.Name(id="self"), _]):
            return True
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), _, _]):
            return True
    return False


def test_no_object_asks_whether_it_has_an_attribute() -> None:
    assert _modules_where(_asks_what_it_has) == _OTHERS_CLASS


@pytest.mark.parametrize("call", ['hasattr(self, "store")', 'getattr(self, "chunks", ())'])
def test_an_object_that_asks_for_its_own_attribute_is_noticed(call: str) -> None:
    assert any(map(_asks_what_it_has, ast.walk(ast.parse(call))))


ONLY_BASE = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refused())
from rl_safe_workers import bootstrap, channel_limits, guard, teardown
"""
"""A script that finds none of the modules of its command line."""


def test_a_script_needs_no_more_than_the_base_dependencies_torch_and_megatron() -> None:
    project = PYPROJECT["project"]
    extras = [
        text for extra in ("cpu", "gpu", "jobs", "tensorboard") for text in project["optional-dependencies"][extra]
    ]
    base, optional = ({re.split(r"[^\w-]", text)[0] for text in texts} for texts in (project["dependencies"], extras))
    refused = sorted(optional - base - {"torch", "megatron-core"})
    assert {"ray", "vllm", "mbridge", "transformers"} <= set(refused)
    done = subprocess.run([sys.executable, "-c", ONLY_BASE, *refused], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _import_without(refused: list[str], names: list[str]) -> None:
    """Imports modules in a process that refuses some packages."""
    code = f"import sys; sys.modules.update(dict.fromkeys({refused})); import {', '.join(names)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_our_part_of_a_vllm_worker_needs_neither_megatron_nor_ray() -> None:
    # A host's environment for vLLM may have neither.
    names = ["rl_safe_workers.rollout.proved_worker", "rl_safe_workers.rollout.sync_proof"]
    _import_without(["megatron", "mbridge", "ray", "vllm"], names)


def test_the_drivers_of_hosts_need_no_megatron() -> None:
    # NeMo RL installs megatron-core for its workers alone.
    names = ["rl_safe_workers.adapters.nemo_rl.launch", "rl_safe_workers.adapters.swift.ray_waits"]
    _import_without(["megatron", "mbridge", "vllm"], names)
