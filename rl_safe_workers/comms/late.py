"""Finds device memory that a collective takes in the first training steps, and names the group that took it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from rl_safe_workers.comms.report import LateAllocation
from rl_safe_workers.comms.trace import CollectiveTrace, op_class
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.topology.groups import OpClass

logger = logging.getLogger(__name__)

NOTICED_BYTES = 2 * 2**20
"""Smallest growth that counts: CUDA allocates memory in pieces of this size."""
READING_S = 0.5
"""Longest total time for memory readings in one body. NVML takes milliseconds for one, and more on a busy GPU."""
ALWAYS_READ = 4
"""Number of calls of each operation on each group that are measured even after `READING_S`."""
_OF_ALL_TO_ALL = frozenset({OpClass.BATCHED_P2P, OpClass.ROOT_EXCHANGE})
"""Op classes that use the connections of all_to_all."""


class LateWatch:
    """Finds collectives that take memory or use an op class that is not connected, while `watching` runs.

    Attributes:
        found: The findings, each new op class of a group once.
    """

    def __init__(self, connected: Mapping[str, frozenset[OpClass]], *, probe: Callable[[], int] | None = None) -> None:
        """Stores the arguments.

        Args:
            connected: Op classes that a bootstrap has connected, by torch's name of the group.
            probe: Returns the device memory outside torch's allocator; None if there is no device to ask.
        """
        self._connected = {name: set(classes) for name, classes in connected.items()}
        self._probe = probe
        self._read_s = 0.0
        self._calls: Counter[tuple[str, str]] = Counter()
        self.found: list[LateAllocation] = []

    @contextmanager
    def watching(self, phase: str) -> Iterator[list[LateAllocation]]:
        """Watches collectives of this thread and its backward passes. Yields a list that has the findings at the end.

        Memory readings take little more than `READING_S`, because a step of a large model has very many collectives.
        """
        before = len(self.found)
        self._read_s, self._calls = 0.0, Counter()
        new: list[LateAllocation] = []

        def issue(group: dist.ProcessGroup, operation: str, call: Callable[[], Any]) -> Any:
            return self._issue(group, operation, call, phase)

        try:
            with CollectiveTrace(issue):
                yield new
        finally:
            new += self.found[before:]

    @staticmethod
    def report(found: Sequence[LateAllocation], *, who: str, refuse: bool) -> None:
        """Logs a warning about findings; raises CommunicatorError instead if ``refuse`` is True."""
        if not found:
            return
        text = f"{who}: the bootstrap has missed " + "; ".join(map(str, found))
        if refuse:
            raise CommunicatorError(text)
        logger.warning("%s", text)

    def _issue(self, group: dist.ProcessGroup, operation: str, call: Callable[[], Any], phase: str) -> Any:
        value, taken = self._measured(call) if self._reads(group, operation) else (call(), None)
        found = op_class(operation)
        if self._is_new(group, found) or (taken is not None and taken >= NOTICED_BYTES):
            self.found.append(
                LateAllocation(
                    group=group.group_desc,
                    ranks=tuple(dist.get_process_group_ranks(group)),
                    op_class=found,
                    operation=operation,
                    phase=phase,
                    bytes=taken,
                )
            )
        return value

    def _reads(self, group: dist.ProcessGroup, operation: str) -> bool:
        """Returns True if the watch should read the memory before and after this call."""
        if self._probe is None:
            return False
        name = (group.group_name, operation)
        self._calls[name] += 1
        return self._calls[name] <= ALWAYS_READ or self._read_s < READING_S

    def _measured(self, call: Callable[[], Any]) -> tuple[Any, int]:
        """Makes a call; returns its value, and the bytes of device memory that it took."""
        before = self._used()
        value = call()
        return value, self._used() - before

    def _used(self) -> int:
        assert self._probe is not None, "see _reads"
        began_s = time.perf_counter()
        used = self._probe()
        self._read_s += time.perf_counter() - began_s
        return used

    def _is_new(self, group: dist.ProcessGroup, found: OpClass | None) -> bool:
        """Returns True if a group of several ranks carries an op class for the first time."""
        known = self._connected.setdefault(group.group_name, set())
        is_known = found in known or (found in _OF_ALL_TO_ALL and OpClass.ALL_TO_ALL in known)
        if found is not None:
            known.add(found)
        return not is_known and group.size() > 1
