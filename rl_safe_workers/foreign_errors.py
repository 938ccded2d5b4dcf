"""Classifies errors of torch, NCCL, gloo, Ray and the system; the only module that reads the text of foreign errors.

torch has no types for most of these errors, so only their messages tell them apart. A message that fits no pattern is
classified as unknown, never guessed. ``tests/unit/foreign_messages.json`` holds real messages of each kind with their
sources.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from enum import StrEnum


class ForeignCause(StrEnum):
    """The meaning of an error that is not ours."""

    UNKNOWN = "unknown"
    """Any other error."""
    TIMEOUT = "timeout"
    """A collective, a store or another process did not answer in time."""
    PEER_LOST = "peer lost"
    """The connection to another rank broke, or the other process is dead."""
    STORE_LOST = "store lost"
    """The connection to the store's server broke."""
    OUT_OF_MEMORY = "out of memory"
    """A device or the host has no memory left."""
    NO_SPACE = "no space"
    """A file system has no space left."""
    IMPORT = "import error"
    """A module is not there, or cannot be imported."""
    SHAPES = "different shapes"
    """Ranks came to one collective with tensors of different sizes."""

    @property
    def is_about_others(self) -> bool:
        """True if the process with this error only waited for other processes."""
        return self in (ForeignCause.TIMEOUT, ForeignCause.PEER_LOST, ForeignCause.STORE_LOST)


_FULL = (errno.ENOSPC, errno.EDQUOT)
_STORE_IS_GONE = ("Broken pipe", "Connection reset by peer")
"""The whole message of torch's DistNetworkError if the store's server has ended."""
PATTERNS: Mapping[ForeignCause, tuple[str, ...]] = {
    # First, because a message about a process that ran out of memory may also report it as a lost peer.
    ForeignCause.OUT_OF_MEMORY: (
        r"CUDA out of memory\.",
        r"CUDA error: out of memory",
        r"Cuda failure (\d+ )?'out of memory'",
        r"Failed to CUDA calloc \d+ bytes",
        r"can't allocate memory: you tried to allocate",
        r"due to the node running low on memory",
    ),
    ForeignCause.NO_SPACE: (r"No space left on device", r"\ALocal disk is full"),
    ForeignCause.IMPORT: (r"\A(ModuleNotFoundError|ImportError): ",),
    ForeignCause.SHAPES: (r"op\.preamble\.length <= op\.nbytes",),  # gloo
    ForeignCause.STORE_LOST: (
        r"Failed to (recv, got|send, sent) 0 bytes\. Connection was likely closed",
        r"(sendBytes|recvValue) failed on SocketImpl\(",
        r"maybe TCPStore server has shut down too early",
    ),
    ForeignCause.PEER_LOST: (
        # gloo
        r"Connection closed by peer \[",
        r"Read error \[[^]]*\](:\d+)?: Connection reset by peer",
        # NCCL
        r"Connection closed by remote peer",
        r"ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely",
        r"remote process exited or there was a network error",
        r"Call to recv from \S+ failed : (Connection reset by peer|Broken pipe)",
        # Ray
        r"The actor died unexpectedly before finishing this task",
        r"The actor is dead because its (owner|worker process) has died",
        r"The worker died unexpectedly while executing this task",
        r"Task failed because the node it was running on is dead or unavailable",
        r"The task's local raylet died",
        r"The object's owner has exited",
    ),
    ForeignCause.TIMEOUT: (
        # gloo
        r"Timed out waiting \d+ms for (send|recv) operation to complete",
        r"Application timeout caused pair closure",
        r"Connect timeout \[",
        r"failed to pass monitoredBarrier in \d+ ms",
        # torch's stores
        r"(wait|barrier) timeout after \d+ms, keys?: ",
        r"Timeout waiting for key: \S+ after \d+ ms",
        r"\A(Socket Timeout|Wait timeout|Operation timed out!)(\n|\Z)",
        r"via c10d key-value store by key '\S*', but store->get\('\S*'\) got error: Socket Timeout",
        r"Timed out after \d+ seconds waiting for (clients|workers)\. \d+/\d+ (clients|workers) joined",
        r"The client socket has timed out after \S+ while trying to connect to \(",
        r"Timed out initializing process group in store based barrier",
        r"Timed out waiting on barrier on rank \d+, for key prefix: ",
        # NCCL's watchdog in torch
        r"Watchdog caught collective operation timeout: WorkNCCL\(",
        # Ray
        r"Get timed out: some object\(s\) not ready",
    ),
}
"""Regular expressions for the messages of each kind. The first kind that matches counts."""
_KINDS = {kind: re.compile("|".join(patterns)) for kind, patterns in PATTERNS.items()}


def classify(error: BaseException | str) -> ForeignCause:
    """Classifies an error of another library.

    Args:
        error: The error, or its text. The error itself is better, because its type counts, too.

    Returns:
        The kind. It is ``UNKNOWN`` for every type that the libraries above do not raise, such as an AssertionError or
        a requests.Timeout, with any text. It is also ``UNKNOWN`` for an OSError other than a full file system.
    """
    if isinstance(error, str):
        return _of_text(error)
    # Compared by name, so that Ray need not be imported. Ray's timeout is an OSError, too.
    is_of_ray = any(cls.__module__.partition(".")[0] == "ray" for cls in type(error).__mro__)
    if isinstance(error, MemoryError):
        return ForeignCause.OUT_OF_MEMORY
    if isinstance(error, ImportError):
        return ForeignCause.IMPORT
    if isinstance(error, OSError) and not is_of_ray:
        return ForeignCause.NO_SPACE if error.errno in _FULL else ForeignCause.UNKNOWN
    if not is_of_ray and not isinstance(error, RuntimeError):
        return ForeignCause.UNKNOWN
    text = str(error)
    if type(error).__name__ == "DistNetworkError" and text.partition("\n")[0] in _STORE_IS_GONE:
        return ForeignCause.STORE_LOST
    return _of_text(text)


def _of_text(text: str) -> ForeignCause:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(text)), ForeignCause.UNKNOWN)
