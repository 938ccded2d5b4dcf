"""A failure on its way from the rank that has it to the others: fields, never a pickle."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from rl_safe_workers import errors
from rl_safe_workers.errors import PhaseTimeoutError, RlSafeError, RunError

_PLAIN: dict[str, type[RlSafeError]] = {
    name: cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type)
    and issubclass(cls, RlSafeError)
    and cls.__init__ in (RlSafeError.__init__, RunError.__init__)
}
"""Errors that are made of a message alone, by name."""
_LATE = ("phase", "group", "missing", "waited_s", "setting", "detail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of a rank, in fields that are fit for JSON.

    Example: ``Failure(kind="CheckpointError", text="no room", culprit=2)``
    """

    kind: str
    """The error's class, or the nearest one above it that is made of a message alone."""
    text: str
    culprit: int | None = None
    """The rank that has failed; None: the one that reports it, or, if ranks are missing, none."""
    late: dict[str, Any] | None = None
    """Fields of the `PhaseTimeoutError`, if that is the failure."""

    @classmethod
    def of(cls, error: BaseException, *, foreign: type[RlSafeError] = RunError) -> Self:
        """Describes an error.

        Args:
            error: What has been raised.
            foreign: What the others raise for an error that is not of this package.
        """
        if isinstance(error, PhaseTimeoutError):
            late = {name: getattr(error, name) for name in _LATE}
            return cls(kind=RunError.__name__, text=str(error), culprit=error.culprit, late=late)
        if isinstance(error, RlSafeError):
            kind = next(above.__name__ for above in type(error).__mro__ if above.__name__ in _PLAIN)
            return cls(kind=kind, text=str(error), culprit=error.culprit)
        return cls(kind=foreign.__name__, text=f"{type(error).__name__}: {error}")

    def by(self, rank: int) -> Failure:
        """Returns the same failure with a culprit, unless one is known or ranks are missing."""
        return self if self.culprit is not None or self.late is not None else replace(self, culprit=rank)

    def error(self) -> RlSafeError:
        """Makes the error that the other ranks raise."""
        if self.late is not None:
            return PhaseTimeoutError(**self.late)
        error = _PLAIN[self.kind](self.text)
        if self.culprit is not None:
            error.culprit = self.culprit
        return error

    def as_json(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)


def as_ours(error: Exception, foreign: type[RlSafeError] = RunError) -> RlSafeError:
    """Returns the error, or one of the package's in its place."""
    return error if isinstance(error, RlSafeError) else foreign(f"{type(error).__name__}: {error}")
