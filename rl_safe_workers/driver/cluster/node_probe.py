"""Reports the installed versions and visible files of a node, running on that node.

This module is sent to the node pickled by value, because the node may lack the package or have another version of it.
Therefore it imports only Python's standard library.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = "rl_safe_workers"


def look(distributions: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
    """Returns the installed versions, the fingerprint of the package, and the paths that do not exist.

    Args:
        distributions: Names of the distributions to report.
        paths: Absolute paths to look for.

    Returns:
        ``versions``: the version of Python and of each installed distribution, by name. ``code``: the result of
        `fingerprint`. ``paths``: the paths that do not exist.
    """
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "code": fingerprint(), "paths": [path for path in paths if not Path(path).exists()]}


def fingerprint() -> str | None:
    """Returns a hash of the package's code, 12 hex digits; None if the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
