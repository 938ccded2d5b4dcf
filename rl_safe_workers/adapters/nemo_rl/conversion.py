"""Makes NeMo RL's import of HF weights atomic: its result is complete or absent.

NeMo RL takes a conversion for finished if the folder ``iter_0000000`` exists (models/megatron/setup.py:579). But a run
that was killed during the save also leaves this folder behind. Here the import writes to a directory with a temporary
name. The directory gets its final name once every rank has written. The next run repeats an unfinished import.
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
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import printable
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.setting_names import timeout_setting

logger = logging.getLogger(__name__)

ITERATION = "iter_0000000"
CONFIG = "run_config.yaml"
"""The last file that Bridge's save writes (training/checkpointing.py:1483)."""
_FILES = (f"{ITERATION}/.metadata", f"{ITERATION}/metadata.json", f"{ITERATION}/{CONFIG}")
TRACKER = "latest_checkpointed_iteration.txt"
_OF_AN_IMPORT = frozenset({ITERATION, TRACKER, "latest_train_state.pt", MARKER})
"""Contents of a directory with an import of NeMo RL's. A directory with any other content is not an import."""


def is_complete(path: Path) -> bool:
    """Returns True if a conversion exists and has its last file."""
    return all((path / name).is_file() for name in (*_FILES, TRACKER))


def is_from_hf(config: Mapping[str, Any]) -> bool:
    """Returns True if training starts from HF weights. With ``pretrained_checkpoint``, nothing is converted."""
    return config.get("pretrained_checkpoint") is None


def convert(
    process: HostedTrainer,
    run_import: Callable[[str, bool], None],
    path: str,
    *,
    force: bool,
) -> None:
    """Runs NeMo RL's import, unless its result exists. Collective over: the training world.

    Args:
        process: The trainer process of this rank.
        run_import: NeMo RL's import; takes the path to write to, and whether a conversion exists there.
        path: The directory of the conversion, on storage that every rank sees.
        force: Whether to convert even if a conversion exists.

    Raises:
        CheckpointError: On every rank, if a rank has failed. An existing directory at ``path`` stays unchanged.
        PhaseTimeoutError: If a rank does not come in time; names it.
    """
    final = Path(path).absolute()
    pending = pending_path(final)
    with ExitStack() as stack:

        def decide() -> bool:
            if is_complete(final) and not force:
                return False  # without a lock, because the storage may be read-only
            make_parent(final)
            # Two runs take turns. The second one finds the result of the first.
            lock = final.with_name(f"{final.name}.lock")
            stack.enter_context(
                exclusive(lock, timeout=process.trainer.remaining() / 2, setting=timeout_setting(Phase.CONVERT))
            )  # on rank 0
            if is_complete(final) and not force:
                return False
            if os.path.lexists(final):
                _check_is_import(final)
                logger.warning("%s is %s: converting anew", final, "replaced" if force else "not complete")
            start_pending(final, what="an import of HF weights")
            # Only rank 0 removes the directory, because rank 0 has made it.
            stack.enter_context(removed_on_failure(pending, what="the conversion"))
            return True

        if not process.trainer.together(Phase.CONVERT, decide):
            run_import(str(final), True)
            return
        with process.failing_together(Phase.CONVERT):
            run_import(str(pending), False)
        process.trainer.together(Phase.CONVERT, lambda: _publish(pending, final))


def _check_is_import(final: Path) -> None:
    """Refuses to replace a path that is not an import of NeMo RL's, complete or incomplete.

    Raises:
        CheckpointError: If the path is not such an import. Names the path and the unexpected content.
    """
    shown = printable(str(final))
    if final.is_symlink() or not final.is_dir():
        raise CheckpointError(f"{shown} is a link or not a directory: it is left alone; move it away")
    if strangers := sorted({path.name for path in final.iterdir()} - _OF_AN_IMPORT):
        stranger = printable(strangers[0])
        raise CheckpointError(f"{shown} holds {stranger}, which is not an import's: it is left alone; move it away")


def _publish(pending: Path, final: Path) -> None:
    config = pending / ITERATION / CONFIG
    # The file contains the path that it was saved to.
    config.write_text(config.read_text(encoding="utf-8").replace(str(pending), str(final)), encoding="utf-8")
    if is_replacing := os.path.lexists(final):
        _check_is_import(final)
    publish(pending, final, overwrite=is_replacing)
    logger.info("converted to %s", final)
