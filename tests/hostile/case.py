"""A hostile input: who makes it, which commands read it, and how they may end."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

EITHER = ("*",)
"""Every command may accept the input, or refuse it: nobody knows beforehand."""


@dataclass(frozen=True, slots=True)
class Site:
    """The folders of one input.

    ======== ================================================================
    input    what the attacker has made; the command's working directory
    outside  files that no command may read, write or remove
    canary   empty; a payload that runs leaves a file there
    temp     the command's own folder for temporary files
    ======== ================================================================
    """

    root: Path

    @property
    def input(self) -> Path:
        """The folder of the attacker's files."""
        return self.root / "input"

    @property
    def outside(self) -> Path:
        """Files of somebody else."""
        return self.root / "outside"

    @property
    def canary(self) -> Path:
        """Where a payload that runs leaves a file."""
        return self.root / "canary"

    @property
    def temp(self) -> Path:
        """Where a command may leave temporary files."""
        return self.root / "temp"

    @property
    def secret(self) -> Path:
        """A file whose text no command may print."""
        return self.outside / "secret.txt"

    def make(self) -> None:
        """Makes the folders, and the files of somebody else."""
        for folder in (self.input, self.outside, self.canary, self.temp):
            folder.mkdir(parents=True)
        self.secret.write_text(f"password: {SECRET}\n")


_TOLD = ("--deep", "--json", "--from", "verl", "nemo-rl", "--model")
"""Arguments that are part of a command's name."""
SECRET = "correct-horse-battery-staple"
"""Text that no output may contain."""


@dataclass(frozen=True, slots=True)
class Command:
    """One of our entry points with its arguments; see `entries.ENTRIES`.

    Example: ``Command("audit", ("checkpoint", "--deep"))``
    """

    entry: str
    arguments: tuple[str, ...] = ()
    """Paths are relative to the site's ``input``."""

    def __str__(self) -> str:
        return "-".join([self.entry, *(word.lstrip("-") for word in self.arguments if word in _TOLD)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One input.

    Example: ``Case(name="recipe/deep", make=write_deep_yaml, commands=(Command("plan", ("recipe.yaml",)),))``
    """

    name: str
    """Kind, a slash, and what it attacks. The same for ever, so that a failure can be replayed."""
    make: Callable[[Site], None]
    commands: tuple[Command, ...]
    accepts: Collection[str] = ()
    """Names of commands that may accept the input; all others must refuse it."""
    ours: tuple[str, ...] = ()
    """Patterns of paths below the site's root that the command may change or remove, with all below them."""
    theirs: tuple[str, ...] = ()
    """Patterns of paths that it may not change, though they lie below one of ours."""
    may_read_outside: bool = False
    """For inputs that are of the user himself: a link in his folder that leads elsewhere. What lies there may be read,
    and not written, removed, run or printed."""

    @property
    def kind(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]

    def may_accept(self, command: Command) -> bool:
        """Returns True if a command may end well on this input."""
        return self.accepts == EITHER or str(command) in self.accepts or command.entry in self.accepts
