"""Owns `PlainConsole`, a rich console that prints untrusted text safely."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from rl_safe_workers.foreign_files import printable


class PlainConsole(Console):
    """Prints strings literally: without markup and emoji codes, and with control characters escaped.

    A name from a file may contain all three. A caller that wants styles passes a ``rich.text.Text``, whose text must be
    the caller's own or a result of `printable`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns a string as it will be shown. rich calls this for each string, also in tables."""
        return super().render_str(printable(text, keep="\n"), **options)
