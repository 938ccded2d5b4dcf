"""A host's part of a vLLM worker, which reads weights back after a sync. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.read_back import ReadBack, obstacle
from rl_safe_workers.rollout.sync_proof import HeldWeights


class ProvedWorker:
    """Mixin for a host's extension of a vLLM worker. List it before that class among the bases."""

    model_runner: Any
    _rl_safe_is_due = False
    """True if the next sync is to be proved."""
    _rl_safe_read_back: ReadBack | None = None
    _rl_safe_last: HeldWeights | None = None

    def rl_safe_prove(self) -> str | None:
        """Has the next sync proved. Returns the reason why it cannot be; None if it can."""
        self._rl_safe_is_due, self._rl_safe_last = True, None
        return obstacle(self.model_runner.vllm_config)

    def rl_safe_held(self) -> dict[str, Any] | None:
        """Returns the fields of the weights that the last sync has left; None if none has come since the last call."""
        held, self._rl_safe_last = self._rl_safe_last, None
        return None if held is None else asdict(held)

    @contextmanager
    def _rl_safe_proving(self) -> Iterator[None]:
        """Reads weights back at the end of the body, which receives them and calls `_rl_safe_watch`, if it is due."""
        try:
            yield
            if self._rl_safe_read_back is not None:
                self._rl_safe_last = self._rl_safe_read_back.finish()
        finally:
            if self._rl_safe_read_back is not None:
                self._rl_safe_read_back.stop()
            self._rl_safe_is_due, self._rl_safe_read_back = False, None

    def _rl_safe_watch(self, specs: Sequence[WeightSpec]) -> None:
        """Reads weights before layers convert them, from here on, if the sync is to be proved.

        Args:
            specs: All weights of the sync.
        """
        if self._rl_safe_is_due:
            self._rl_safe_read_back = ReadBack(self.model_runner.model, specs)
            self._rl_safe_read_back.watch()
