"""Writes a command's errors, logs and usage to a terminal; its results are the command's own.

Any of this text may quote a file or an argument that is not trusted. So all of it goes through `printable`.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
from pathlib import Path
from typing import NoReturn

from rl_safe_workers.errors import ConfigError, RankError, RlSafeError
from rl_safe_workers.foreign_files import complaint_about_path, kind_of, printable

_MOST_CHARACTERS = 2_000
_MOST_OF_TRACE = 20_000
_LAYOUT = "\n\t"


class Parser(argparse.ArgumentParser):
    """An argument parser whose error messages contain no control characters."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and exits with code 2."""
        super().error(printable(shortened(message, _MOST_CHARACTERS)))


class PrintableFormatter(logging.Formatter):
    """Formats records as printable text, with every line after the first indented.

    So one record cannot look like two.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as text."""
        return printable(super().format(record), keep=_LAYOUT).replace("\n", "\n  ")


def to_path(text: str) -> Path:
    """Returns the path that an argument names. The path need not exist.

    Raises:
        ConfigError: If no file can have the name, or the folders of the path cannot be searched.
    """
    if complaint := complaint_about_path(text):
        raise ConfigError(f"{text!r:.80} {complaint}")
    try:
        kind_of(text)
    except OSError as error:
        raise ConfigError(f"{text!r:.200} cannot be looked at: {error.strerror or error}; check it") from error
    return Path(text)


def set_up(*, verbose: bool) -> None:
    """Makes stdout accept every text in any encoding, and sends logs to stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("rl_safe_workers").setLevel(logging.INFO if verbose else logging.WARNING)


def report(error: RlSafeError) -> None:
    """Writes an error to stderr: first the traceback of the rank that raised it, if any, then one line."""
    if isinstance(error, RankError):
        trace = shortened(error.trace.rstrip("\n"), _MOST_OF_TRACE)
        print(printable(trace, keep=_LAYOUT), file=sys.stderr)
    # A message may quote another library's message, which may have several lines.
    line = " ".join(shortened(str(error), _MOST_CHARACTERS).split())
    print(printable(f"rl-safe: error: {line}"), file=sys.stderr)


def shortened(text: str, most: int) -> str:
    """Cuts the middle out of a long text, because a message has the error at its beginning and the advice at its end.

    >>> shortened("0123456789", 6)
    '012 ... 789'
    """
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-(most // 2) :]}"
