"""An export of ms-swift's, whole or absent: it goes to a directory with another name, which gets its own at the end.

ms-swift refuses to export to a directory that exists. After an export that was killed, a user has to remove that
directory. Here the next export removes it.
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
"""ms-swift's record of its arguments, which names the place."""


@contextmanager
def exported(process: HostedTrainer, args: Any) -> Iterator[None]:
    """Has the body export to a directory of its own, and publishes it. Collective over: the training world.

    Where something has the name already, which needs ``--exist_ok``, the body writes into it, as ms-swift does.

    Args:
        process: This rank's.
        args: ms-swift's ``MegatronExportArguments``, whose ``output_dir`` is the final place.

    Raises:
        CheckpointError: On every rank, if one has failed.
        PhaseTimeoutError: If a rank does not come in time; names it.
    """
    final = Path(args.output_dir).absolute()
    pending = pending_path(final)
    with ExitStack() as stack:

        def start() -> bool:
            if os.path.lexists(final):
                return False
            start_pending(final, what="an export")
            # Removed by rank 0 alone, which has made it.
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
