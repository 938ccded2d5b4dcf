"""Carries a failure from one rank to the others, as plain fields, never as a pickle."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from rl_safe_workers.errors import (
    CommunicatorError,
    PhaseTimeoutError,
    RlSafeError,
    RunError,
    error_named,
    foreign_cause,
    in_one_line,
)
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.ranks import RankId, Role

_SHOWN = 300
"""Most characters of foreign text that an error quotes."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's report of its failure to the others.

    Example: ``Failure("no room", kind="CheckpointError", culprit=trainer_id(2))``
    """

    text: str
    """One line."""
    _: KW_ONLY
    kind: str = RunError.__name__
    """Name of the error's class."""
    culprit: RankId | None = None
    """The rank that has failed. None means the rank that reports it; if ranks are missing, no rank."""
    late: PhaseTimeoutError | None = None
    """The error itself, if ranks did not come in time."""
    foreign: ForeignCause = ForeignCause.UNKNOWN
    """The kind of failure of torch, Ray or the system that caused it."""

    @classmethod
    def of(cls, error: BaseException, *, otherwise: type[RlSafeError] = RunError) -> Failure:
        """Makes the report of an error.

        Args:
            error: The error that this rank caught.
            otherwise: The class that other ranks raise if the error is not one of this package.
        """
        text, foreign = in_one_line(error), foreign_cause(error)
        if not isinstance(error, RlSafeError):
            return cls(text, kind=otherwise.__name__, foreign=foreign)
        late = error if isinstance(error, PhaseTimeoutError) else None
        return cls(text, kind=type(error).__name__, culprit=error.culprit, late=late, foreign=foreign)

    def by(self, rank_id: RankId) -> Failure:
        """Returns the same failure with a culprit, unless one is known or ranks are missing."""
        return self if self.culprit is not None or self.late is not None else replace(self, culprit=rank_id)

    def error(self) -> RlSafeError:
        """Makes the error that the other ranks raise."""
        if self.late is not None:
            return self.late
        error = error_named(self.kind, self.text)
        if self.culprit is not None:
            error.culprit = self.culprit
        if self.foreign is not ForeignCause.UNKNOWN:
            error.foreign = self.foreign
        return error

    def as_json(self) -> dict[str, Any]:
        """Returns the fields, fit for JSON."""
        late = None if self.late is None else self.late.as_json()
        return {"text": self.text, "kind": self.kind, "culprit": self.culprit, "late": late, "foreign": self.foreign}

    @classmethod
    def from_json(cls, fields: Any) -> Failure:
        """Rebuilds a failure from the JSON of `as_json`.

        Raises:
            CommunicatorError: If the fields are not those of `as_json`.
        """
        try:
            match fields:
                case {
                    "text": str(text),
                    "kind": str(kind),
                    "culprit": None | [str(_), int(_)] as culprit,
                    "late": late,
                    "foreign": str(foreign),
                }:
                    return cls(
                        text,
                        kind=kind,
                        culprit=None if culprit is None else RankId(Role(culprit[0]), culprit[1]),
                        late=None if late is None else PhaseTimeoutError.from_json(late),
                        foreign=ForeignCause(foreign),
                    )
        except (AttributeError, KeyError, TypeError, ValueError):
            pass  # of fields inside it
        raise CommunicatorError(
            f"the failure report of a rank cannot be parsed, {str(fields)[:_SHOWN]!r}: start all ranks with the same "
            "version of rl_safe_workers"
        )


def as_ours(error: Exception, otherwise: type[RlSafeError] = RunError) -> RlSafeError:
    """Returns the error if it is one of this package; else a new one of class ``otherwise``."""
    return error if isinstance(error, RlSafeError) else otherwise(in_one_line(error))
