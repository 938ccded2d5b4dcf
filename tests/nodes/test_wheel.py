"""The wheel: the same bytes twice, all that the package needs, and a run of it alone, away from the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tomllib
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from rl_safe_workers import __version__
from tests.integration.runs import RECIPES, REPOSITORY, SMALL, Outcome, finish

PACKAGE = "rl_safe_workers"
STEPS = 2

WITNESS = """
import os, sys
from importlib.machinery import PathFinder
from pathlib import Path


class Witness:
    def find_spec(self, name, path=None, target=None):
        if name == "rl_safe_workers":
            who = f"{os.environ.get('RL_SAFE_ROLE', 'driver')}-{os.environ.get('RL_SAFE_RANK', 0)}"
            spec = PathFinder.find_spec(name, path, target)
            (Path(__file__).parent / "seen" / f"{who}-{os.getpid()}").write_text(str(spec and spec.origin))


sys.meta_path.insert(0, Witness())
"""
"""Notes, in every process of the environment that imports the package, from where; the import goes on without it."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


def build(folder: Path) -> Path:
    command = ["bash", str(REPOSITORY / "scripts" / "build"), str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    path, _, digest = done.stdout.strip().partition("  sha256:")
    assert (path, len(digest)) == (str(wheel), 64)
    return wheel


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, which sees the packages of this one but not its editable install."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    site_packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site_packages / "seen").mkdir()
    (site_packages / "witness.py").write_text(WITNESS)
    # A path in a .pth file is only searched: the .pth files that lie there, the editable install's too, are not read.
    (site_packages / "third_party.pth").write_text(f"{sysconfig.get_path('purelib')}\nimport witness\n")
    assert "No module named 'rl_safe_workers'" in in_environment(folder, "import rl_safe_workers", check=False).stderr
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    options = ["--disable-pip-version-check", "--no-index", "--ignore-installed"]
    # --ignore-installed: pip would otherwise be content with the editable install, which it finds beside the others.
    subprocess.run([*pip, *options, "--no-deps", str(wheel)], check=True, timeout=120)
    return folder


def in_environment(folder: Path, code: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = ["env", "-u", "PYTHONPATH", str(folder / "bin" / "python"), "-c", code]
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=60, cwd=folder)


def test_the_same_source_makes_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    assert build(tmp_path).read_bytes() == wheel.read_bytes()
    assert wheel.name == f"{PACKAGE}-{__version__}-py3-none-any.whl"


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    folders = (REPOSITORY / PACKAGE, REPOSITORY / "hydra_plugins")
    files = {path.relative_to(REPOSITORY) for of in folders for path in of.rglob("*") if path.is_file()}
    expected = {str(path) for path in files if "__pycache__" not in path.parts}
    assert {Path(name).suffix for name in expected} >= {".py", ".typed", ".j2", ".yaml"}
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected


def test_the_pins_beside_it_satisfy_what_it_requires(wheel: Path) -> None:
    lines = (wheel.parent / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    with ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"{PACKAGE}-{__version__}.dist-info/METADATA").decode())
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert sorted(required) == sorted(project["dependencies"])
    assert {line.split(">")[0] for line in required} <= set(pins)
    assert pins["ray"] == "2.60.0"


@pytest.fixture(scope="module")
def run(environment: Path, moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The quickstart from a folder elsewhere, by the path of its recipe."""
    recipe, model = str(RECIPES / "quickstart.yaml"), f"model.path={moe_model}"
    command = [str(environment / "bin" / "rl-safe"), "run", recipe, model, f"trainer.total_training_steps={STEPS}"]
    # `finish` puts the checkout on PYTHONPATH.
    return finish(["env", "-u", "PYTHONPATH", *command, *SMALL], tmp_path_factory.mktemp("elsewhere"))


def test_the_quickstart_runs_from_the_wheel(run: Outcome) -> None:
    assert run.code == 0, run.err
    assert (len(run.records), run.left) == (STEPS, [])
    assert "</html>" in (run.run_dir / "report.html").read_text()
    assert json.loads((run.run_dir / "comms.json").read_text())


def test_driver_and_actors_import_the_wheel_s_code(run: Outcome, environment: Path) -> None:
    (site_packages,) = environment.glob("lib/*/site-packages")
    seen = {(file.name.rpartition("-")[0], file.read_text()) for file in (site_packages / "seen").iterdir()}
    # None: before the wheel was installed.
    origins = {(who, origin) for who, origin in seen if origin != "None"}
    code = str(site_packages / PACKAGE / "__init__.py")
    assert origins == {(who, code) for who in ("driver-0", "trainer-0", "trainer-1", "rollout-0")}
