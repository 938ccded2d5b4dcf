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
"""The smallest piece in which CUDA hands out memory; less is not seen."""
READING_S = 0.5
"""How long the readings of memory in one body may take; NVML takes milliseconds for one, and more on a busy GPU."""
ALWAYS_READ = 4
"""The first calls of an operation of a group in a body are looked at even then."""
_OF_ALL_TO_ALL = frozenset({OpClass.BATCHED_P2P, OpClass.ROOT_EXCHANGE})
"""Op classes that use the connections of all_to_all."""


class LateWatch:
    """Looks at every collective while it is asked to.

    Attributes:
        found: What was noticed, each op class of a group once.
    """

    def __init__(self, connected: Mapping[str, frozenset[OpClass]], *, probe: Callable[[], int] | None = None) -> None:
        """Records what needs no notice.

        Args:
            connected: Op classes that a bootstrap has connected, by torch's name of the group.
            probe: Tells the device memory that is not torch's; None where there is no device to ask.
        """
        self._connected = {name: set(classes) for name, classes in connected.items()}
        self._probe = probe
        self._read_s = 0.0
        self._calls: Counter[tuple[str, str]] = Counter()
        self.found: list[LateAllocation] = []

    @contextmanager
    def watching(self, phase: str) -> Iterator[list[LateAllocation]]:
        """Watches this thread's collectives, and those of its backward passes; yields what is found meanwhile.

        Reading the memory takes some `READING_S` at most: a step of a large model has very many collectives.
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
        """Warns of what was found, or raises CommunicatorError if it is to be refused."""
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
        """Returns True if memory is to be read around this call."""
        if self._probe is None:
            return False
        name = (group.group_name, operation)
        self._calls[name] += 1
        return self._calls[name] <= ALWAYS_READ or self._read_s < READING_S

    def _measured(self, call: Callable[[], Any]) -> tuple[Any, int]:
        """Does a call; returns its value, and the bytes of device memory that it has taken."""
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
        """Returns True if a group carries a class for the first time. One rank alone has nobody to connect to."""
        known = self._connected.setdefault(group.group_name, set())
        is_known = found in known or (found in _OF_ALL_TO_ALL and OpClass.ALL_TO_ALL in known)
        if found is not None:
            known.add(found)
        return not is_known and group.size() > 1
