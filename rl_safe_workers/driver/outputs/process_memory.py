"""Measures the host memory of all processes of a run together."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Self

import psutil

logger = logging.getLogger(__name__)

MAX_CPU_SHARE = 0.04
"""Largest share of one core that sampling may take. The interval between samples grows to keep to it."""

_LAST_SAMPLE_S = 10.0


class MemorySampler:
    """Samples the memory of this process and all its descendants in a daemon thread, and keeps the peak.

    Memory is counted as PSS (proportional set size, from ``/proc/PID/smaps_rollup``). A page that n processes map
    counts 1/n in each, so the sum over processes is the memory that they really use. The sum of RSS counts such pages n
    times, for example shared libraries, and Ray's object store in each worker that maps it. If PSS cannot be read, RSS
    is used, with a warning.

    To read PSS the kernel walks the page table of the process, which takes milliseconds per gigabyte. If samples become
    expensive, the interval grows (see ``MAX_CPU_SHARE``). A peak between two samples is missed. ``sample`` takes a
    sample at once.

    Only descendants of this process on this machine are counted. If the run started its own Ray, these are all
    processes of the run; if it joined a running cluster, only the driver is counted.

    Attributes:
        interval_s: Shortest time in seconds between two samples.
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
        """The largest sum in bytes over all processes in one sample."""
        return self._peak_bytes

    def start(self) -> None:
        """Starts sampling. Idempotent. May follow ``stop``; the peak is kept."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stops sampling. Waits at most 10 s for a sample in progress. Idempotent."""
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
                continue  # the process has ended since it was listed, or is a zombie: it holds no memory
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
