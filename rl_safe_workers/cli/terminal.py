"""Writes a command's errors, logs and usage to a terminal; its results are the command's own.

Any of it may quote a file or an argument that somebody else has made, so all of it goes through `printable`.
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
    """Refuses arguments on lines that a terminal takes as text."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 and the usage."""
        super().error(printable(shortened(message, _MOST_CHARACTERS)))


class PrintableFormatter(logging.Formatter):
    """Formats records as text that a terminal shows as it is, each line after the first indented.

    So no record can pass for two.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as text."""
        return printable(super().format(record), keep=_LAYOUT).replace("\n", "\n  ")


def to_path(text: str) -> Path:
    """Returns the path that an argument names; whether something is there is not looked at yet.

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
    """Makes stdout take every text, whatever its encoding, and sends logs to stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("rl_safe_workers").setLevel(logging.INFO if verbose else logging.WARNING)


def report(error: RlSafeError) -> None:
    """Ends stderr with the error's one line; the traceback of the rank that raised it comes before."""
    if isinstance(error, RankError):
        trace = shortened(error.trace.rstrip("\n"), _MOST_OF_TRACE)
        print(printable(trace, keep=_LAYOUT), file=sys.stderr)
    # A message may quote another library's, which may be of several lines.
    line = " ".join(shortened(str(error), _MOST_CHARACTERS).split())
    print(printable(f"rl-safe: error: {line}"), file=sys.stderr)


def shortened(text: str, most: int) -> str:
    """Leaves out the middle of a long text: what is wrong stands at its beginning, and what to do at its end.

    >>> shortened("0123456789", 6)
    '012 ... 789'
    """
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-(most // 2) :]}"
