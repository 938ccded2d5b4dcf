"""Adds to a host's vLLM worker a check that reads weights back after a sync. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.read_back import ReadBack, engine_rank, obstacle
from rl_safe_workers.rollout.sync_proof import HeldWeights


class ProvedWorker:
    """Mixin for a host's extension of a vLLM worker. List it before the host's class among the bases."""

    model_runner: Any
    rank: int
    """vLLM's worker sets this and `model_runner`."""
    _rl_safe_is_due = False
    """True if the next sync is to be proved."""
    _rl_safe_read_back: ReadBack | None = None
    _rl_safe_last: HeldWeights | None = None

    def rl_safe_prove(self) -> str | None:
        """Makes the next sync a proved one. Returns the reason if that is impossible, else None."""
        self._rl_safe_is_due, self._rl_safe_last = True, None
        return obstacle(self.model_runner.vllm_config)

    def rl_safe_held(self) -> dict[str, Any] | None:
        """Returns the fields of the last sync's `HeldWeights`; None if no sync has come since the last call."""
        held, self._rl_safe_last = self._rl_safe_last, None
        return None if held is None else held.as_dict()

    @contextmanager
    def _rl_safe_proving(self) -> Iterator[None]:
        """Reads the weights back after the body if a proof is due. The body gets them and calls `_rl_safe_watch`."""
        try:
            yield
            if self._rl_safe_read_back is not None:
                self._rl_safe_last = self._rl_safe_read_back.finish()
        finally:
            if self._rl_safe_read_back is not None:
                self._rl_safe_read_back.stop()
            self._rl_safe_is_due, self._rl_safe_read_back = False, None

    def _rl_safe_watch(self, specs: Sequence[WeightSpec]) -> None:
        """Starts to read each weight before a layer converts it, if a proof is due.

        Args:
            specs: All weights of the sync.
        """
        if self._rl_safe_is_due:
            rank = engine_rank(self.model_runner.vllm_config, self.rank)
            self._rl_safe_read_back = ReadBack(self.model_runner.model, specs, rank)
            self._rl_safe_read_back.watch()
