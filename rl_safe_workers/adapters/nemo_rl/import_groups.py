"""Ends the groups that NeMo RL's import has made. Megatron only forgets them, and leaves their communicators alive.

``destroy_model_parallel`` after an import (models/megatron/setup.py:2036) destroys only gloo groups.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rl_safe_workers.comms.teardown import Named, end_together
from rl_safe_workers.compat import torch_groups
from rl_safe_workers.errors import CommunicatorError

logger = logging.getLogger(__name__)


def groups_now() -> frozenset[Any]:
    """Returns all groups of this process. Not collective."""
    return frozenset(torch_groups.registered_groups())


def end_groups_since(before: Collection[Any], *, timeout: timedelta) -> int:
    """Destroys the groups that were made after a call of `groups_now`. Collective over: their members.

    Args:
        before: The groups that `groups_now` returned.
        timeout: Longest time that this may take.

    Returns:
        The number of groups that were destroyed.

    Raises:
        CommunicatorError: If the ranks could not end the groups together. The groups are then aborted.
    """
    ours = [group for group in torch_groups.registered_groups() if group not in before]
    backends: list[Named] = [
        (f"{group.group_desc or group.group_name}", backend)
        for group in ours
        for backend in torch_groups.backends_of(group)
    ]
    failure = end_together(backends, timeout)
    for group in ours:
        dist.destroy_process_group(group)
    logger.info("ended the %d groups of the import", len(ours))
    if failure is not None:
        raise CommunicatorError(f"the groups of the import were aborted, not destroyed: {failure}") from failure
    return len(ours)
