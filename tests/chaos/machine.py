"""The faults of a machine, and what a test has seen that it has made of a run."""

from __future__ import annotations

from enum import StrEnum

WAIT_S = 6.0
"""Timeout of a phase in which a rank is waited for that was stopped."""


class MachineFault(StrEnum):
    """A fault of the machine; each is one row of the page."""

    FULL_DISK = "the disk is full in the middle of a save"
    FULL_DISK_IN_BACKGROUND = "the same, of a save in the background"
    FULL_OUTPUT = "the disk of the run's folder is full when the first metrics are written"
    STOPPED_TRAINER = (
        "a trainer is stopped (SIGSTOP) in its phase, and continued after the driver has named the hung rank"
    )
    STOPPED_ENGINE = "the same, of a rollout engine"
    STOPPED_IDLE_TRAINER = "the same, of a trainer that waits for the engines"
    STOPPED_IDLE_ENGINE = "the same, of an engine that waits for the trainers"
    STOPPED_AND_STARTED_AGAIN = "a trainer is stopped in a save, and the run may start again"
    CLOCK_FORWARD_AND_BACK = "the wall clock jumps an hour forward, and two back"
    CLOCK_BACK_AND_FORWARD = "the wall clock jumps an hour back, and two forward"
    BARE = "`HOME` cannot be written, the locale is ASCII, and at most 256 files can be open at once"
    FULL_TEMP = "`TMPDIR` is full"
    TEMP_FILLS_UP = "`TMPDIR` fills up while the run trains"
    LONG_TEMP = "`TMPDIR` has a path too long for sockets"


NO_SPACE = (
    "exit code 1, and an error with the path and `No space left on device`; the checkpoint before it is whole, and a "
    "run goes on from it once there is room"
)
STOPPED = "exit code 1; the verdict names the rank, and says that it is stopped"
AS_ELSE = "the run completes, with the rewards and the checkpoint of an undisturbed one"
REFUSED = "exit code 2, and one line that names `TMPDIR`; nothing is started or written"

ENDS = {
    MachineFault.FULL_DISK: NO_SPACE,
    MachineFault.FULL_DISK_IN_BACKGROUND: NO_SPACE,
    MachineFault.FULL_OUTPUT: "exit code 1, and an error with the folder and `No space left on device`",
    MachineFault.STOPPED_TRAINER: STOPPED,
    MachineFault.STOPPED_ENGINE: STOPPED,
    MachineFault.STOPPED_IDLE_TRAINER: STOPPED,
    MachineFault.STOPPED_IDLE_ENGINE: STOPPED,
    MachineFault.STOPPED_AND_STARTED_AGAIN: AS_ELSE,
    MachineFault.CLOCK_FORWARD_AND_BACK: AS_ELSE,
    MachineFault.CLOCK_BACK_AND_FORWARD: AS_ELSE,
    MachineFault.BARE: AS_ELSE,
    MachineFault.FULL_TEMP: REFUSED,
    MachineFault.TEMP_FILLS_UP: AS_ELSE,
    MachineFault.LONG_TEMP: REFUSED,
}
"""Claims that the tests of a fault assert, in a few words."""
