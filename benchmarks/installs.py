"""Installs the wheel into the pinned environments of verl, ms-swift and NeMo RL, as ``pip install --dry-run`` would.

An environment of a host is a virtual environment of its Python in which every pinned package is known by name and
version. None of them is downloaded. verl and NeMo RL pin in the ``uv.lock`` of a checkout, which ``VERL_SRC`` and
``NEMO_RL_SRC`` name; ms-swift pins ranges, which uv resolves for Linux. Needs a package index.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import Row, at_most, machine_in_words
from rl_safe_workers.errors import ConfigError

ROOT = Path(__file__).parents[1]
SWIFT = ("ms-swift", "vllm", "ray", "mcore-bridge>=1.5.0", "megatron-core>=0.16", "peft>=0.15")
"""Packages that ms-swift asks for, with requirements/megatron.txt (2026-08-22)."""

Pins = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A framework and its pinned environment."""

    name: str
    python: str
    """Such as ``"3.12"``."""
    checkout: str | None
    """Environment variable that names a checkout with a ``uv.lock``; None: uv resolves `SWIFT`."""


HOSTS = (
    Host(name="verl", python="3.12", checkout="VERL_SRC"),
    Host(name="ms-swift", python="3.12", checkout=None),
    Host(name="NeMo RL", python="3.13", checkout="NEMO_RL_SRC"),
)


def measure(report: Callable[[str], None]) -> list[Row]:
    """Returns the number of pins that an installation would move, for each host that is there.

    Raises:
        ConfigError: If no host's pins can be had, or its Python is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="rl_safe_installs_") as folder:
        wheel = _build_wheel(Path(folder))
        rows = [row for host in HOSTS if (row := _measure_host(host, wheel, Path(folder), report)) is not None]
    if not rows:
        raise ConfigError("no host was measured: set VERL_SRC and NEMO_RL_SRC to checkouts")
    return rows


def _measure_host(host: Host, wheel: Path, folder: Path, report: Callable[[str], None]) -> Row | None:
    if host.checkout is None:
        pins = _resolve(SWIFT, host.python, folder)
    elif host.checkout in os.environ:
        pins = _locked(Path(os.environ[host.checkout]) / "uv.lock")
    else:
        report(f"{host.name}: {host.checkout} names no checkout; not measured")
        return None
    python = _make_environment(folder / host.name, host.python, pins)
    asked = _dry_run(python, wheel, folder / f"{host.name}.json")
    moved = [f"{name} {pins[name]} -> {version}" for name, version in asked.items() if name in pins]
    added = sorted(name for name in asked if name not in pins)
    report(f"{host.name}: {len(pins)} pins, moved: {', '.join(moved) or 'none'}; added: {', '.join(added)}")
    shown = {name: pins[name] for name in ("torch", "ray", "vllm", "megatron-core", "pydantic") if name in pins}
    return Row(
        name=f"{host.name}, Python {host.python}: moved of {len(pins)} pins", unit="", ours=len(moved),
        goal=at_most(0), runs=1, machine=machine_in_words(), versions=shown,
    )  # fmt: skip


def _build_wheel(folder: Path) -> Path:
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)])
    (wheel,) = folder.glob("rl_safe_workers-*.whl")
    return wheel


def _locked(lock: Path) -> dict[str, str]:
    """Returns name and version of each package of a lock; of several versions the newest."""
    pins: dict[str, str] = {}
    for package in tomllib.loads(lock.read_text(encoding="utf-8"))["package"]:
        name, version = _normal(package["name"]), package.get("version")
        if version is not None and ("registry" in package["source"] or "url" in package["source"]):
            pins[name] = max(version, pins.get(name, version), key=_order)
    return pins


def _resolve(requirements: Sequence[str], python: str, folder: Path) -> dict[str, str]:
    """Returns the versions that uv chooses for a Linux machine."""
    venv = folder / "uv"
    _run([sys.executable, "-m", "venv", str(venv)])
    _run([str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "uv"])
    (asked := folder / "swift.in").write_text("\n".join(requirements) + "\n")
    platform = ["--python-platform", "x86_64-manylinux_2_28", "--python-version", python]
    text = _run(
        [str(venv / "bin/uv"), "pip", "compile", "--quiet", "--no-annotate", "--no-header", *platform, str(asked)]
    )
    return {_normal(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)}


def _make_environment(venv: Path, version: str, pins: Pins) -> str:
    """Makes an environment in which pip finds each pin installed; returns its Python."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [*sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python"))), shutil.which(f"python{version}")]
    python = next((path for path in found if path is not None), None)
    if python is None:
        raise ConfigError(f"there is no python{version}: install it, or put it on PATH")
    _run([python, "-m", "venv", str(venv)])
    (site,) = venv.glob("lib/python*/site-packages")
    for name, pinned in pins.items():
        if name in ("pip", "setuptools"):
            continue
        (info := site / f"{name.replace('-', '_')}-{pinned}.dist-info").mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {pinned}\n")
    return str(venv / "bin/python")


def _dry_run(python: str, wheel: Path, report: Path) -> dict[str, str]:
    """Returns name and version of each package that pip would install besides ours."""
    _run([python, "-m", "pip", "install", "--quiet", "--dry-run", "--report", str(report), str(wheel)])
    installs = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {name: one["version"] for one in installs if (name := _normal(one["name"])) != "rl-safe-workers"}


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(command[:4])} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
