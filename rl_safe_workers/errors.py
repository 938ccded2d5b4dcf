"""Defines every error that this package raises.

    RlSafeError
    ├── UsageError                    the caller can correct it; exit code 2, nothing written
    │   ├── ConfigError               unknown key, wrong type, contradictory settings
    │   ├── LayoutError               sizes that do not factor or do not divide the model
    │   ├── ModelError                a missing or unsupported model directory
    │   ├── DataError                 a missing or malformed prompt file
    │   ├── RewardFunctionError       a reward function that cannot be imported or called
    │   ├── ResourceError             too few CPUs or GPUs for the layout
    │   └── CheckpointMismatchError   a checkpoint of another model or layout
    └── RunError                      the world failed; exit code 1
        ├── LifecycleError            a phase entered before the phases that it requires
        ├── PhaseTimeoutError         a phase passed its deadline; names the missing ranks
        ├── RankError                 one rank failed; carries its id, phase, cause and traceback
        ├── JobError                  a host's job failed; carries the verdict and its evidence
        ├── ClusterError              Ray could not be started or joined
        │   └── NodeMismatchError     nodes with other versions, other code or other files
        ├── NodeLostError             a node of the cluster is gone; carries its name and its ranks
        ├── CommunicatorError         a group is missing, unknown or different between ranks
        │   └── StoreLostError        the process that owns the run's store has ended
        ├── CheckpointError           a checkpoint that is incomplete or could not be written
        │   └── UnsafeCheckpointError   a checkpoint that asks for code that no checkpoint needs
        ├── DivergedError             an update whose loss or gradient is not finite
        ├── RolloutError              a rollout that returned what the run cannot use
        ├── WeightSyncError           a weight sync that did not complete on every rank
        ├── LogprobGapError           trainer and rollout disagree about the sampled tokens
        └── Interrupted               Ctrl-C, SIGTERM, SIGHUP; exit code 128 + signal number

Errors cross process boundaries through Ray, so each one pickles with its fields.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl_safe_workers.foreign_errors import ForeignCause, classify
from rl_safe_workers.ranks import RankId, Role, format_ranks, name_ranks, ranks_of


def _rebuild(cls: type[RlSafeError], message: str, fields: dict[str, Any]) -> RlSafeError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


class RlSafeError(Exception):
    """Root of the hierarchy. ``str(error)`` is one line that says what to do.

    Attributes:
        culprit: The rank that has failed, if all ranks raise this error because of it; else None.
        foreign: The kind of the failure in torch, Ray or the system that the error reports, if no cause is chained.
    """

    exit_code = 1
    culprit: RankId | None = None
    foreign: ForeignCause = ForeignCause.UNKNOWN

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException's own __reduce__ calls the constructor with `args`, which loses every keyword-only field.
        return _rebuild, (type(self), str(self), self.__dict__.copy())


class UsageError(RlSafeError):
    """The caller's input is wrong; raised before anything is started or written."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key or value that cannot be used."""


class LayoutError(UsageError):
    """Parallel sizes that do not factor the training world or do not divide the model."""


class ModelError(UsageError):
    """A model directory that is missing, incomplete or of an unsupported architecture."""


class DataError(UsageError):
    """A prompt file that is missing or lacks a column."""


class RewardFunctionError(UsageError):
    """A reward function that cannot be found, imported or called."""


class ResourceError(UsageError):
    """The machine or cluster has less than the layout asks for."""


class CheckpointMismatchError(UsageError):
    """A checkpoint that belongs to another model or another parallel layout."""


class RunError(RlSafeError):
    """Something failed while running."""

    is_retryable = True
    """True if the same run may succeed when it is started again."""

    def __init__(
        self, *args: object, culprit: RankId | None = None, foreign: ForeignCause = ForeignCause.UNKNOWN
    ) -> None:
        super().__init__(*args)
        if culprit is not None:
            self.culprit = culprit
        if foreign is not ForeignCause.UNKNOWN:
            self.foreign = foreign


class LifecycleError(RunError):
    """A phase was entered before the phases that it depends on, or after teardown."""

    is_retryable = False


def first_line(error: BaseException) -> str:
    r"""Returns the first line of an error's message that is not empty, without the traces that torch and Ray append.

    >>> first_line(ValueError("\nno\nTraceback")), first_line(ValueError())
    ('no', '')
    """
    return next(filter(None, str(error).splitlines()), "")


def in_one_line(error: BaseException) -> str:
    """Returns the first line of an error's message, with its type in front if its class is not ours.

    >>> in_one_line(ValueError("no"))
    'ValueError: no'
    """
    line = first_line(error)
    return line if isinstance(error, RlSafeError) else f"{type(error).__name__}: {line}"


def in_short(sentences: Sequence[str], *, shown: int) -> str:
    """Joins the first sentences, and gives the number of the others.

    >>> in_short(["a", "b", "c"], shown=2)
    'a; b; and 1 more'
    """
    joined = "; ".join(sentences[:shown])
    return joined if len(sentences) <= shown else f"{joined}; and {len(sentences) - shown} more"


def foreign_cause(error: BaseException) -> ForeignCause:
    """Returns the kind of foreign failure that an error is, or is caused by; ``UNKNOWN`` if there is none."""
    link: BaseException | None = error
    seen: list[BaseException] = []
    while link is not None and not any(link is one for one in seen):
        seen.append(link)
        if isinstance(link, StoreLostError):
            return ForeignCause.STORE_LOST
        found = link.foreign if isinstance(link, RlSafeError) else classify(link)
        if found is not ForeignCause.UNKNOWN:
            return found
        link = link.__cause__
    return ForeignCause.UNKNOWN


def error_named(class_name: str, text: str) -> RlSafeError:
    """Rebuilds the error of another rank from the name of its class and its message.

    Returns:
        An error of that class; a RunError if the class is not ours, or if its constructor needs more than a message.
    """
    cls = globals().get(class_name)
    if isinstance(cls, type) and issubclass(cls, RlSafeError) and "__init__" not in vars(cls):
        return cls(text)
    return RunError(text)


OUTSIDE = "outside"
"""Stands in place of a phase, if a host has no name for the rank's work."""


def during(phase: str) -> str:
    """Returns the time of an event in words, from its phase.

    >>> during("train"), during("outside")
    ('in phase train', 'between phases')
    """
    return "between phases" if phase == OUTSIDE else f"in phase {phase}"


@dataclass(frozen=True, slots=True)
class Awaited:
    """The object of a phase's wait: a set of ranks, or a thing without ranks.

    Example: ``Awaited("training world", frozenset(trainer_ids(range(4))))``
    """

    name: str
    """Name for the message."""
    members: frozenset[RankId] | None = None
    """Ids of its ranks; None for a thing without ranks, such as a node or the placement group."""


THE_DRIVER = Awaited("the driver")
"""The driver, as the object of a wait: it waits for its own work, such as the rewards."""


class PhaseTimeoutError(RunError):
    """A phase passed its deadline.

    Attributes:
        phase: Name of the phase, e.g. ``"bootstrap"``.
        awaited: The thing that the phase waited for.
        missing: Ranks that had not arrived when the deadline passed.
        waited_s: Seconds waited.
        setting: Dotted configuration key that moves the deadline.
        detail: Further facts for the message, e.g. reports of ranks.
    """

    def __init__(
        self,
        *,
        phase: str,
        awaited: Awaited,
        missing: Iterable[RankId] = (),
        waited_s: float,
        setting: str,
        detail: str = "",
    ) -> None:
        self.phase, self.awaited, self.missing = str(phase), awaited, frozenset(missing)
        self.waited_s, self.setting, self.detail = waited_s, setting, detail
        who = (
            f"{_name_missing(self.missing, awaited.members)} of {awaited.name} did not arrive"
            if self.missing
            else f"{awaited.name} did not finish"
        )
        tail = f" ({detail})" if detail else ""
        when = during(self.phase).removeprefix("in ")
        super().__init__(f"{when}: {who} within {waited_s:.1f} s{tail}; to wait longer raise {setting}")

    def with_missing(self, culprits: Iterable[RankId]) -> PhaseTimeoutError:
        """Returns the same error with other missing ranks, e.g. without ranks that are known to wait themselves."""
        return PhaseTimeoutError(**self._plain(), awaited=self.awaited, missing=culprits)

    def as_of(self, phase: str, *, setting: str) -> PhaseTimeoutError:
        """Returns the same error in the words of a caller that has another phase and another setting for the wait."""
        return PhaseTimeoutError(
            **{**self._plain(), "phase": phase, "setting": setting}, awaited=self.awaited, missing=self.missing
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as values for JSON, in which a rank sends the error to other ranks."""
        members = None if self.awaited.members is None else _by_role(self.awaited.members)
        return {**self._plain(), "awaited": [self.awaited.name, members], "missing": _by_role(self.missing)}

    def _plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("phase", "waited_s", "setting", "detail")}

    def __reduce__(self) -> tuple[Any, ...]:
        sets = {name: value for name, value in self.as_json().items() if name in ("awaited", "missing")}
        return _rebuild_late, (type(self), str(self), {**self.__dict__, **sets})

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> PhaseTimeoutError:
        """Rebuilds the error of another rank from the result of its `as_json`."""
        name, members = fields["awaited"]
        awaited = Awaited(name, None if members is None else _of_roles(members))
        return cls(**{**fields, "awaited": awaited, "missing": _of_roles(fields["missing"])})


def _by_role(ranks: Iterable[RankId]) -> dict[str, str]:
    """Returns ranks as ranges by role. Short, because each of thousands of ranks may send thousands of names."""
    found: dict[str, list[int]] = {}
    for role, rank in ranks:
        found.setdefault(role, []).append(rank)
    return {role: format_ranks(of_role) for role, of_role in found.items()}


def _of_roles(by_role: Mapping[str, str]) -> frozenset[RankId]:
    return _ranks_named(*sorted(by_role.items()))


@lru_cache(maxsize=64)
def _ranks_named(*by_role: tuple[str, str]) -> frozenset[RankId]:
    """Returns the set of ranks in such ranges. Cached, because thousands of reports name the same ranks."""
    return frozenset(RankId(Role(role), rank) for role, text in by_role for rank in ranks_of(text))


@lru_cache(maxsize=64)
def _name_missing(missing: frozenset[RankId], members: frozenset[RankId] | None) -> str:
    roles = {one.role for one in members or missing}
    return f"rank {format_ranks(one.rank for one in missing)}" if len(roles) == 1 else name_ranks(missing)


def _rebuild_late(cls: type[PhaseTimeoutError], message: str, fields: dict[str, Any]) -> RlSafeError:
    name, members = fields["awaited"]
    awaited = Awaited(name, None if members is None else _of_roles(members))
    return _rebuild(cls, message, {**fields, "awaited": awaited, "missing": _of_roles(fields["missing"])})


@dataclass(frozen=True, slots=True)
class Raised:
    """The rank failed by its own fault."""


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process ended without a report."""


@dataclass(frozen=True, slots=True)
class Victim:
    """The rank waited for other ranks, which did not arrive or disappeared."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """The rank only repeats the failure of rank ``of``."""

    of: RankId


@dataclass(frozen=True, slots=True)
class Stopped:
    """The rank's process was stopped, e.g. by SIGSTOP, and does nothing until it is continued."""


Cause = Raised | Died | Victim | Repeats | Stopped
"""The reason why a rank failed."""
_TOLD_CHARACTERS = 20_000
_PLAIN_CAUSES = {cause.__name__: cause for cause in (Raised, Died, Victim, Stopped)}


class RankError(RunError):
    """One rank failed.

    Attributes:
        rank_id: The rank.
        phase: The phase that the rank was in.
        cause: The reason why it failed.
        text: ``"TypeName: message"`` of the original exception.
        trace: The remote traceback as text.
        raised_at: Unix time in seconds (`lifecycle.unix_now`) of the exception, or of the moment when the death was
            noticed. It tells which of several failures was the first.
        place: The line of code where it failed or was last seen, e.g. ``"train.py:12 (step)"``; None if unknown.
        foreign: The kind of the original exception, if it is of another library and not about other ranks.
        op: The torch collective that raised it, e.g. ``"all_reduce"``; None if none did.
    """

    def __init__(
        self,
        *,
        rank_id: RankId,
        phase: str,
        cause: Cause,
        text: str,
        trace: str,
        raised_at: float,
        place: str | None = None,
        foreign: ForeignCause = ForeignCause.UNKNOWN,
        op: str | None = None,
    ) -> None:
        self.rank_id, self.phase, self.cause, self.op = rank_id, str(phase), cause, op
        self.text, self.trace, self.raised_at, self.place = text, trace, raised_at, place
        where = "" if place is None else f" at {place}"
        super().__init__(f"{rank_id} failed {during(self.phase)}{where}: {text}", foreign=foreign)

    def seen_at(self, place: str) -> RankError:
        """Returns the same error with the line of code where the rank was last seen."""
        fields = ("rank_id", "phase", "cause", "text", "trace", "raised_at", "foreign", "op")
        return RankError(**{name: getattr(self, name) for name in fields}, place=place)

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as values for JSON, in which a rank sends the error to other ranks. Cuts long texts."""
        of = list(self.cause.of) if isinstance(self.cause, Repeats) else type(self.cause).__name__
        plain = {name: getattr(self, name) for name in ("phase", "raised_at", "place", "foreign", "op")}
        text, trace = self.text[:_TOLD_CHARACTERS], self.trace[-_TOLD_CHARACTERS:]
        return {**plain, "text": text, "trace": trace, "rank_id": list(self.rank_id), "cause": of}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RankError:
        """Rebuilds the error of another rank from the result of its `as_json`."""
        role, rank = fields["rank_id"]
        of = fields["cause"]
        cause = _PLAIN_CAUSES[of]() if isinstance(of, str) else Repeats(RankId(Role(of[0]), of[1]))
        known = {"rank_id": RankId(Role(role), rank), "cause": cause, "foreign": ForeignCause(fields["foreign"])}
        return cls(**{**fields, **known})


class JobError(RunError):
    """A job under a host framework has failed. The first line is the verdict, the second says what to do.

    Attributes:
        culprits: The ranks that the failure began with; empty if none is known.
        phase: The phase that the driver was in; None outside of phases.
        cause: The reason why the culprit failed; None if others only wait for it.
        fault: The kind of its failure, e.g. ``"OOM kill"``, one of `diagnostics.log_lines.Fault`; None if not known.
        evidence: The folder with stacks, the Flight Recorder's files and ``verdict.json``.
    """

    def __init__(
        self,
        *,
        verdict: str,
        advice: str,
        culprits: Iterable[RankId],
        phase: str | None,
        cause: Cause | None,
        evidence: str,
        fault: str | None = None,
    ) -> None:
        self.culprits, self.phase, self.cause, self.evidence = frozenset(culprits), phase, cause, evidence
        self.fault = fault
        super().__init__(f"{verdict}\n{advice}\nevidence in {evidence}", culprit=min(self.culprits, default=None))


class ClusterError(RunError):
    """Ray could not be started or joined."""


class NodeMismatchError(ClusterError):
    """Nodes that cannot run together: versions or code differ, or a node does not see the same files."""

    is_retryable = False


class NodeLostError(RunError):
    """One or more nodes of the cluster are gone, with all ranks on them.

    Attributes:
        nodes: Names of the lost nodes.
        phase: The phase that the run was in.
        ranks: The ranks that ran on these nodes.
    """

    def __init__(self, *, nodes: Sequence[str], phase: str, ranks: Iterable[RankId], detail: str) -> None:
        self.nodes, self.phase, self.ranks = tuple(nodes), str(phase), frozenset(ranks)
        subject = (
            f"node {nodes[0]} is lost, and with it"
            if len(nodes) == 1
            else f"nodes {', '.join(nodes)} are lost, and with them"
        )
        super().__init__(f"phase {phase}: {subject} {name_ranks(self.ranks)} ({detail})")


class CommunicatorError(RunError):
    """A process group is missing, unknown, or not the same on all ranks."""


class StoreLostError(CommunicatorError):
    """The process that owns the run's store has ended, and the store with it."""


class CheckpointError(RunError):
    """A checkpoint that is incomplete, damaged or could not be written."""


class UnsafeCheckpointError(CheckpointError):
    """A checkpoint whose pickles import a name that no checkpoint needs, or that refers to a file outside it."""


class WeightSyncError(RunError):
    """A weight sync that did not complete on every rank of the joint group."""


class RolloutError(RunError):
    """A rollout engine failed, or returned something that the run cannot use."""


class DivergedError(RunError):
    """An update whose loss or gradient is not finite; raised before it is synced or saved.

    Attributes:
        step: Training step, counted from 1.
    """

    is_retryable = False

    def __init__(self, *, step: int, loss: float, grad_norm: float) -> None:
        self.step = step
        super().__init__(
            f"step {step}: the update is not finite (loss {loss}, gradient norm {grad_norm}). It was not synced or "
            "saved. Resume from the previous checkpoint with a smaller actor.optim.lr"
        )


class LogprobGapError(RunError):
    """Trainer and rollout give different log-probabilities to the sampled tokens.

    Attributes:
        step: Training step, counted from 1.
        gap: Largest absolute difference over all sampled tokens of the step, in nats.
        bound: The configured bound, in nats.
    """

    is_retryable = False

    def __init__(self, *, step: int, gap: float, bound: float) -> None:
        self.step, self.gap, self.bound = step, gap, bound
        super().__init__(
            f"step {step}: log-probability gap {gap:.3g} between trainer and rollout exceeds {bound:.3g}: "
            "the rollout's weights are not the trainer's, or its arithmetic differs (dtype, kernels); "
            "to allow it raise rollout.max_logprob_gap"
        )


class Interrupted(RunError):
    """The run was ended by a signal.

    Attributes:
        signum: The signal number.
    """

    is_retryable = False

    def __init__(self, *, signum: int) -> None:
        self.signum = signum
        self.exit_code = 128 + signum
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
