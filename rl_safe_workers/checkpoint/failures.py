"""What fails in a save, a load or a conversion, as an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rl_safe_workers.errors import CheckpointError, RlSafeError


def as_checkpoint_error(error: Exception) -> RlSafeError:
    """Returns an error of ours as it is, and any other as the cause of a CheckpointError."""
    if isinstance(error, RlSafeError):
        return error
    failure = CheckpointError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


@contextmanager
def checkpoint_errors() -> Iterator[None]:
    """Raises what fails in the body, or in the function that it decorates, as `as_checkpoint_error`."""
    try:
        yield
    except RlSafeError:
        raise
    except Exception as error:
        raise as_checkpoint_error(error) from error
