"""Reports a live bootstrap: seconds and bytes of each group, or the rank that did not answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rl_safe_workers.comms.report import BootstrapReport
from rl_safe_workers.doctor.check import MIB, Fact, Report, Subject
from rl_safe_workers.errors import Interrupted, PhaseTimeoutError, RankError, RlSafeError
from rl_safe_workers.findings import Finding, Severity, counted
from rl_safe_workers.ranks import format_ranks

if TYPE_CHECKING:
    from rl_safe_workers.driver.outputs.console import RunConsole

logger = logging.getLogger(__name__)

CODE = "live-bootstrap-failed"
NAME = "live bootstrap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A live bootstrap, and its cost on each rank.

    Example: ``Live(report=report, ledgers=ledgers)``
    """

    report: Report
    ledgers: Sequence[BootstrapReport] = ()
    """The cost on each rank, by training rank; empty after a failure."""

    def as_list(self) -> list[dict[str, Any]]:
        """Returns the ledgers for JSON."""
        return [asdict(ledger) for ledger in self.ledgers]


def try_live(subject: Subject, console: RunConsole) -> Live:
    """Runs a live bootstrap and judges it. Main thread only.

    Raises:
        Interrupted: If the user interrupts it. Every other failure becomes a finding.
    """
    from rl_safe_workers.driver.live_bootstrap import bootstrap_live

    assert subject.config is not None, "the command refuses --live without a recipe"
    try:
        live = bootstrap_live(subject.config, console)
    except Interrupted:
        raise
    except Exception as error:  # any failure of the bootstrap is a finding
        logger.info("%s", error.trace if isinstance(error, RankError) else error, exc_info=error)
        return Live(report=Report(findings=(failed(error),)))
    return Live(report=Report(facts=facts(live.ledgers, live.seconds)), ledgers=live.ledgers)


def failed(error: Exception) -> Finding:
    """Returns a finding about a failure, with the group and the ranks that the error names."""
    groups: tuple[str, ...] = ()
    ranks = ""
    if isinstance(error, PhaseTimeoutError):
        groups, ranks = (error.awaited.name,), format_ranks(one.rank for one in error.missing)
    elif isinstance(error, RankError):
        groups, ranks = (f"the {error.rank_id.role}s",), str(error.rank_id.rank)
    elif isinstance(error, RlSafeError) and error.culprit is not None:
        ranks = str(error.culprit.rank)
    what = str(error) if isinstance(error, RlSafeError) else f"{type(error).__name__}: {error}"
    return Finding(
        code=CODE,
        severity=Severity.STOPS,
        text=" ".join(what.split()),
        groups=groups,
        ranks=ranks,
        since="now",
        evidence=("rl-safe doctor --live",),
        avoid="what the error says; rl-safe doctor -v --live shows the traceback of the rank",
    )


def facts(ledgers: Sequence[BootstrapReport], seconds: Mapping[str, float]) -> tuple[Fact, ...]:
    """Summarises a bootstrap: the slowest rank, the phases, and the rank whose communicators take most memory.

    Args:
        ledgers: The cost on each rank, by training rank.
        seconds: The duration of each phase.
    """
    slowest = max(range(len(ledgers)), key=lambda rank: ledgers[rank].seconds)
    groups = max(ledger.groups for ledger in ledgers)
    value = (
        f"{counted(len(ledgers), 'rank')}, {groups} groups each, rank {slowest} last in {_seconds(ledgers[slowest])}"
    )
    phases = ", ".join(f"{phase} {spent:.2f} s" for phase, spent in seconds.items())
    found = (Fact(name=NAME, value=value), Fact(name="phases", value=phases))
    measured = {rank: ledger.bytes for rank, ledger in enumerate(ledgers) if ledger.bytes is not None}
    if not measured:
        return found
    most = max(measured, key=lambda rank: measured[rank])
    predicted = ledgers[most].predicted_bytes / MIB
    return (*found, Fact(name="memory", value=f"rank {most} {measured[most] / MIB:.0f} MiB, {predicted:.0f} predicted"))


def _seconds(ledger: BootstrapReport) -> str:
    return f"{ledger.seconds:.3f} s"
