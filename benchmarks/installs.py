"""Counts the pins of verl, ms-swift and NeMo RL that installing the wheel would move, by ``pip install --dry-run``.

The environment of a host is a virtual environment of its Python. It has the name and version of every pinned package,
but downloads none of them. verl and NeMo RL pin packages in the ``uv.lock`` of a checkout (``VERL_SRC``,
``NEMO_RL_SRC``), with one environment for each set of extras. ms-swift pins ranges, which uv resolves for Linux. Needs
a package index.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from benchmarks.table import Row, at_most, machine_in_words
from rl_safe_workers.errors import ConfigError

ROOT = Path(__file__).parents[1]
SWIFT = (
    *("ms-swift[megatron,ray,swanlab]==4.6.0", "torch==2.11.0", "vllm==0.25.1", "modelscope==1.39.0"),
    *(
        "bitsandbytes",
        "decord",
        "deepspeed<0.19",
        "icecream",
        "keye_vl_utils",
        "librosa",
        "liger_kernel",
        "math_verify",
    ),
    *("nvitop", "optimum", "pre-commit", "py-spy", "pybind11", "qwen_omni_utils", "qwen_vl_utils", "soundfile", "timm"),
    "wandb",
)
"""Requirements of ms-swift: torch, vLLM and modelscope from the newest image on its installation page, and the packages
that its requirements/install_all.sh adds (both of 2026-08-22). Leaves out its extra ``eval``, which needs an older
numpy."""
SWIFT_AS_OF = "2026-11-23"
"""Date of the resolution. Packages that were published later are ignored."""
HELP_S = 0.5
"""Seconds that ``rl-safe --help`` may take if only the wheel and its requirements are installed."""

Pins = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A framework and its pinned environment."""

    name: str
    python: str
    """Version of Python, e.g. ``"3.12"``."""
    checkout: str | None
    """Environment variable that names a checkout with a ``uv.lock``; None: uv resolves `SWIFT`."""
    extras: tuple[str, ...] = ()
    """Extras of the checkout that this environment includes."""


HOSTS = (
    Host(name="verl with vLLM and Megatron", python="3.12", checkout="VERL_SRC", extras=("vllm", "megatron")),
    Host(name="ms-swift with vLLM and Megatron", python="3.12", checkout=None),
    Host(name="NeMo RL, driver", python="3.13", checkout="NEMO_RL_SRC"),
    Host(name="NeMo RL, Megatron workers", python="3.13", checkout="NEMO_RL_SRC", extras=("mcore",)),
    Host(name="NeMo RL, vLLM workers", python="3.13", checkout="NEMO_RL_SRC", extras=("vllm",)),
)


def measure(report: Callable[[str], None]) -> list[Row]:
    """Returns the number of pins that an installation would move, for each host that is available.

    Raises:
        ConfigError: If a host's pins cannot be read, or if its Python is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="rl_safe_installs_") as folder:
        wheel = _build_wheel(Path(folder))
        uv = _install_uv(Path(folder) / "uv")
        rows = [row for host in HOSTS if (row := _measure_host(host, wheel, uv, Path(folder), report)) is not None]
        return [*rows, _measure_help(wheel, Path(folder) / "clean")]


def _measure_host(host: Host, wheel: Path, uv: Path, folder: Path, report: Callable[[str], None]) -> Row | None:
    if host.checkout is None:
        pins = _resolve(SWIFT, host.python, uv, folder)
    elif host.checkout in os.environ:
        pins = _locked(Path(os.environ[host.checkout]).resolve(), host, uv)
    else:
        report(f"{host.name}: {host.checkout} names no checkout; not measured")
        return None
    python = _make_environment(folder / host.name, host.python, pins)
    asked = _dry_run(python, wheel, folder / f"{host.name}.json")
    moved = [f"{name} {pins[name]} -> {version}" for name, version in asked.items() if name in pins]
    added = sorted(f"{name} {version}" for name, version in asked.items() if name not in pins)
    report(f"{host.name}: {len(pins)} pins, moved: {', '.join(moved) or 'none'}; added: {', '.join(added) or 'none'}")
    shown = {name: pins[name] for name in ("torch", "ray", "vllm", "megatron-core", "pydantic") if name in pins}
    return Row(
        name=f"{host.name}, Python {host.python}: moved of {len(pins)} pins",
        unit="",
        ours=len(moved),
        goal=at_most(0),
        runs=1,
        machine=machine_in_words(),
        versions=shown,
    )


def _build_wheel(folder: Path) -> Path:
    _run(["bash", str(ROOT / "scripts" / "build"), str(folder)])
    (wheel,) = folder.glob("rl_safe_workers-*.whl")
    return wheel


def _measure_help(wheel: Path, venv: Path) -> Row:
    """Returns the seconds of the fastest of five runs of ``rl-safe --help``, in an environment with only the wheel."""
    _run([sys.executable, "-m", "venv", str(venv)])
    _run([str(venv / "bin/python"), "-m", "pip", "install", "--quiet", str(wheel)])
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        _run([str(venv / "bin/python"), "-I", str(venv / "bin/rl-safe"), "--help"])
        seconds.append(time.perf_counter() - start)
    return Row(
        name="rl-safe --help, nothing else installed",
        unit="s",
        ours=min(seconds),
        goal=at_most(HELP_S),
        runs=5,
        machine=machine_in_words(),
        versions={},
    )


def _install_uv(venv: Path) -> Path:
    _run([sys.executable, "-m", "venv", str(venv)])
    _run([str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "uv"])
    return venv / "bin" / "uv"


def _locked(checkout: Path, host: Host, uv: Path) -> dict[str, str]:
    """Returns the version of each package that a lock has for a Python on Linux. Skips packages without a version."""
    options = ["--frozen", "--no-dev", "--no-emit-project", "--no-hashes", "--no-annotate", "--no-header"]
    extras = [word for extra in host.extras for word in ("--extra", extra)]
    python = ["--no-python-downloads", "--python", _find_python(host.python)]
    text = _run([str(uv), "export", "--quiet", "--project", str(checkout), *options, *python, *extras])
    here = {"python_version": host.python, "python_full_version": f"{host.python}.99"}
    packages = tomllib.loads((checkout / "uv.lock").read_text(encoding="utf-8"))["package"]
    pins = {}
    for asked in (Requirement(line) for line in text.splitlines() if not line.startswith("-e ")):
        if asked.marker is not None and not asked.marker.evaluate(here):
            continue
        version = _version_in_lock(packages, asked) if asked.url else str(asked.specifier).removeprefix("==")
        if version is not None:
            pins[_normal(asked.name)] = version
    return pins


def _version_in_lock(packages: Sequence[Mapping[str, Any]], asked: Requirement) -> str | None:
    """Returns the version of a package that is not from an index but from a commit, or a wheel at an address."""
    url, commit = str(asked.url), str(asked.url).rpartition("@")[2]
    for package in packages:
        source = package["source"]
        if package["name"] == asked.name and (source.get("url") == url or source.get("git", "").endswith(f"#{commit}")):
            return str(package["version"]).removeprefix("v") if "version" in package else None
    return None


def _resolve(requirements: Sequence[str], python: str, uv: Path, folder: Path) -> dict[str, str]:
    """Returns the versions that uv chooses for a Linux machine."""
    (asked := folder / "swift.in").write_text("\n".join(requirements) + "\n")
    target = ["--python-platform", "x86_64-manylinux_2_28", "--python-version", python, "--exclude-newer", SWIFT_AS_OF]
    text = _run([str(uv), "pip", "compile", "--quiet", "--no-annotate", "--no-header", *target, str(asked)])
    return {_normal(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)}


def _make_environment(venv: Path, version: str, pins: Pins) -> str:
    """Makes an environment in which pip finds each pin installed; returns its Python."""
    _run([_find_python(version), "-m", "venv", str(venv)])
    (site,) = venv.glob("lib/python*/site-packages")
    for name, pinned in pins.items():
        if name in ("pip", "setuptools"):
            continue
        (info := site / f"{name.replace('-', '_')}-{pinned}.dist-info").mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {pinned}\n")
    return str(venv / "bin/python")


def _find_python(version: str) -> str:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [*sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python"))), shutil.which(f"python{version}")]
    python = next((path for path in found if path is not None), None)
    if python is None:
        raise ConfigError(f"there is no python{version}: install it, or put it on PATH")
    return python


def _dry_run(python: str, wheel: Path, report: Path) -> dict[str, str]:
    """Returns the version of each package that pip would install in addition to ours, by name."""
    _run([python, "-m", "pip", "install", "--quiet", "--dry-run", "--report", str(report), str(wheel)])
    installs = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {name: one["version"] for one in installs if (name := _normal(one["name"])) != "rl-safe-workers"}


def _run(command: Sequence[str]) -> str:
    # A checkout on the path would count as an installed package.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=env)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(command[:4])} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
