"""Looks at a node of the cluster from there: versions, code and files.

This module is sent to the node as it is (pickled by value), since the node may lack the package, or have another
version of it. So it imports nothing but Python's own library.
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
    """Returns what is installed here, and which paths exist.

    Args:
        distributions: Whose versions to tell.
        paths: Absolute paths.

    Returns:
        ``versions``, by name, of those that are installed, and of Python; ``code``, what `fingerprint` says of the
        package, None if it is not there; ``paths``, those that do not exist.
    """
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "code": fingerprint(), "paths": [path for path in paths if not Path(path).exists()]}


def fingerprint() -> str | None:
    """Tells the package's code from any other's, whatever its version says: 12 hex digits; None if it is not there."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
