"""A terminal that prints text as it is, without markup."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from rl_safe_workers.foreign_files import printable


class PlainConsole(Console):
    """Prints strings without markup, emoji codes, or characters that a terminal would take as a command.

    A name that comes from a file may hold all three. Styles are given as ``rich.text.Text``, whose text is the
    caller's own or has gone through `printable`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns a string as it will be shown; rich calls this for each one, also in a table."""
        return super().render_str(printable(text, keep="\n"), **options)
