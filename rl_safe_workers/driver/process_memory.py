"""How much memory all processes of a run take together."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Self

import psutil

logger = logging.getLogger(__name__)

MAX_CPU_SHARE = 0.04
"""Largest share of one core that sampling may take; the interval grows until it holds."""

_LAST_SAMPLE_S = 10.0


class MemorySampler:
    """Samples the memory of this process and all its descendants in a daemon thread, and keeps the peak.

    Memory is counted as PSS (proportional set size, from ``/proc/PID/smaps_rollup``): a page that n processes map
    counts 1/n in each, so the sum over processes is what they really hold. The sum of RSS counts such pages n times:
    shared libraries, and Ray's object store, once for each worker that maps it. Where PSS cannot be read, RSS stands
    in, with a warning.

    To read a PSS the kernel walks the page table of the process, milliseconds for each gigabyte, so samples move apart
    when they become expensive (see ``MAX_CPU_SHARE``). A peak between two samples is missed; ``sample`` takes one now.

    Only processes of this machine that descend from this one are seen: all of them when the run started its own Ray,
    the driver alone when it joined a running cluster.

    Attributes:
        interval_s: Seconds between two samples, at least.
        samples: Number of samples taken.
        cpu_s: Seconds of CPU that sampling took.
    """

    def __init__(self, interval_s: float = 0.5) -> None:
        self.interval_s = interval_s
        self.samples = 0
        self.cpu_s = 0.0
        self._root = psutil.Process()
        self._peak_bytes = 0
        self._warned = False
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def peak_bytes(self) -> int:
        """Largest sum over all processes at one time, in bytes."""
        return self._peak_bytes

    def start(self) -> None:
        """Starts sampling. Idempotent; may follow ``stop``, and keeps the peaks."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stops sampling and waits for a sample in progress, but not for one that is stuck in a process. Idempotent."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join(_LAST_SAMPLE_S)
            self._thread = None

    def sample(self) -> int:
        """Takes one sample now, and returns the sum over all processes in bytes. Thread-safe."""
        with self._lock:
            started_s = time.thread_time()
            total = self._measure()
            self._peak_bytes = max(self._peak_bytes, total)
            self.samples += 1
            self.cpu_s += time.thread_time() - started_s
            return total

    def _run(self) -> None:
        while not self._stopping.is_set():
            cpu_before_s = self.cpu_s
            self.sample()
            cost_s = self.cpu_s - cpu_before_s
            self._stopping.wait(max(self.interval_s, cost_s / MAX_CPU_SHARE))

    def _measure(self) -> int:
        total = self._memory_bytes(self._root)
        for process in self._root.children(recursive=True):
            try:
                total += self._memory_bytes(process)
            except psutil.NoSuchProcess:
                continue  # ended since it was listed, or a zombie: holds no memory
        return total

    def _memory_bytes(self, process: psutil.Process) -> int:
        try:
            return int(process.memory_full_info().pss)
        except (psutil.AccessDenied, AttributeError) as error:
            if not self._warned:
                self._warned = True
                logger.warning("PSS of process %d cannot be read (%r); RSS counts instead", process.pid, error)
            return int(process.memory_info().rss)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
