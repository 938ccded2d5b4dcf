"""Renders the templates that lie beside the modules of a package, and writes the files that a command is asked for.

Pure Python: starts in milliseconds. jinja2 is imported by the first page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_safe_workers.errors import ConfigError


def render(package: str, template: str, **values: Any) -> str:
    """Returns a page of HTML or SVG from a template. Escapes text in the values. A name without a value is an error.

    Args:
        package: The package in whose folder the template lies, e.g. ``"rl_safe_workers.plan"``.
        template: The name of the file.
        values: The template's values, by name.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def write_output(path: Path, text: str, *, option: str) -> None:
    """Writes a file that an option of a command names. The text may quote bytes that are not valid text.

    Raises:
        ConfigError: If the file cannot be written; names the option.
    """
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{option}={path} cannot be written ({error.strerror}): it takes a file to write") from error
