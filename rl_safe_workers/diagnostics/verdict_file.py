"""Reads ``verdict.json``, in which `diagnosis` and `hang` keep a verdict and its facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_safe_workers.diagnostics.log_lines import Fault
from rl_safe_workers.foreign_files import printable, read_json
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.root_cause import Spot

VERDICT_FILE = "verdict.json"
_FILE_BYTES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVerdict:
    """A verdict as its file tells it; see `diagnosis.Diagnosis`.

    Example: ``KeptVerdict(verdict="training rank 1 is stopped", culprits=frozenset({trainer_id(1)}))``
    """

    verdict: str
    advice: str = ""
    """Empty if the file has none, as that of a driver's hang."""
    culprits: frozenset[RankId] = frozenset()
    """In a file of a driver's hang, the ranks that had not come."""
    fault: Fault | None = None
    waiting: Mapping[RankId, Spot] = field(default_factory=dict)


def read_verdict(file: Path, *, within: Path, uid: int | None = None) -> KeptVerdict:
    """Reads a verdict of this package, which may be forged.

    Args:
        file: The file.
        within: As for `foreign_files.open_foreign`.
        uid: As for `foreign_files.open_foreign`.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it holds no verdict of ours.
    """
    told = read_json(file, limit_bytes=_FILE_BYTES, within=within, uid=uid)
    try:
        if not isinstance(told["verdict"], str):
            raise TypeError("a verdict that is no text")
        culprits = told["culprits"] if "culprits" in told else told.get("wait", {}).get("missing", ())
        fault = told.get("fault")
        return KeptVerdict(
            verdict=printable(told["verdict"]),
            advice=printable(str(told.get("advice", ""))),
            culprits=frozenset(_rank_id(role, rank) for role, rank in culprits),
            fault=None if fault is None else Fault(fault),
            waiting={_rank_id(role, rank): Spot(*spot) for role, rank, *spot in told.get("waiting", ())},
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no verdict of ours: {type(error).__name__}") from error


def _rank_id(role: str, rank: int) -> RankId:
    return RankId(Role(role), int(rank))
