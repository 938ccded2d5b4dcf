"""NeMo RL's import of HF weights, whole or absent.

NeMo RL takes a conversion for finished if its folder ``iter_0000000`` is there (models/megatron/setup.py:579), which a
run that was killed while it saved leaves behind, too. Here the import goes to a directory with another name, which gets
its own once every rank has written; one that is not finished is made anew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rl_safe_workers.adapters.hosting import HostedTrainer
from rl_safe_workers.checkpoint.folders.lock import exclusive
from rl_safe_workers.checkpoint.folders.ownership import MARKER
from rl_safe_workers.checkpoint.folders.publish import (
    make_parent,
    pending_path,
    publish,
    removed_on_failure,
    start_pending,
)
from rl_safe_workers.errors import CheckpointError, RlSafeError
from rl_safe_workers.foreign_files import printable
from rl_safe_workers.lifecycle import Phase

logger = logging.getLogger(__name__)

ITERATION = "iter_0000000"
CONFIG = "run_config.yaml"
"""The last file that Bridge's save writes (training/checkpointing.py:1483)."""
_FILES = (f"{ITERATION}/.metadata", f"{ITERATION}/metadata.json", f"{ITERATION}/{CONFIG}")
TRACKER = "latest_checkpointed_iteration.txt"
_OF_AN_IMPORT = frozenset({ITERATION, TRACKER, "latest_train_state.pt", MARKER})
"""Contents of an import of NeMo RL's. A directory that holds anything else is someone else's."""


def is_complete(path: Path) -> bool:
    """Returns True if a conversion is there to its last file."""
    return all((path / name).is_file() for name in (*_FILES, TRACKER))


def is_from_hf(config: Mapping[str, Any]) -> bool:
    """Returns True if the first weights are HF's: with ``pretrained_checkpoint`` nothing is converted."""
    return config.get("pretrained_checkpoint") is None


def convert(
    process: HostedTrainer,
    run_import: Callable[[str, bool], None],
    path: str,
    *,
    force: bool,
) -> None:
    """Runs NeMo RL's import, unless its result is there. Collective over: the training world.

    Args:
        process: This rank's.
        run_import: NeMo RL's import; takes where to write, and whether a conversion is there.
        path: Where the conversion shall be, on storage that every rank sees.
        force: Whether to convert although it is there.

    Raises:
        CheckpointError: On every rank, if one has failed. A directory that was at ``path`` is unchanged.
        PhaseTimeoutError: If a rank does not come in time; names it.
    """
    final = Path(path).absolute()
    pending = pending_path(final)
    with ExitStack() as stack:

        def decide() -> bool:
            if is_complete(final) and not force:
                return False  # without a lock: it may be where nothing can be written
            make_parent(final)
            # Two runs take turns; the second finds what the first has made.
            lock = final.with_name(f"{final.name}.lock")
            stack.enter_context(
                exclusive(lock, timeout=process.trainer.remaining() / 2, setting="rl_safe.timeouts.convert")
            )  # on rank 0
            if is_complete(final) and not force:
                return False
            if os.path.lexists(final):
                _check_is_import(final)
                logger.warning("%s is %s: converting anew", final, "replaced" if force else "not complete")
            start_pending(final, what="an import of HF weights")
            # Removed by rank 0 alone, which has made it.
            stack.enter_context(removed_on_failure(pending, what="the conversion"))
            return True

        if not process.trainer.together(Phase.CONVERT, decide):
            run_import(str(final), True)
            return
        try:
            run_import(str(pending), False)
        except RlSafeError:
            raise  # every rank's
        except Exception as error:
            process.fail(Phase.CONVERT, error)
        process.trainer.together(Phase.CONVERT, lambda: _publish(pending, final))


def _check_is_import(final: Path) -> None:
    """Refuses to replace what is no import of NeMo RL's, complete or not.

    Raises:
        CheckpointError: One line, with the name of the directory and of what is in it.
    """
    shown = printable(str(final))
    if final.is_symlink() or not final.is_dir():
        raise CheckpointError(f"{shown} is a link or not a directory: it is left alone; move it away")
    if strangers := sorted({path.name for path in final.iterdir()} - _OF_AN_IMPORT):
        stranger = printable(strangers[0])
        raise CheckpointError(f"{shown} holds {stranger}, which is not an import's: it is left alone; move it away")


def _publish(pending: Path, final: Path) -> None:
    config = pending / ITERATION / CONFIG
    # It names the place that it was saved to.
    config.write_text(config.read_text(encoding="utf-8").replace(str(pending), str(final)), encoding="utf-8")
    if is_replacing := os.path.lexists(final):
        _check_is_import(final)
    publish(pending, final, overwrite=is_replacing)
    logger.info("converted to %s", final)
