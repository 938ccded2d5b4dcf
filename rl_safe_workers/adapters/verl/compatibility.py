"""Refuses a verl that lacks a name that the adapter needs. Does not import verl."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rl_safe_workers.adapters.host_contract import HostName, HostText, lacking, package_root
from rl_safe_workers.adapters.verl.verl_contract import ENGINE_NAMES, ENGINE_TEXTS, NAMES, REGISTRY, RELEASES, TEXTS
from rl_safe_workers.errors import ConfigError

logger = logging.getLogger(__name__)


def check_verl(root: Path | None = None) -> None:
    """Checks that verl has every name that the adapter relies on.

    Args:
        root: The folder that holds verl's package; None: the installed one.

    Raises:
        ConfigError: If verl is not installed, or lacks a name; gives the name.
    """
    root = root or _installed()
    _check(root, NAMES, TEXTS)
    if (found := _version(root)) not in RELEASES:
        logger.warning("verl %s has every name that rl_safe_workers needs, but was not read by its authors", found)


def check_registry() -> None:
    """Checks only that the installed verl has the registry for our engines. This is quick enough for every process.

    Raises:
        ConfigError: As `check_verl`.
    """
    _check(_installed(), REGISTRY, ())


def check_engines() -> None:
    """Checks that the installed verl has every name that our vLLM engines rely on.

    Raises:
        ConfigError: As `check_verl`.
    """
    _check(_installed(), ENGINE_NAMES, ENGINE_TEXTS)


def _installed() -> Path:
    return package_root("verl", advice=f"use {' or '.join(RELEASES)}")


def _check(root: Path, names: Iterable[HostName], texts: Iterable[HostText]) -> None:
    if lacks := lacking(root, names, texts):
        raise ConfigError(
            f"verl {_version(root)} in {root} lacks {lacks}, which rl_safe_workers needs: use {' or '.join(RELEASES)}"
        )


def _version(root: Path) -> str:
    """Returns verl's version from the file that verl itself reads; without that file, from the package's metadata."""
    stated = root / "verl" / "version" / "version"
    if stated.is_file():
        return stated.read_text(encoding="utf-8").strip()[:40]
    try:
        return version("verl")
    except PackageNotFoundError:
        return "of unknown version"
