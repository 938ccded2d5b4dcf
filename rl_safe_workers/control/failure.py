"""A failure on its way from the rank that has it to the others: fields, never a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from rl_safe_workers.errors import PhaseTimeoutError, RlSafeError, RunError, error_named
from rl_safe_workers.ranks import RankId, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFailure:
    """The failure of a rank, in fields that are fit for JSON.

    Example: ``ReportedFailure(kind="CheckpointError", text="no room", culprit=trainer_id(2))``
    """

    kind: str
    """Name of the error's class."""
    text: str
    culprit: RankId | None = None
    """The rank that has failed; None: the one that reports it, or, if ranks are missing, none."""
    late: Mapping[str, Any] | None = None
    """`PhaseTimeoutError.as_json`, if that is the failure."""

    @classmethod
    def of(cls, error: BaseException, *, foreign: type[RlSafeError] = RunError) -> Self:
        """Describes an error.

        Args:
            error: What has been raised.
            foreign: What the others raise for an error that is not of this package.
        """
        if not isinstance(error, RlSafeError):
            return cls(kind=foreign.__name__, text=f"{type(error).__name__}: {error}")
        late = error.as_json() if isinstance(error, PhaseTimeoutError) else None
        return cls(kind=type(error).__name__, text=str(error), culprit=error.culprit, late=late)

    def by(self, rank_id: RankId) -> ReportedFailure:
        """Returns the same failure with a culprit, unless one is known or ranks are missing."""
        return self if self.culprit is not None or self.late is not None else replace(self, culprit=rank_id)

    def error(self) -> RlSafeError:
        """Makes the error that the other ranks raise."""
        if self.late is not None:
            return PhaseTimeoutError.from_json(self.late)
        error = error_named(self.kind, self.text)
        if self.culprit is not None:
            error.culprit = self.culprit
        return error

    def as_json(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Reads what JSON has made of `as_json`."""
        culprit = fields["culprit"]
        return cls(**{**fields, "culprit": None if culprit is None else RankId(Role(culprit[0]), culprit[1])})


def as_ours(error: Exception, foreign: type[RlSafeError] = RunError) -> RlSafeError:
    """Returns the error, or one of the package's in its place."""
    return error if isinstance(error, RlSafeError) else foreign(f"{type(error).__name__}: {error}")
