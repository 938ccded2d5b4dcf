"""Every error that this package raises.

    RlSafeError
    ├── UsageError                    the caller can mend it; exit code 2, nothing written
    │   ├── ConfigError               unknown key, wrong type, contradictory settings
    │   ├── LayoutError               sizes that do not factor or do not divide the model
    │   ├── ModelError                a missing or unsupported model directory
    │   ├── DataError                 a missing or malformed prompt file
    │   ├── RewardFunctionError       a reward function that cannot be imported or called
    │   ├── ResourceError             too few CPUs or GPUs for the layout
    │   └── CheckpointMismatchError   a checkpoint of another model or layout
    └── RunError                      the world failed; exit code 1
        ├── LifecycleError            a phase entered before what it needs
        ├── PhaseTimeoutError         a phase passed its deadline; names who is missing
        ├── RankError                 one rank raised; carries its role, rank, phase and traceback
        ├── ClusterError              Ray could not be started or joined
        │   └── NodeMismatchError     nodes with other versions, other code or other files
        ├── NodeLostError             a node of the cluster is gone; carries its name and who was on it
        ├── CommunicatorError         a group is missing, unknown or different between ranks
        │   └── StoreLostError        the process that owns the run's store has ended
        ├── CheckpointError           a checkpoint that is incomplete or could not be written
        │   └── UnsafeCheckpointError   one that asks for code that no checkpoint needs
        ├── DivergedError             an update whose loss or gradient is not finite
        ├── RolloutError              a rollout that returned what the run cannot use
        ├── WeightSyncError           a weight sync that did not complete on every rank
        ├── LogprobGapError           trainer and rollout disagree about the sampled tokens
        └── Interrupted               Ctrl-C, SIGTERM, SIGHUP; exit code 128 + signal number

Errors cross process boundaries through Ray, so each one pickles with its fields.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any


def _rebuild(cls: type[RlSafeError], message: str, fields: dict[str, Any]) -> RlSafeError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


class RlSafeError(Exception):
    """Root of the hierarchy. ``str(error)`` is one line that says what to do.

    Attributes:
        culprit: The training rank that has failed, in an error that every rank raises because of it; else None.
    """

    exit_code = 1
    culprit: int | None = None

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

    may_pass = True
    """Whether the same run may go well if it is started again."""

    def __init__(self, *args: object, culprit: int | None = None) -> None:
        super().__init__(*args)
        if culprit is not None:
            self.culprit = culprit


class LifecycleError(RunError):
    """A phase was entered before the phases that it depends on, or after teardown."""

    may_pass = False


def first_line(error: BaseException) -> str:
    r"""Returns what an error says, without the traces that Ray's add to it.

    >>> first_line(ValueError("no\nTraceback"))
    'no'
    """
    return (str(error).splitlines() or [""])[0]


def format_ranks(ranks: Sequence[int]) -> str:
    """Shortens sorted ranks to ranges.

    >>> format_ranks([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


class PhaseTimeoutError(RunError):
    """A phase passed its deadline.

    Attributes:
        phase: Name of the phase, e.g. ``"bootstrap"``.
        group: The group that was waited on, e.g. ``"training world"``.
        missing: Ranks that had not arrived when the deadline passed.
        waited_s: Seconds waited.
        setting: Dotted configuration key that moves the deadline.
        detail: What else is known, e.g. what ranks have said.
    """

    def __init__(
        self, *, phase: str, group: str, missing: Sequence[int], waited_s: float, setting: str, detail: str = ""
    ) -> None:
        self.phase, self.waited_s, self.setting = phase, waited_s, setting
        self.blame(group, missing, detail)

    def blame(self, group: str, missing: Sequence[int], detail: str = "") -> None:
        """Says who is missing: another than at first, once it is known who waits, and for whom."""
        self.group, self.missing, self.detail = group, tuple(missing), detail
        who = f"rank {format_ranks(missing)} of {group} did not arrive" if missing else f"{group} did not finish"
        tail = f" ({detail})" if detail else ""
        self.args = (
            f"phase {self.phase}: {who} within {self.waited_s:.1f} s{tail}; to wait longer raise {self.setting}",
        )


class RankError(RunError):
    """One rank raised.

    Attributes:
        role: ``"trainer"`` or ``"rollout"``.
        rank: The rank within its role.
        phase: The phase that the rank was in.
        cause: ``"TypeName: message"`` of the original exception.
        trace: The remote traceback as text.
        raised_at: Unix time of the exception (`lifecycle.unix_now`), to find the first of several; 0 for a process that
            died.
        in_vain: Whether the rank only waited in vain for others: it is not the culprit.
        follows: Whether it only says what another rank has failed with.
    """

    def __init__(
        self,
        *,
        role: str,
        rank: int,
        phase: str,
        cause: str,
        trace: str,
        raised_at: float,
        in_vain: bool = False,
        follows: bool = False,
    ) -> None:
        self.role, self.rank, self.phase = role, rank, phase
        self.cause, self.trace, self.raised_at = cause, trace, raised_at
        self.in_vain, self.follows = in_vain, follows
        super().__init__(f"{role} rank {rank} failed in phase {phase}: {cause}")


class ClusterError(RunError):
    """Ray could not be started or joined."""


class NodeMismatchError(ClusterError):
    """Nodes that a run cannot go on together: other versions, other code, or files that one does not see."""

    may_pass = False


class NodeLostError(RunError):
    """A node of the cluster is gone, and all ranks on it.

    Attributes:
        nodes: Names of the nodes.
        phase: The phase that the run was in.
    """

    def __init__(self, *, nodes: Sequence[str], phase: str, ranks: str, detail: str) -> None:
        self.nodes, self.phase = tuple(nodes), phase
        word = "node" if len(nodes) == 1 else "nodes"
        super().__init__(f"phase {phase}: {word} {', '.join(nodes)} is lost, and with it {ranks} ({detail})")


class CommunicatorError(RunError):
    """A group is missing, unknown, or not the same on all ranks."""


class StoreLostError(CommunicatorError):
    """The process that owns the run's store has ended, and the store with it."""


class CheckpointError(RunError):
    """A checkpoint that is incomplete, damaged or could not be written."""


class UnsafeCheckpointError(CheckpointError):
    """A checkpoint whose pickles ask for a name that no checkpoint needs, or for a file outside it."""


class WeightSyncError(RunError):
    """A weight sync that did not complete on every rank of the joint group."""


class RolloutError(RunError):
    """The rollout returned something that the run cannot use."""


class DivergedError(RunError):
    """An update whose loss or gradient is not finite; raised before it is synced or saved.

    Attributes:
        step: Training step, counted from 1.
    """

    may_pass = False

    def __init__(self, *, step: int, loss: float, grad_norm: float) -> None:
        self.step = step
        super().__init__(
            f"step {step}: the update is not finite (loss {loss}, gradient norm {grad_norm}); nothing of it was synced "
            "or saved: resume from the checkpoint before with a smaller actor.optim.lr"
        )


class LogprobGapError(RunError):
    """Trainer and rollout give different log-probabilities to the sampled tokens.

    Attributes:
        step: Training step, counted from 1.
        gap: Largest absolute difference over all sampled tokens of the step, in nats.
        bound: The configured bound, in nats.
    """

    may_pass = False

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

    may_pass = False

    def __init__(self, *, signum: int) -> None:
        self.signum = signum
        self.exit_code = 128 + signum
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
