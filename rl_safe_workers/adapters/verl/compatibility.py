"""The versions of verl that the adapter was written for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from rl_safe_workers.errors import ConfigError

FIRST, BELOW = "0.9.0", "0.10"
SUPPORTED = f"verl >={FIRST},<{BELOW}"


def check_verl(found: str | None = None) -> str:
    """Checks the installed version of verl, or a given one, and returns it.

    Raises:
        ConfigError: If it is none that the adapter was written for; names the range.
    """
    if found is None:
        try:
            found = version("verl")
        except PackageNotFoundError:
            raise ConfigError(f"verl is not installed: the adapter supports {SUPPORTED}") from None
    if not Version(FIRST) <= Version(found) < Version(BELOW):
        raise ConfigError(f"verl {found} is not supported: the adapter supports {SUPPORTED}")
    return found
