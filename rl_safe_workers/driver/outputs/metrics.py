"""Writes the metrics of a run: one JSON object per step, and TensorBoard events on request."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rl_safe_workers.errors import ConfigError

logger = logging.getLogger(__name__)

REWARD_MEAN = "reward/mean"
REWARD_MAX = "reward/max"
LOGPROB_GAP_MAX = "rollout/logprob_gap_max"
LOGPROB_GAP_MEAN = "rollout/logprob_gap_mean"
LOGPROB_GAP_MEDIAN = "rollout/logprob_gap_median"
RESPONSE_LENGTH_MEAN = "response_length/mean"
LOSS = "actor/loss"
KL = "actor/kl"
CLIP_FRACTION = "actor/clip_fraction"
GRAD_NORM = "actor/grad_norm"
LEARNING_RATE = "actor/lr"
STEP_SECONDS = "timing_s/step"
PROVED = "sync/proved"
NOT_PROVED = "sync/not_proved"
REDONE = "sync/redone"
PROOF_SECONDS = "timing_s/sync_proof"
ENGINES_LOST = "engines/lost"
ENGINES_SERVING = "engines/serving"
ENGINE_BACK_SECONDS = "timing_s/engine_back"
PEAK_MEMORY_GIB = "perf/peak_memory_gib"


def phase_seconds_name(phase: str) -> str:
    """Returns the name of the metric for the seconds of a phase in a step, e.g. ``timing_s/rollout``."""
    return f"timing_s/{phase}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTotal:
    """The totals of one phase over a run, measured in the driver.

    Example: ``PhaseTotal(count=20, total_s=14.2).mean_s == 0.71``
    """

    count: int = 0
    total_s: float = 0.0

    @property
    def mean_s(self) -> float:
        """The mean seconds of one pass through the phase; 0 if there was none."""
        return self.total_s / self.count if self.count else 0.0

    def plus(self, seconds: float) -> PhaseTotal:
        """Returns the totals with one more pass, which took ``seconds``."""
        return PhaseTotal(count=self.count + 1, total_s=self.total_s + seconds)


class _TensorBoardWriter:
    """Writes scalars as TensorBoard events, with the writer that torch.utils.tensorboard itself uses.

    Using that writer directly keeps torch out of the driver's process: the import takes 0.3 s, not several seconds.
    """

    def __init__(self, log_dir: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"trainer.logger names tensorboard, which cannot be imported ({error}): "
                "install rl-safe-workers[tensorboard] or take it out of trainer.logger"
            ) from error

        self._event, self._summary, self._session_log = Event, Summary, SessionLog
        self._writer = EventFileWriter(str(log_dir))

    def write(self, step: int, scalars: Iterable[tuple[str, float]]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def forget_from(self, step: int) -> None:
        # TensorBoard's own readers treat this event as the mark of a restart.
        started = self._session_log(status=self._session_log.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, session_log=started))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MetricsLog:
    """Appends metrics to ``run_dir/metrics.jsonl`` and, on request, to ``run_dir/tensorboard``.

    Flushes each line, so a run that dies keeps every step that it finished. Not thread-safe.

    Attributes:
        path: The JSON-lines file.
        records: All records logged through this object, in order, equal to the last lines of the file.

    Raises:
        ConfigError: If ``tensorboard`` is True and it is not installed. No file has been made then.
    """

    def __init__(self, run_dir: Path, *, tensorboard: bool) -> None:
        self._tensorboard = _TensorBoardWriter(run_dir / "tensorboard") if tensorboard else None
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        self.records: list[Mapping[str, Any]] = []
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """Writes one line ``{"step": step, **metrics}``.

        A float that is not finite is written as ``null``, because JSON has no such number, and named in a warning.
        TensorBoard gets the original value. Text goes to the file only.

        Args:
            step: Training step, counted from 1.
            metrics: Values by verl-like name, e.g. ``{"reward/mean": 0.4}``.
        """
        broken = {
            name: value for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)
        }
        if broken:
            named = ", ".join(f"{name} = {value}" for name, value in broken.items())
            logger.warning("step %d: not a finite number: %s; written as null to %s", step, named, self.path)
        record: dict[str, Any] = {"step": step, **metrics, **dict.fromkeys(broken)}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self.records.append(record)
        if self._tensorboard:
            self._tensorboard.write(step, [(n, float(v)) for n, v in metrics.items() if not isinstance(v, str)])

    def forget_after(self, step: int) -> None:
        """Drops the records of later steps, which the run will repeat."""
        kept = [record for record in self.records if record["step"] <= step]
        if len(kept) == len(self.records):
            return
        # Lines that this object did not write were there before it, and stay.
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        self._file.close()
        written = self.path.with_name(self.path.name + ".tmp")
        written.write_text("".join(lines[: len(lines) - len(self.records) + len(kept)]), encoding="utf-8")
        written.replace(self.path)
        self._file, self.records = self.path.open("a", encoding="utf-8"), kept
        if self._tensorboard:
            self._tensorboard.forget_from(step + 1)

    def close(self) -> None:
        """Closes both files. Idempotent."""
        try:
            self._file.close()
        except OSError as error:  # raised for a line that `log` could not write either
            logger.warning("%s lacks its last line: %s", self.path, error)
        if self._tensorboard:
            self._tensorboard.close()
            self._tensorboard = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
