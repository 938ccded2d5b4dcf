"""Makes an export of ms-swift's atomic: it writes to a directory with a temporary name, and renames it at the end.

ms-swift refuses to export to a directory that exists. So after a killed export, a user would have to remove the
directory. Here the next export removes the unfinished directory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rl_safe_workers.adapters.hosting import HostedTrainer
from rl_safe_workers.checkpoint.folders.publish import pending_path, publish, removed_on_failure, start_pending
from rl_safe_workers.lifecycle import Phase

logger = logging.getLogger(__name__)

ARGUMENTS = "args.json"
"""ms-swift's record of its arguments, which contains the path of the export."""


@contextmanager
def exported(process: HostedTrainer, args: Any) -> Iterator[None]:
    """Makes the body export to a temporary directory, then publishes it. Collective over: the training world.

    If the final directory exists already, which needs ``--exist_ok``, the body writes into it, as ms-swift does.

    Args:
        process: The trainer process of this rank.
        args: ms-swift's ``MegatronExportArguments``. ``output_dir`` is the final directory.

    Raises:
        CheckpointError: On every rank, if a rank has failed.
        PhaseTimeoutError: If a rank does not come in time; names it.
    """
    final = Path(args.output_dir).absolute()
    pending = pending_path(final)
    with ExitStack() as stack:

        def start() -> bool:
            if os.path.lexists(final):
                return False
            start_pending(final, what="an export")
            # Only rank 0 removes the directory, because rank 0 has made it.
            stack.enter_context(removed_on_failure(pending, what="the export"))
            return True

        if not process.trainer.together(Phase.CONVERT, start):
            with process.failing_together(Phase.CONVERT):
                yield
            return
        args.output_dir = str(pending)
        try:
            with process.failing_together(Phase.CONVERT):
                yield
        finally:
            args.output_dir = str(final)
        process.trainer.together(Phase.CONVERT, lambda: _publish(pending, final))


def _publish(pending: Path, final: Path) -> None:
    record = pending / ARGUMENTS
    if record.is_file():
        record.write_text(record.read_text(encoding="utf-8").replace(str(pending), str(final)), encoding="utf-8")
    publish(pending, final)
    logger.info("exported to %s", final)
